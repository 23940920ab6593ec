"""Explicit meshes, groups that are split: all rules, responses and policies, as in one piece."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import slow_unless
from compiling import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import clip_by, norms, scopes, thresholds

RULES = {
    "constant": 1.0,
    "schedule": optax.linear_schedule(1.5, 0.5, 4),
    "relative_to_params": thresholds.relative_to_params(0.3),
    "zscore": thresholds.zscore(warmup_steps=1),
    "ema": thresholds.ema(ratio=0.9),
    "percentile": thresholds.percentile(50.0, window=2, warmup_steps=1),
    "adagc": thresholds.adagc(warmup_steps=1),
    "quantile": thresholds.quantile(0.5, init_limit=1.0),
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
SOME = ["constant", "zscore", "adagc", "zscore, smooth", "zscore, auto_s", "zscore, mask"]
SCOPES = {
    "unit": (scopes.unit(), CASES, {"w": P("x", "y"), "b": P("y")}),
    "leaf": (scopes.leaf(stacked=1), SOME, {"w": P("x"), "b": P("x")}),
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
def test_every_rule_response_and_policy(name):
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


@pytest.mark.parametrize("specs", [(P(), P("x")), (P("x"), P(None, "x"))])
def test_parameters_split_otherwise_than_gradients_are_not_gathered(specs):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(0)
    whole = [rng.normal(size=(8, 16)).astype(np.float32) for _ in specs]
    tx = clip_by(scopes.tree(), RULES["relative_to_params"])

    def clip(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return updates, state.info.limit

    places = [NamedSharding(mesh, spec) for spec in specs]
    compiled = jax.jit(clip).lower(*jax.device_put(whole, places)).compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    found, expected = compiled(*jax.device_put(whole, places)), clip(*whole)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
