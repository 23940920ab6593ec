"""Which cases of a test are slow: even a package by itself leaves them to CI."""

import jax
import pytest

NEEDS_JAX_0_10_2 = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="earlier versions of JAX mix up memories and meshes"
)


def slow_unless(quick, cases):
    """All cases for `parametrize`; those are slow of whose values `quick` does not hold."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow) for row in rows]
