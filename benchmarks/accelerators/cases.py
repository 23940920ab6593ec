"""Defines the compared programs."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from benchmarks.accelerators.counting import Counts
from benchmarks.accelerators.methods import METHODS, NONE, OURS, THEIRS, Step, build_adamw
from benchmarks.accelerators.models import MODELS
from benchmarks.accelerators.networks import compile_examples, compile_seeds
from benchmarks.accelerators.steps import KINDS, ONE, SHARD_MAP, Compiled, Placement, compile_step

FLOAT32, BFLOAT16, H100, V5E = "float32", "bfloat16", "h100", "v5e"
SPECS, SEEDS, EXAMPLES = "+specs", "seeds", "examples-"
MESHES = [ONE, *(kind + suffix for kind in KINDS for suffix in ("", SPECS))]
SIZES = (8, 32, 256)
ALL_MODELS = [*MODELS, SEEDS, *(f"{EXAMPLES}{size}" for size in SIZES)]
VARIANTS = (NONE, OURS, THEIRS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A table row: a method in a step of a model, on one device or on a mesh of eight."""

    device: str
    model: str = "transformer4"
    dtype: str = FLOAT32
    mesh: str = ONE
    method: str = "global_norm"

    @property
    def is_per_example(self) -> bool:
        """Returns `True` for clipped per-example gradients without an optimizer."""
        return self.model.startswith(EXAMPLES)

    def canonicalize(self, variant: str) -> "Case":
        """Returns the case whose program the variant shares, because variants ignore options."""
        if variant == OURS:
            return self
        kind, theirs = self.mesh.removesuffix(SPECS), METHODS[self.method][1]
        method = next(name for name in METHODS if variant == NONE or METHODS[name][1] is theirs)
        if variant == THEIRS and kind != ONE:
            # In `shard_map`, Optax would compute the norms of shards. Its AGC does not support
            # explicit meshes.
            kind = "auto"
        return dataclasses.replace(self, mesh=kind, method=method)

    def compile(self, variant: str) -> Compiled:
        """Compiles a variant with empty caches."""
        if self.is_per_example:
            size = int(self.model.removeprefix(EXAMPLES))
            return compile_examples(variant, self.device, self.dtype, size)
        if self.model == SEEDS:
            return compile_seeds(self._build_step(variant), self.device)
        placement, shapes = (
            Placement(self.device, self.mesh.removesuffix(SPECS)),
            MODELS[self.model](),
        )
        options = {"specs": placement.get_shardings(shapes)} if self.mesh.endswith(SPECS) else {}
        return compile_step(self._build_step(variant, **options), shapes, self.dtype, placement)

    def _build_step(self, variant: str, **options: object) -> Step:
        ours, theirs = METHODS[self.method]
        return {NONE: build_adamw, OURS: ours, THEIRS: theirs}[variant](**options)


@dataclasses.dataclass(frozen=True)
class Overhead:
    """The overhead of a variant over a step without clipping, in multiples of gradient bytes."""

    read: float
    written: float
    temporary: float
    counts: Counts

    @property
    def moved(self) -> float:
        """Returns the sum of read and written bytes."""
        return self.read + self.written


def compute_overhead(run: Compiled, plain: Compiled | None) -> Overhead:
    """Subtracts the plain step, if there is one, but keeps the total of branches and loops."""
    counts = run.counts - plain.counts if plain else run.counts
    counts = dataclasses.replace(counts, branches=run.counts.branches, loops=run.counts.loops)
    temporary = run.temporary - (plain.temporary if plain else 0)
    size = run.gradients
    return Overhead(counts.read / size, counts.written / size, temporary / size, counts)


def build_cases(*axes: Iterable[str]) -> Iterator[Case]:
    """Yields all combinations of devices, models, dtypes, meshes and methods."""
    first = next(iter(axes[-1]))
    for case in itertools.starmap(Case, itertools.product(*axes)):
        if not case.is_per_example or case.method == first:  # Per-example programs have no method.
            yield case


DEVICE_NAMES, DTYPES = (H100, V5E), (FLOAT32, BFLOAT16)
NAMED = ("global_norm", "zclip", "autoclip", "block_rms", "adagc", "agc")
STATISTICS = ("statistics", "statistics_params")
EVENTS = ("events", "events_of_leaves", "events_of_skip")
WRAPPED = ("record", *EVENTS, *STATISTICS, "skip_above", "skip_nonfinite", "skip_record_zclip")
GLOBAL_NORM, AGC = ("global_norm",), ("agc",)
FEW = GLOBAL_NORM + AGC
AUTO = ("auto",)
# In `shard_map`, AGC requires the sharding of the parameters.
AGC_MESHES = (*AUTO, "explicit", f"{SHARD_MAP}{SPECS}")
COUNTED: dict[str, list[Case]] = {
    "On one device": [*build_cases(DEVICE_NAMES, ("transformer4",), DTYPES, (ONE,), NAMED)],
    "A model that fits into VMEM": [*build_cases((V5E,), ("vmem",), DTYPES, (ONE,), NAMED)],
    "ResNet-50": [*build_cases(DEVICE_NAMES, ("resnet50",), DTYPES, (ONE,), FEW)],
    "GPT-2": [
        *build_cases((H100,), ("gpt2",), (FLOAT32,), (ONE,), NAMED),
        *build_cases((H100,), ("gpt2",), (BFLOAT16,), (ONE,), FEW),
        *build_cases((V5E,), ("gpt2",), DTYPES, (ONE,), FEW),
    ],
    # A single v5e has 16 GB, but parameters, gradients and moments require 64 GB.
    "Llama 3 8B": [
        *build_cases((H100,), ("llama8b_stacked", "llama8b"), (BFLOAT16,), (ONE,), FEW),
        *build_cases(("v5p",), ("llama8b_stacked",), (BFLOAT16,), (ONE,), GLOBAL_NORM),
        *build_cases((V5E,), ("llama8b_stacked",), (BFLOAT16,), AUTO, FEW),
        *build_cases((V5E,), ("llama8b",), (BFLOAT16,), AUTO, GLOBAL_NORM),
    ],
    "Skips and recording": [
        *build_cases(DEVICE_NAMES, ("transformer4",), (FLOAT32,), (ONE,), WRAPPED)
    ],
    "Eight devices": [
        *build_cases(DEVICE_NAMES, ("transformer4",), (FLOAT32,), MESHES[1:], GLOBAL_NORM),
        *build_cases((H100,), ("transformer4",), (FLOAT32,), AUTO, NAMED[1:-1]),
        *build_cases(DEVICE_NAMES, ("transformer4",), (FLOAT32,), AGC_MESHES, AGC),
    ],
    "A step of 64 small networks in a scan": [
        *build_cases(DEVICE_NAMES, (SEEDS,), (FLOAT32,), (ONE,), (*FEW, "zclip"))
    ],
    "Per-example clipping, total, compared with jax-privacy": [
        *build_cases(DEVICE_NAMES, ALL_MODELS[-len(SIZES) :], DTYPES, (ONE,), GLOBAL_NORM)
    ],
}
TIMED: dict[str, list[Case]] = {
    "Compile time": [
        *build_cases((H100,), ("transformer4",), DTYPES, (ONE,), NAMED),
        *build_cases((V5E,), ("transformer4",), (FLOAT32,), (ONE,), NAMED),
        *build_cases(DEVICE_NAMES, ("resnet50",), (FLOAT32,), (ONE,), FEW),
    ]
}
