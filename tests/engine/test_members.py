"""One norm for each member of an ensemble: what `vmap` around the update would give."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax.experimental.sparse import BCOO
from parts_table import RULES

import optaxclip
from optaxclip import clip_by, monitor, norms, scopes, thresholds
from optaxclip.monitor._record import STATISTICS

MEMBERS, STEPS = 12, 6
SHAPES = {"w": (3, 5), "b": (), "h": (2,)}
# AdaGC's warm-up is by the norm of all groups, which here are the members.
OF_EACH = [name for name in RULES if name != "adagc"]
SOME = ["window", "zscore", "quantile"]
OPTIONS = [
    {},
    {"response": "normalize", "norm": "rms", "nonfinite": "zero"},
    {"response": "smooth", "norm": norms.lp(3), "strict": True},
    {"norm": "linf", "nonfinite": "mask"},
]


def stacked(rng, *leading):
    """A tree `[*leading, members, ...]`, of which one leaf is bfloat16."""
    tree = {x: rng.normal(size=(*leading, MEMBERS, *shape)) for x, shape in SHAPES.items()}
    dtypes = {"w": jnp.float32, "b": jnp.float32, "h": jnp.bfloat16}
    return {name: jnp.asarray(x, dtypes[name]) for name, x in tree.items()}


PARAMS, GRADS = (stacked(np.random.default_rng(seed), *n) for seed, n in ((0, ()), (1, (STEPS,))))
GRADS["w"] = GRADS["w"].at[4, 3].mul(1e6).at[2, 7, 0, 0].set(jnp.nan).at[:, 5].mul(1e-30)


def steps_of(tx):
    """The updates and the last state of a transformation."""

    def step(state, grads):
        return tx.update(grads, state, PARAMS)[::-1]

    return jax.lax.scan(step, tx.init(PARAMS), GRADS)[::-1]


def of_each(tx):
    """The same of a transformation for one member, under `vmap`."""

    def step(state, grads):
        return jax.vmap(tx.update)(grads, state, PARAMS)[::-1]

    return jax.lax.scan(step, jax.vmap(tx.init)(PARAMS), GRADS)[::-1]


def assert_same(found, expected):
    # NumPy holds a NaN of bfloat16 for another number.
    found, expected = jax.tree.map(np.asarray, (found, expected))
    (updates, state), (of_members, states) = found, expected
    for name in SHAPES:
        pair = (x[name].astype(np.float32) for x in (updates, of_members))
        # XLA on CPUs can fuse the products of both programs differently, and change the last bits.
        np.testing.assert_allclose(*pair, rtol=5e-7)
    for field in ("norm", "threshold", "factor", "num_clipped", "num_nonfinite"):
        np.testing.assert_array_equal(getattr(state.info, field), getattr(states.info, field))


@pytest.mark.parametrize(
    "rules", slow_unless(lambda rules: rules is SOME, [SOME, OF_EACH]), ids=["some", "all"]
)
def test_ensemble_member_rules_match_vmap(rules):
    def of(rule, scope):
        return clip_by(scope, RULES[rule]())

    def both():
        found = [steps_of(of(rule, scopes.ensemble_member())) for rule in rules]
        return found, [of_each(of(rule, scopes.tree())) for rule in rules]

    for found, expected in zip(*jax.jit(both)(), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ensemble_member_options_match_vmap(options):
    def both():
        one, of_one = (
            clip_by(x, 0.5, **options) for x in (scopes.ensemble_member(), scopes.tree())
        )
        return steps_of(one), of_each(of_one)

    assert_same(*jax.jit(both)())


def test_ensemble_member_statistics_match_vmap():
    # The share is of all groups, which here are the members.
    stats = [stat for stat in STATISTICS if stat != "share"]

    def both():
        of = {"window": STEPS, "stats": stats}
        one, of_one = (
            monitor.record(scope=x, **of) for x in (scopes.ensemble_member(), scopes.tree())
        )
        return steps_of(one)[1], of_each(of_one)[1]

    state, states = jax.jit(both)()
    assert monitor.history_names(state) == tuple(f"{i:02}" for i in range(MEMBERS))
    for stat in stats:
        found = monitor.history(state, stat=stat)
        assert found.shape == (STEPS, MEMBERS)
        np.testing.assert_allclose(found[-1], states.last[stat], rtol=1e-6)


def test_ensemble_member_ignores_other_members():
    tx = clip_by(scopes.ensemble_member(), 0.5)
    one = jax.tree.map(lambda x: x[0], GRADS)
    found = tx.update(one, tx.init(PARAMS))[0]
    beside = jax.tree.map(lambda x: x.at[1].set(jnp.asarray(1e30, x.dtype)).at[2].set(jnp.nan), one)
    changed = tx.update(beside, tx.init(PARAMS))[0]
    others = np.delete(np.arange(MEMBERS), [1, 2])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), found, changed)


@pytest.mark.parametrize("axis", [1, -1])
def test_ensemble_member_accepts_other_axes(axis):
    x = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones((4, 3))}
    turned = jax.tree.map(jnp.transpose, x)
    found, state = clip_by(scopes.ensemble_member(axis), 1.0).update(x, None)
    expected, _ = clip_by(scopes.ensemble_member(), 1.0).update(turned, None)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(jnp.transpose, expected))
    assert list(state.info.names) == ["0", "1", "2"]


WRONG = {
    "other numbers": (
        {"w": jnp.ones((2, 3)), "b": jnp.ones(3)},
        0,
        "the same size along axis .* 'w': 2",
    ),
    "no axis": ({"w": jnp.ones((2, 3)), "b": jnp.ones(2)}, 1, r"axes .* leaf 'b' of shape"),
    "a scalar": ({"b": jnp.ones(())}, 0, "for leaf 'b' of shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_ensemble_member_rejects_leaves_without_members(case):
    tree, axis, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        clip_by(scopes.ensemble_member(axis), 1.0).init(tree)


@pytest.mark.parametrize("axis", [None, 1.0, True, (0,)])
def test_ensemble_member_axis_must_be_int(axis):
    with pytest.raises(TypeError, match=re.escape(f"axis must be an int, got {axis!r}")):
        scopes.ensemble_member(axis)


def test_ensemble_member_accepts_empty_tree():
    tx = clip_by(scopes.ensemble_member(), 1.0)
    assert tx.update({}, tx.init({}))[1].info.norm.shape == (0,)


def test_member_refuses_sparse_leaves():
    leaf = BCOO((jnp.ones(2), jnp.array([[0, 1], [1, 2]])), shape=(2, 3))
    with pytest.raises(ValueError, match="leaf 'w' must be dense, but is a BCOO"):
        clip_by(scopes.ensemble_member(), 1.0).init({"w": leaf})


STACKS = {
    "leaf": clip_by(scopes.leaf(stacked={"layers": 1}), 1.0),
    "member": clip_by(scopes.ensemble_member(), 1.0),
    "adagc": clip_by(scopes.ensemble_member(), thresholds.adagc()),
    "spectral": optaxclip.clip_by_spectral_norm(1.0, stacked={"layers": 1}),
    "block": optaxclip.clip_by_block_rms(1.0, stacked={"layers": 1}),
    "events": monitor.events(clip_by(scopes.leaf(stacked={"layers": 1}), 1.0)),
    "stable adam": optaxclip.scale_by_stable_adam(stacked={"layers": 1}),
    "record": monitor.record(scope=scopes.leaf(stacked={"layers": 1})),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_without_layers_are_clipped(name):
    """A model may have no layers of a kind; the axis that stacks them then has size 0."""
    tx, number = STACKS[name], 0 if name in ("member", "adagc") else 3
    grads = {"layers": jnp.zeros((0, 3, 3)), "w": jnp.ones((number, 3))}
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, grads)
    assert np.all(np.isfinite(updates["w"]))
    if name != "stable adam":
        assert not np.isnan([*monitor.scalars(state).values()]).any()
