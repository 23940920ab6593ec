"""`python -m benchmarks.study`: which method helps? It is in `benchmarks/research/study/`."""

from benchmarks.research.study.__main__ import main

if __name__ == "__main__":
    main()
