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
      dtypes: of the gradients; the steps take those that optimizers can train in.
      entries: of the one large leaf.
      accumulated: over how many gradients the steps go, each a case.
      layers: of the transformers.
      width: of the transformer in the steps.
      narrow: of the transformer whose clip is called outside of `jit`.
      leaf_counts: how many small leaves.
      eager_leaves: how many of them outside of `jit`.
      small_leaf: the entries of each.
      totals: how many entries to grow to.
      splits: into how many leaves to split a tenth of the most.
      models: layers and width of the transformers for accelerators.
      network: the widths of a small one.
      seeds: how many of it are trained at once.
      scanned: the steps that they are trained for.
    """

    rounds: int
    repetitions: int
    dtypes: tuple[str, ...]
    entries: int
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
    entries=1 << 25,
    accumulated=(1, 2),
    layers=6,
    width=768,
    narrow=256,
    leaf_counts=(100, 200, 300, 1000),
    eager_leaves=200,
    small_leaf=1000,
    totals=(10**6, 10**7, 10**8),
    splits=(10, 100, 1000),
    # 50 million entries, 500 million, 5 thousand million.
    models=((6, 768), (25, 1280), (32, 3584)),
    network=(32, 64, 64, 10),
    seeds=64,
    scanned=100,
)
QUICK = Effort(
    rounds=5,
    repetitions=1,
    dtypes=("float32", "bfloat16"),
    entries=1 << 22,
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
