"""What a clip adds to a step on a TPU v5e, counted in the compiled program."""

import aims
import jax
import pytest
from cases import slow_unless

V5E = "v5e"


@pytest.mark.parametrize(("dtype", "method"), aims.EACH_ON_TPU)
def test_clips_move_few_more_bytes_than_optax(both, dtype, method):
    is_narrow = dtype == "bfloat16"
    more = aims.MORE_MOVED_BY_TPU_BFLOAT16 if is_narrow else aims.MORE_MOVED
    # What AGC moves is held against the gradients' bytes too, all others' against Optax's only.
    steps = both(V5E, dtype=dtype, method=method, whole=method != "agc")
    aims.assert_as_cheap(method, dtype, *steps, more_moved=more)


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
    # A device's share lies in fast memory, partly.
    assert ours.moved <= theirs.moved + aims.MORE_IN_FAST_MEMORY


def test_adaptive_grad_clip_reads_named_layers_twice(ours):
    found = ours(V5E, "layers8", "bfloat16", "auto", method="agc_of_layers")
    aims.assert_no_branch(found)
    assert +found.counts.collectives == {"all-reduce": 1, "all-gather": 2}
    assert found.moved <= aims.MOVED_BY_AGC_OF_LAYERS_ON_TPU


@pytest.mark.parametrize("mesh", slow_unless(lambda mesh: mesh == "one", ["one", "shard_map"]))
def test_histogram_reads_once_only_on_counted_steps(mesh):
    aims.assert_counts_in_one_read(V5E, mesh)


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

    chosen = per_example.LARGE["convolutions"](jax.numpy.bfloat16)
    plain, ghost = (
        per_example.compiled_for(V5E, chosen, run)
        for run in (per_example.plain(chosen), per_example.ours(chosen, "ghost", None))
    )
    moved = [found.counts.read + found.counts.written for found in (plain, ghost)]
    # The sum is in float32, which alone adds 0.27.
    assert moved[1] <= 1.5 * moved[0]
    assert ghost.counts.branches == 0
