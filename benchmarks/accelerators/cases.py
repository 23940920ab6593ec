"""What is compared with what."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from benchmarks.accelerators.counting import Counts
from benchmarks.accelerators.methods import METHODS, NONE, OURS, THEIRS, Step, adamw
from benchmarks.accelerators.models import MODELS
from benchmarks.accelerators.networks import examples, seeds
from benchmarks.accelerators.steps import KINDS, ONE, SHARD_MAP, Compiled, Place, compiled

FLOAT32, BFLOAT16, H100, V5E = "float32", "bfloat16", "h100", "v5e"
SPECS, SEEDS, EXAMPLES = "+specs", "seeds", "examples-"
MESHES = [ONE, *(kind + told for kind in KINDS for told in ("", SPECS))]
SIZES = (8, 32, 256)
ALL_MODELS = [*MODELS, SEEDS, *(f"{EXAMPLES}{size}" for size in SIZES)]
WAYS = (NONE, OURS, THEIRS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: a method in a step of a model, on a device or on a mesh of eight."""

    device: str
    model: str = "transformer4"
    dtype: str = FLOAT32
    mesh: str = ONE
    method: str = "global_norm"

    @property
    def is_of_examples(self) -> bool:
        """Whether it is no step of an optimizer, but clipped gradients of examples."""
        return self.model.startswith(EXAMPLES)

    def of(self, way: str) -> "Case":
        """The case with the same program: there is one without a clip, and few of Optax's."""
        if way == OURS:
            return self
        kind, theirs = self.mesh.removesuffix(SPECS), METHODS[self.method][1]
        method = next(name for name in METHODS if way == NONE or METHODS[name][1] is theirs)
        if way == THEIRS and kind != ONE:
            # In `shard_map` its clips would measure each shard; its AGC refuses explicit meshes.
            kind = "auto"
        return dataclasses.replace(self, mesh=kind, method=method)

    def compile(self, way: str) -> Compiled:
        """The program of `of(way)`, compiled from empty caches."""
        if self.is_of_examples:
            size = int(self.model.removeprefix(EXAMPLES))
            return examples(way, self.device, self.dtype, size)
        if self.model == SEEDS:
            return seeds(self._tx(way), self.device)
        place, shapes = Place(self.device, self.mesh.removesuffix(SPECS)), MODELS[self.model]()
        told = {"specs": place.shardings(shapes)} if self.mesh.endswith(SPECS) else {}
        return compiled(self._tx(way, **told), shapes, self.dtype, place)

    def _tx(self, way: str, **told: object) -> Step:
        ours, theirs = METHODS[self.method]
        return {NONE: adamw, OURS: ours, THEIRS: theirs}[way](**told)


@dataclasses.dataclass(frozen=True)
class Added:
    """What a way adds to the step without a clip; bytes in those of the gradients."""

    read: float
    written: float
    temporary: float
    counts: Counts

    @property
    def moved(self) -> float:
        """Read and written."""
        return self.read + self.written


def added(run: Compiled, plain: Compiled | None) -> Added:
    """Of examples, which have no plain step, all that there is; branches and loops always so."""
    counts = run.counts - plain.counts if plain else run.counts
    counts = dataclasses.replace(counts, branches=run.counts.branches, loops=run.counts.loops)
    temporary = run.temporary - (plain.temporary if plain else 0)
    size = run.gradients
    return Added(counts.read / size, counts.written / size, temporary / size, counts)


def product(*axes: Iterable[str]) -> Iterator[Case]:
    """Cases of devices, models, dtypes, meshes and methods; of examples there is one method."""
    first = next(iter(axes[-1]))
    for case in itertools.starmap(Case, itertools.product(*axes)):
        if not case.is_of_examples or case.method == first:
            yield case


BOTH, DTYPES = (H100, V5E), (FLOAT32, BFLOAT16)
NAMED = ("global_norm", "zclip", "autoclip", "block_rms", "adagc", "agc")
STATISTICS = ("statistics", "statistics_params")
EVENTS = ("events", "events_of_leaves", "events_of_skip")
WRAPPED = ("record", *EVENTS, *STATISTICS, "skip_above", "skip_nonfinite", "skip_record_zclip")
GLOBAL_NORM, AGC = ("global_norm",), ("agc",)
FEW = GLOBAL_NORM + AGC
AUTO = ("auto",)
# In `shard_map` AGC has to be told which axes are split.
AGC_MESHES = (*AUTO, "explicit", f"{SHARD_MAP}{SPECS}")
COUNTED: dict[str, list[Case]] = {
    "On one device": [*product(BOTH, ("transformer4",), DTYPES, (ONE,), NAMED)],
    "A model that fits into VMEM": [*product((V5E,), ("vmem",), DTYPES, (ONE,), NAMED)],
    "ResNet-50": [*product(BOTH, ("resnet50",), DTYPES, (ONE,), FEW)],
    "GPT-2": [
        *product((H100,), ("gpt2",), (FLOAT32,), (ONE,), NAMED),
        *product((H100,), ("gpt2",), (BFLOAT16,), (ONE,), FEW),
        *product((V5E,), ("gpt2",), DTYPES, (ONE,), FEW),
    ],
    # One v5e has no room for it: 16 GB, where parameters, gradients and moments are 64.
    "Llama 3 8B": [
        *product((H100,), ("llama8b_stacked", "llama8b"), (BFLOAT16,), (ONE,), FEW),
        *product(("v5p",), ("llama8b_stacked",), (BFLOAT16,), (ONE,), GLOBAL_NORM),
        *product((V5E,), ("llama8b_stacked",), (BFLOAT16,), AUTO, FEW),
        *product((V5E,), ("llama8b",), (BFLOAT16,), AUTO, GLOBAL_NORM),
    ],
    "Skips around, a record before": [
        *product(BOTH, ("transformer4",), (FLOAT32,), (ONE,), WRAPPED),
    ],
    "Eight devices": [
        *product(BOTH, ("transformer4",), (FLOAT32,), MESHES[1:], GLOBAL_NORM),
        *product((H100,), ("transformer4",), (FLOAT32,), AUTO, NAMED[1:-1]),
        *product(BOTH, ("transformer4",), (FLOAT32,), AGC_MESHES, AGC),
    ],
    "A step of 64 small networks in a scan": [
        *product(BOTH, (SEEDS,), (FLOAT32,), (ONE,), (*FEW, "zclip")),
    ],
    "Per-example clipping, all of it, beside jax-privacy's": [
        *product(BOTH, ALL_MODELS[-len(SIZES) :], DTYPES, (ONE,), GLOBAL_NORM),
    ],
}
TIMED: dict[str, list[Case]] = {
    "To compile": [
        *product((H100,), ("transformer4",), DTYPES, (ONE,), NAMED),
        *product((V5E,), ("transformer4",), (FLOAT32,), (ONE,), NAMED),
        *product(BOTH, ("resnet50",), (FLOAT32,), (ONE,), FEW),
    ],
}
