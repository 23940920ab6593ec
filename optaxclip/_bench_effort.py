"""How much work the benchmarks do."""

import dataclasses
from collections.abc import Callable

# Told the name of each case before it begins.
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes and repetitions.

    Attributes:
      rounds: how often each way runs.
      repetitions: how often each is compiled.
      entries: of the one large leaf.
      layers: of the transformers.
      width: of the transformer in the steps.
      narrow: of the transformer whose clip is called outside of `jit`.
      leaf_counts: how many small leaves.
      small_leaf: the entries of each.
      totals: how many entries to grow to.
      splits: into how many leaves to split a tenth of the most.
    """

    rounds: int
    repetitions: int
    entries: int
    layers: int
    width: int
    narrow: int
    leaf_counts: tuple[int, ...]
    small_leaf: int
    totals: tuple[int, ...]
    splits: tuple[int, ...]


FULL = Effort(
    rounds=21,
    repetitions=5,
    entries=1 << 25,
    layers=6,
    width=768,
    narrow=256,
    leaf_counts=(100, 200, 300, 1000),
    small_leaf=1000,
    totals=(10**6, 10**7, 10**8),
    splits=(10, 100, 1000),
)
QUICK = Effort(
    rounds=5,
    repetitions=1,
    entries=1 << 22,
    layers=2,
    width=192,
    narrow=64,
    leaf_counts=(100,),
    small_leaf=1000,
    totals=(10**6, 10**7),
    splits=(10, 100),
)
