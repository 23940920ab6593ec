"""Defines the sizes and repetitions of the benchmarks."""

import dataclasses
from collections.abc import Callable

# Called with the name of a case before it starts.
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes and repetitions.

    Attributes:
      rounds, repetitions: The numbers of runs and compilations per variant.
      dtypes: The dtypes of the gradients. Steps do not use float16.
      num_elements: The number of elements of the large leaf.
      accumulated: The numbers of accumulated gradients per step.
      layers: The layers of the transformers.
      width, narrow: The widths of the transformers in steps and outside `jit`.
      leaf_counts, eager_leaves: The numbers of small leaves inside and outside `jit`.
      small_leaf: The number of elements of a small leaf.
      totals: The total numbers of elements in 10 leaves.
      splits: The numbers of leaves for a tenth of the largest total.
      models: Layers and widths of the transformers for accelerators.
      network: The layer widths of the small network.
      seeds: The number of small networks that are trained together.
      scanned: The number of steps in a scan.
    """

    rounds: int
    repetitions: int
    dtypes: tuple[str, ...]
    num_elements: int
    accumulated: tuple[int, ...]
    layers: int
    width: int
    narrow: int
    leaf_counts: tuple[int, ...]
    eager_leaves: int
    small_leaf: int
    totals: tuple[int, ...]
    splits: tuple[int, ...]
    models: tuple[tuple[int, int], ...]
    network: tuple[int, ...]
    seeds: int
    scanned: int


FULL = Effort(
    rounds=15,
    repetitions=7,
    dtypes=("float32", "bfloat16", "float16"),
    num_elements=1 << 25,
    accumulated=(1, 2),
    layers=6,
    width=768,
    narrow=256,
    leaf_counts=(100, 200, 300, 1000),
    eager_leaves=200,
    small_leaf=1000,
    totals=(10**6, 10**7, 10**8),
    splits=(10, 100, 1000),
    # 50 million, 500 million and 5 billion elements.
    models=((6, 768), (25, 1280), (32, 3584)),
    network=(32, 64, 64, 10),
    seeds=64,
    scanned=100,
)
QUICK = Effort(
    rounds=5,
    repetitions=1,
    dtypes=("float32", "bfloat16"),
    num_elements=1 << 22,
    accumulated=(1,),
    layers=1,
    width=384,
    narrow=64,
    leaf_counts=(100,),
    eager_leaves=200,
    small_leaf=1000,
    totals=(10**6, 10**7),
    splits=(10, 100),
    models=((1, 384), (6, 768)),
    network=(32, 64, 64, 10),
    seeds=64,
    scanned=10,
)
