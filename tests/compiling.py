"""How programs are compiled in tests whose results depend on it, and what comes out."""

import math
import re

import jaxlib
import pytest

AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if jaxlib.version.__version_info__ < (0, 11):  # later versions know no other way
    AS_USERS["xla_cpu_use_fusion_emitters"] = True
"""What `conftest.py` turns off to save time; for `jax.jit(..., compiler_options=AS_USERS)`."""


def collectives(compiled):
    """How often each collective occurs in a compiled module."""
    text = compiled.as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


def most_gathered(compiled):
    """The number of entries of the largest array that is gathered from all devices."""
    types = re.findall(r"= (.*?) all-gather(?:-start)?\(", compiled.as_text())
    shapes = [shape for each in types for shape in re.findall(r"\w\[([\d,]*)\]", each)]
    return max((math.prod(map(int, shape.split(","))) for shape in shapes if shape), default=0)


where_sums_are_fused = pytest.mark.skipif(
    jaxlib.version.__version_info__ < (0, 10, 2),
    reason="until jaxlib 0.10.1 XLA on CPU stores what a long sum is of",
)
"""For tests of how much memory a program takes."""
