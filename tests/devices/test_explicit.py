"""Explicit meshes, groups that are split: all rules, responses and policies, as in one piece."""

import contextlib
import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from cases import slow_unless
from compiling import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import clip, clip_by, clip_by_value, norms, ops, scopes, thresholds

RULES = {
    "constant": 1.0,
    "schedule": optax.linear_schedule(1.5, 0.5, 4),
    "relative_to_params": thresholds.relative_to_params(0.3),
    "zscore": thresholds.zscore(warmup_steps=1),
    "ema": thresholds.ema(ratio=0.9),
    "percentile": thresholds.percentile(50.0, window=2, warmup_steps=1),
    "adagc": thresholds.adagc(warmup_steps=1),
    "quantile": thresholds.quantile(0.5, init_threshold=1.0),
}
CASES = {rule: (rule, {}) for rule in RULES} | {
    f"{rule}, {part}": (rule, options)
    for rule in ("constant", "zscore")
    for part, options in {
        "smooth": {"response": "smooth"},
        "normalize": {"response": "normalize"},
        "auto_s": {"response": "auto_s", "norm": "l1"},
        "zero": {"nonfinite": "zero", "norm": "linf"},
        "mask": {"nonfinite": "mask", "norm": norms.lp(3)},
    }.items()
}
# What differs between scopes is how norms are held: not for each of them all, which takes long.
SOME = ["adagc", "constant, auto_s", "zscore, smooth", "zscore, mask"]
SCOPES = {
    "unit": (scopes.unit(), CASES, {"w": P("x", "y"), "b": P("y")}),
    "leaf": (scopes.leaf(stacked=1), SOME, {"w": P("x"), "b": P("x")}),
    "member": (scopes.ensemble_member(), SOME, {"w": P("x", "y"), "b": P("x")}),
    "axes": (scopes.axes(1), SOME, {"w": P("x", "y"), "b": P(None, ("x", "y"))}),
}


def trees(specs):
    """Parameters and the gradients of two steps, of which the second has a NaN."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 4), "b": (8,) * len(specs["b"])}
    params, steps = (
        {x: rng.normal(size=(*leading, *shape)).astype(np.float32) for x, shape in shapes.items()}
        for leading in ((), (2,))
    )
    steps["w"][1, 5, 2] = np.nan
    return params, steps


def two_steps(scope, cases, params, steps):
    """The updates and the records of all cases."""
    found = {}
    for case in cases:
        rule, options = CASES[case]
        tx = clip_by(scope, RULES[rule], **options)

        def step(state, grads, tx=tx):
            return tx.update(grads, state, params)[::-1]

        state, updates = jax.lax.scan(step, tx.init(params), steps)
        found[case] = (updates, state.info)
    return found


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "leaf", SCOPES))
def test_rules_responses_and_policies_support_explicit_meshes(name):
    scope, cases, specs = SCOPES[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    places = {x: NamedSharding(mesh, spec) for x, spec in specs.items()}
    over_steps = {x: NamedSharding(mesh, P(None, *spec)) for x, spec in specs.items()}
    run = jax.jit(functools.partial(two_steps, scope, cases))
    whole = trees(specs)
    found, expected = run(*jax.device_put(whole, (places, over_steps))), run(*whole)
    for case, (updates, info) in found.items():
        pairs = zip(*map(jax.tree.leaves, (found[case], expected[case])), strict=True)
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7, err_msg=case)
        assert np.max(info.num_nonfinite) == 1
        for x, place in over_steps.items():
            assert updates[x].sharding.is_equivalent_to(place, updates[x].ndim), case


@pytest.mark.by_day(1)
@pytest.mark.parametrize("specs", [(P(), P("x")), (P("x"), P(None, "x"))])
def test_params_sharded_unlike_gradients_avoid_gathers(specs):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(0)
    whole = [rng.normal(size=(8, 16)).astype(np.float32) for _ in specs]
    tx = clip_by(scopes.tree(), RULES["relative_to_params"])

    def clip(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return updates, state.info.threshold

    places = [NamedSharding(mesh, spec) for spec in specs]
    compiled = jax.jit(clip).lower(*jax.device_put(whole, places)).compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    found, expected = compiled(*jax.device_put(whole, places)), clip(*whole)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("is_set", [True, False])
def test_clip_by_value_keeps_explicit_sharding(is_set, how):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    whole = {"w": np.arange(8.0, dtype=np.float32) - 4, "z": np.array([3 + 4j, 1], np.complex64)}
    grads = jax.device_put(whole, NamedSharding(mesh, P("x")))
    rows = np.linspace(-3, 0, 8, dtype=np.float32)
    scheduled = clip(lambda count: 1.0 + count)
    functions = {
        "clip": lambda tree: clip(1.0).update(tree, None)[0],
        "scheduled": lambda tree: scheduled.update(tree, scheduled.init(tree))[0],
        "by_value": lambda tree: clip_by_value(-1.0, np.float32(2.0)).update(tree, None)[0],
        "ops": lambda tree: ops.clip_by_value(tree, -1.0, 2.0),
        "array": lambda tree: ops.clip_by_value(tree["w"], rows, 2.0),
    }
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for name, function in functions.items():
            run = jax.jit(function) if how == "jit" else function
            with jax.numpy_dtype_promotion("standard"):
                found, expected = run(grads), function(whole)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            assert all(x.sharding.spec == P("x") for x in jax.tree.leaves(found)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "how"),
    slow_unless(
        lambda spec, how: how == "jit",
        itertools.product([P("x"), P(None, "x")], ["eager", "jit"]),
    ),
)
def test_scopes_combine_manual_and_explicit_axes(spec, how):
    """Groups that are split over both kinds, over one, or not at all."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    whole = {"w": np.arange(32.0, dtype=np.float32).reshape(4, 8) - 9, "v": np.ones(4, np.float32)}
    specs = {"w": spec, "v": P()}
    places = {"w": P("x", "y") if spec == P("x") else P("y", "x"), "v": P()}
    split = jax.device_put(whole, {x: NamedSharding(mesh, place) for x, place in places.items()})
    cases = {"unit": scopes.unit(), "axes": scopes.axes(0), "leaf": scopes.leaf(stacked=1)}

    def steps(tree, **options):
        found = {}
        for name, scope in cases.items():
            tx = clip_by(scope, thresholds.constant(3.0), **options)
            updates, state = tx.update(tree, tx.init(tree))
            found[name] = (tx.update(updates, state)[0], updates, state.info.norm)
        return found

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            functools.partial(steps, specs=specs),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=dict.fromkeys(cases, (specs, specs, P())),
            axis_names={"x"},
        )
        found = (jax.jit(run) if how == "jit" else run)(split)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(compare, found, jax.jit(steps)(whole))
