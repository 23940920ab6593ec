"""How programs are compiled where results depend on it, what comes out, and what waits for CI."""

import re

import jaxlib
import pytest

AS_USERS = {
    "xla_cpu_use_fusion_emitters": True,
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
"""What `conftest.py` turns off to save time; for `jax.jit(..., compiler_options=AS_USERS)`."""


def collectives(compiled):
    """How often each collective occurs in a compiled module."""
    text = compiled.as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


def slow_unless(quick, cases):
    """All cases for `parametrize`; those are slow of whose values `quick` does not hold."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow) for row in rows]


where_sums_are_fused = pytest.mark.skipif(
    jaxlib.version.__version_info__ < (0, 10, 2),
    reason="until jaxlib 0.10.1 XLA on CPU stores what a long sum is of",
)
"""For tests of how much memory a program takes."""
