"""Checks the overhead of clipping in steps that are compiled for a TPU v5e."""

import aims
import jax
import pytest
from cases import slow_unless

V5E = "v5e"


@pytest.mark.parametrize(("dtype", "method"), aims.EACH_ON_TPU)
def test_clips_move_few_more_bytes_than_optax(both, dtype, method):
    is_narrow = dtype == "bfloat16"
    more = aims.MORE_MOVED_BY_TPU_BFLOAT16 if is_narrow else aims.MORE_MOVED
    # The bytes of AGC are also compared with the gradients, and of other methods only with Optax.
    steps = both(V5E, dtype=dtype, method=method, whole=method != "agc")
    aims.assert_overhead_matches_optax(method, dtype, *steps, more_moved=more)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", aims.DTYPES)
@pytest.mark.parametrize("model", aims.IN_FAST_MEMORY)
def test_fast_memory_clips_move_few_extra_bytes(both, model, dtype):
    ours, theirs = both(V5E, model, dtype, whole=True)
    aims.assert_no_branch(ours)
    assert ours.moved <= theirs.moved + aims.MORE_IN_FAST_MEMORY


@pytest.mark.parametrize("model", aims.TRANSFORMERS)
def test_global_norm_clip_uses_single_all_reduce(both, model):
    ours, theirs = both(V5E, model, mesh="auto")
    aims.assert_no_branch(ours)
    assert +ours.counts.collectives == {"all-reduce": 1}
    # The shards are partly in fast memory.
    assert ours.moved <= theirs.moved + aims.MORE_IN_FAST_MEMORY


def test_adaptive_grad_clip_reads_named_layers_twice(ours):
    run = ours(V5E, "layers8", "bfloat16", "auto", method="agc_of_layers")
    aims.assert_no_branch(run)
    assert +run.counts.collectives == {"all-reduce": 1, "all-gather": 2}
    assert run.moved <= aims.MOVED_BY_AGC_OF_LAYERS_ON_TPU


@pytest.mark.parametrize("mesh", slow_unless(lambda mesh: mesh == "one", ["one", "shard_map"]))
def test_histogram_reads_once_only_on_counted_steps(mesh):
    aims.assert_histogram_reads_once(V5E, mesh)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("method", aims.SEEDS)
def test_seeds_in_scan_compile_without_branches(ours, method):
    aims.assert_no_branch(ours(V5E, "seeds", method=method, whole=True))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", aims.DTYPES)
@pytest.mark.parametrize("size", aims.EXAMPLES)
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # jax-privacy calls it
def test_clipped_grad_costs_no_more_than_jax_privacy(both, dtype, size):
    ours, theirs = both(V5E, f"examples-{size}", dtype)
    assert ours.moved <= theirs.moved * aims.EQUAL
    assert ours.temporary <= theirs.temporary * aims.EQUAL


@pytest.mark.slow
def test_ghost_norms_keep_convolutions_in_fast_memory():
    from benchmarks import per_example

    model_spec = per_example.LARGE["convolutions"](jax.numpy.bfloat16)
    plain, ghost = (
        per_example.compile_for(V5E, model_spec, run)
        for run in (
            per_example.compute_plain_grad(model_spec),
            per_example.clip_grads(model_spec, "ghost", None),
        )
    )
    moved = [run.counts.read + run.counts.written for run in (plain, ghost)]
    # The float32 sum adds 0.27.
    assert moved[1] <= 1.5 * moved[0]
    assert ghost.counts.branches == 0
