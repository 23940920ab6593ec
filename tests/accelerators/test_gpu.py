"""Checks the overhead of clipping in steps that are compiled for an H100."""

import functools

import aims
import jax
import pytest
from cases import slow_unless

import optaxclip._backend.kernels as kernels

H100 = "h100"


@pytest.mark.parametrize("model", aims.TRANSFORMERS)
@pytest.mark.parametrize(("dtype", "method"), aims.EACH)
def test_clips_move_few_more_bytes_than_optax(both, model, dtype, method):
    ours, theirs = both(H100, model, dtype=dtype, method=method)
    aims.assert_overhead_matches_optax(method, dtype, ours, theirs)
    assert ours.counts.kernels <= theirs.counts.kernels + aims.max_extra_kernels(method)


def test_small_equal_leaves_share_kernels(both):
    ours, theirs = both(H100, "small", "bfloat16")
    assert ours.counts.kernels <= theirs.counts.kernels / 4


@pytest.mark.slow
def test_adaptive_grad_clip_stores_no_short_bfloat16_columns(ours):
    moved = ours(H100, "resnet14", "bfloat16", method="agc").moved
    assert moved <= aims.MOVED_BY_AGC_OF_CONVOLUTIONS


def test_adaptive_grad_clip_stores_no_narrow_bfloat16_columns(ours):
    moved = ours(H100, "keys", "bfloat16", method="agc").moved
    assert moved <= aims.MOVED_BY_AGC_OF_COLUMNS


def test_adaptive_grad_clip_reads_named_layers_twice(ours):
    run = ours(H100, "layers8", "bfloat16", method="agc_of_layers")
    aims.assert_no_branch(run)
    assert run.moved <= aims.MOVED_BY_AGC_OF_LAYERS


def test_skip_record_and_zclip_share_single_read(both):
    """With four layers, optaxclip has fewer kernels per layer than Optax's skip, but a few more."""
    ours, theirs = both(H100, method="skip_record_zclip")
    aims.assert_no_branch(ours)
    assert ours.moved <= aims.MOVED_BY_ALL
    assert ours.counts.kernels <= theirs.counts.kernels + aims.KERNELS_OF_ALL


@pytest.mark.parametrize("model", aims.TRANSFORMERS)
def test_scale_loss_shares_read_with_clip(both, model):
    ours, theirs = both(H100, model, method="scale_loss")
    aims.assert_no_branch(ours)
    assert ours.moved == pytest.approx(1.0, abs=aims.MORE_MOVED)
    assert ours.counts.kernels <= theirs.counts.kernels + aims.KERNELS_OF_SCALE


@pytest.mark.parametrize(
    "mesh", slow_unless(lambda mesh: mesh == "one", ["one", "auto", "explicit", "shard_map"])
)
def test_histogram_reads_once_only_on_counted_steps(mesh):
    aims.assert_histogram_reads_once(H100, mesh)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model", aims.TRANSFORMERS)
@pytest.mark.parametrize("dtype", aims.DTYPES)
def test_statistics_share_read_with_clip(ours, model, dtype):
    run = ours(H100, model, dtype=dtype, method="statistics")
    aims.assert_no_branch(run)
    assert run.moved == pytest.approx(1.0, abs=aims.MORE_MOVED)


@pytest.mark.parametrize(("method", "inner"), aims.EVENTS)
def test_events_share_read_with_wrapped_transformation(ours, method, inner):
    run, without = ours(H100, method=method), ours(H100, method=inner)
    aims.assert_no_branch(run)
    assert run.moved <= without.moved + aims.MORE_MOVED
    assert run.counts.kernels <= without.counts.kernels + aims.KERNELS_OF_EVENTS


@pytest.mark.parametrize("model", aims.TRANSFORMERS)
def test_statistics_read_params_at_most_once(ours, model):
    run = ours(H100, model, method="statistics_params")
    aims.assert_no_branch(run)
    # AdamW reads the parameters anyway, and some statistics are computed in the same pass.
    assert run.moved <= 2.0 + aims.MORE_MOVED


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model", aims.TRANSFORMERS)
@pytest.mark.parametrize(
    "mesh", slow_unless(lambda mesh: mesh == "auto", ["auto", "explicit", "shard_map"])
)
def test_statistics_need_only_all_reduces_on_mesh(ours, model, mesh):
    run = ours(H100, model, mesh=mesh, method="statistics")
    aims.assert_no_branch(run)
    assert run.moved == pytest.approx(1.0, abs=aims.MORE_MOVED)
    assert set(+run.counts.collectives) == {"all-reduce"}


@functools.cache
def count_unshared_kernels(model):
    """Returns the added kernels on one device without shared kernels, as on several devices."""
    from benchmarks.accelerators.cases import NONE, Case

    case = Case(H100, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_BATCH_SIZE", 1)
        run = case.compile(aims.OURS)
    return (run.counts - case.canonicalize(NONE).compile(NONE).counts).kernels


@pytest.mark.by_day(3)
@pytest.mark.parametrize("model", aims.TRANSFORMERS)
@pytest.mark.parametrize("mesh", ["auto", "explicit", "shard_map", "auto+specs", "explicit+specs"])
def test_global_norm_clip_uses_single_all_reduce(both, model, mesh):
    ours, theirs = both(H100, model, mesh=mesh)
    aims.assert_no_branch(ours)
    assert ours.moved == pytest.approx(1.0, abs=aims.MORE_MOVED)
    assert +ours.counts.collectives == {"all-reduce": 1}
    # If shardings are unknown, XLA combines the all-reduces of the leaves and splits the result
    # with one kernel per leaf. The same is true for Optax.
    like = theirs.counts.kernels + aims.KERNELS if mesh == "auto" else count_unshared_kernels(model)
    assert ours.counts.kernels <= like + aims.KERNELS_OF_DEVICES


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model", aims.TRANSFORMERS)
@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_adaptive_grad_clip_gathers_norms_once(both, model, mesh):
    """If only the compiler knows the shardings, norms are gathered once."""
    ours, theirs = both(H100, model, mesh=mesh, method="agc")
    aims.assert_no_branch(ours)
    gathers = {"all-gather": 1} if mesh == "auto" else {}
    assert +ours.counts.collectives == {"all-reduce": 1} | gathers
    assert ours.counts.kernels <= theirs.counts.kernels + aims.max_extra_kernels("agc")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("method", aims.SEEDS)
def test_seeds_in_scan_compile_without_branches(both, method):
    ours, theirs = both(H100, "seeds", method=method, whole=True)
    aims.assert_no_branch(ours)
    assert ours.counts.kernels <= theirs.counts.kernels + aims.max_extra_kernels(method)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("dtype", aims.DTYPES)
@pytest.mark.parametrize("size", aims.EXAMPLES)
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # jax-privacy calls it
def test_clipped_grad_costs_no_more_than_jax_privacy(both, dtype, size):
    ours, theirs = both(H100, f"examples-{size}", dtype)
    assert ours.moved <= theirs.moved * aims.EQUAL
    assert ours.temporary <= theirs.temporary * aims.EQUAL


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model", aims.OF_EXAMPLES)
def test_ghost_norms_move_few_bytes(model):
    from benchmarks import per_example

    model_spec = per_example.LARGE[model](jax.numpy.bfloat16)
    plain, ghost = (
        per_example.compile_for(H100, model_spec, run)
        for run in (
            per_example.compute_plain_grad(model_spec),
            per_example.clip_grads(model_spec, "ghost", None),
        )
    )
    moved = [run.counts.read + run.counts.written for run in (plain, ghost)]
    assert moved[1] <= aims.MOVED_FOR_EXAMPLES[model] * moved[0]
    # The branch recomputes norms from gradients if cancellation made them inaccurate.
    assert ghost.counts.branches <= 1


def test_accumulate_rejection_copies_gradients_only_once():
    from benchmarks.accumulating import count_work

    scan, plain, rejecting = (
        count_work(H100, 64, name)
        for name in ("a scan by hand", "accumulate, compute_norms=False", "accumulate")
    )
    for x in ("read", "written", "temporary"):
        assert plain[x] <= scan[x] + aims.MORE_MOVED
    # A gradient is written, then read for the norm, and read again for the sum.
    assert rejecting["read"] <= scan["read"] + 2 + aims.MORE_MOVED
    assert rejecting["written"] <= scan["written"] + 1 + aims.MORE_MOVED
    assert rejecting["temporary"] <= 1.1
    assert (plain["branches"], rejecting["branches"]) == (0, 0)


def test_accumulate_without_measuring_reduces_gradients_after_loop():
    from benchmarks.accelerators.steps import Placement
    from benchmarks.accumulating import NUMBER, build_shapes, loss_fn
    from optaxclip import accumulate

    placement = Placement(H100, "auto").replicated
    params, x = build_shapes(64, placement)
    x = x.update(sharding=placement.update(spec=jax.P(placement.mesh.axis_names[0])))

    def reduces_after_loop(**options):
        grad_fn = accumulate.value_and_grad(
            loss_fn, microbatch_size=x.shape[0] // NUMBER, **options
        )
        text = jax.jit(grad_fn).lower(params, x).compile().as_text()
        assert "all-reduce" in text
        return "all-reduce" in text[text.index("\nENTRY") :]

    assert reduces_after_loop(reject_rule=None, compute_norms=False)
    assert not reduces_after_loop()
