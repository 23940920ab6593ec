"""Compares counts with programs whose counts are known."""

import jax
import jax.numpy as jnp
import pytest

ADAMW = 7.0  # Reads parameters, gradients and two moments, and writes all but the gradients.


@pytest.mark.parametrize("device", ["h100", "v5e"])
@pytest.mark.parametrize("kind", ["one", "auto"])
def test_counts_match_adamw_reads_and_writes(device, kind):
    from benchmarks.accelerators.methods import build_adamw
    from benchmarks.accelerators.steps import Placement, compile_step

    shapes = {"a": (1024, 2048), "b": (2048, 512), "c": (512,)}
    run = compile_step(build_adamw(), shapes, jnp.float32, Placement(device, kind))
    moved = (run.counts.read + run.counts.written) / run.gradients
    assert moved == pytest.approx(ADAMW, abs=1e-3)
    assert run.counts.branches == run.counts.loops == 0
    assert not run.counts.collectives


def test_timed_counts_cheapest_branch_if_requested():
    from benchmarks.accelerators.steps import Placement, compile_program

    replicated = Placement("h100").replicated
    flag, x = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)
        for shape, dtype in (((), jnp.bool_), ((1024, 1024), jnp.float32))
    )

    def step(flag, x, y):
        return jax.lax.cond(flag, lambda: x, lambda: x @ y)

    runs = [
        compile_program(step, (flag, x, x), 1, (), cheapest_branches=asked)
        for asked in (False, True)
    ]
    assert [run.counts.branches for run in runs] == [1, 1]
    assert [run.counts.read for run in runs] == pytest.approx([0, 4 * x.size], abs=99)


@pytest.mark.parametrize("device", ["h100", "v5e"])
def test_timed_counts_loop_reads_once_per_slice(device):
    """The TPU compiler does not report trip counts, and slices before it sorts."""
    from benchmarks.accelerators.steps import Placement, compile_program

    x = jax.ShapeDtypeStruct((64, 4096), jnp.float32, sharding=Placement(device).replicated)

    def total(x):
        def add(i, total):
            return total + jnp.sort(jax.lax.dynamic_index_in_dim(x, i, keepdims=False))[0]

        return jax.lax.fori_loop(0, len(x), add, 0.0)

    counts = compile_program(total, (x,), 1, ()).counts
    assert counts.loops == 1
    # Sorting may store and read a slice in many passes, but not the whole array.
    assert 1 <= counts.read / (4 * x.size) < 5
