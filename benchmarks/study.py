"""Runs the comparison of all methods in `benchmarks/research/study/`."""

from benchmarks.research.study.__main__ import main

if __name__ == "__main__":
    main()
