"""Many devices: the numbers of one device, with one collective, or an error."""

import functools
import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import norms, ops, scopes, thresholds

SPECS = {"w": P("a", "b"), "v": P(None, "b"), "k": P(("a", "b")), "s": P(None, "a"), "b": P()}
SHAPES = {"w": (16, 8), "v": (8, 4), "k": (16, 3), "s": (4, 8), "b": (6,)}


def label(path, leaf):
    return "square" if path in "wv" else "rest"


METHODS = {
    "clip": (optaxclip.clip, 0.5, {}),
    "global_norm": (optaxclip.clip_by_global_norm, 2.0, {}),
    "global_linf": (optaxclip.clip_by_global_norm, 0.7, {"norm": "linf"}),
    "global_l3": (optaxclip.clip_by_global_norm, 0.7, {"norm": norms.lp(3)}),
    "masked": (optaxclip.clip_by_global_norm, 2.0, {"nonfinite": "mask"}),
    "axes": (optaxclip.clip_by_norm, 1.0, {"axes": -1}),
    "block_rms": (optaxclip.clip_by_block_rms, 0.4, {}),
    "group": (optaxclip.clip_by_group_norm, 1.0, {"labels": label}),
    "agc": (optaxclip.adaptive_grad_clip, 0.3, {}),
    "zclip": (lambda alpha, **told: optaxclip.zclip(alpha=alpha, **told), 0.9, {"max_norm": 1.5}),
    "adagc": (lambda _, **told: optaxclip.adagc(**told), 1.05, {"warmup_steps": 1}),
    "skip": (functools.partial(optaxclip.skip_above, optax.sgd(1.0)), 100.0, {}),
}
SOME = ("global_norm", "axes", "agc", "skip")  # quick in several ways, the others in one
NUM_ALL_REDUCES = {"clip": 0, "global_l3": 2}  # the third power needs the largest entry first
# Norms of many groups for each leaf, those of parameters, and which entries are bad.
SEVERAL = {"axes", "agc", "masked"}
KEEPS_AXES = {"axes", "agc"}
MOST_NORMS = 2 * sum(max(shape) for shape in SHAPES.values())


def make(name, **options):
    factory, threshold, fixed = METHODS[name]
    return factory(threshold, **fixed, **(options if name != "clip" else {}))


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {x: jnp.asarray(rng.normal(size=shape), jnp.float32) for x, shape in SHAPES.items()}


TREES, PARAMS = [random_tree(seed) for seed in range(2)], random_tree(9)


@functools.cache
def mesh(kind="Auto"):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)


def shardings(kind="Auto"):
    return {x: NamedSharding(mesh(kind), spec) for x, spec in SPECS.items()}


@functools.cache
def on_one_device(name):
    tx = make(name)
    start, update = tx.init(PARAMS), jax.jit(tx.update)
    first, state = update(TREES[0], start, PARAMS)
    return start, first, update(TREES[1], state, PARAMS)


def assert_close(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), actual, expected
    )


def check(name, update, trees, params, wanted=None, kind="Auto", gathers=()):
    """Two steps give the numbers of one device, with so many collectives."""
    state, _, expected = on_one_device(name)
    # As the first step leaves it, so that the second compiles nothing.
    state = jax.device_put(state, NamedSharding(mesh(kind), P()))
    compiled = update.lower(trees[0], state, params).compile()
    counts = collectives(compiled)
    if wanted is None:
        assert set(counts) <= {"all-reduce", *gathers}
        assert most_gathered(compiled) <= MOST_NORMS
    else:
        assert counts == ({"all-reduce": wanted} if wanted else {})
    _, state = update(trees[0], state, params)
    found = update(trees[1], state, params)
    assert_close(found, expected)
    return found[0]


def assert_same_shardings(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_global_norm_forward_derivative_survives_underflowing_squares():
    x = np.zeros((8, 100), np.float32)
    x[:, 0] = np.linspace(1, 3, 8) * 1e-15
    norm = jax.shard_map(ops.global_norm, mesh=mesh(), in_specs=P(("a", "b")), out_specs=P())
    slope = jax.jit(jax.jacfwd(norm))(x)
    np.testing.assert_allclose(slope, x / np.linalg.norm(x.astype(np.float64)), rtol=1e-5)


def test_clip_without_jit_keeps_shardings():
    placed, tx = jax.device_put(TREES[0], shardings()), make("global_norm")
    clipped, _ = tx.update(placed, tx.init(placed))
    assert_same_shardings(clipped, placed)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    slow_unless(
        lambda name, kind: kind == "Explicit" or name in SOME,
        product(METHODS, ("Auto", "Explicit", "Auto, specs")),
    ),
)
def test_methods_under_jit_match_single_device(name, kind):
    given, kind = ", specs" in kind, kind.split(",")[0]
    placed = [jax.device_put(tree, shardings(kind)) for tree in (*TREES, PARAMS)]
    options = {"specs": shardings(kind)} if given else {}
    update = jax.jit(make(name, **options).update)
    is_one = name not in SEVERAL and (given or kind == "Explicit")
    wanted = NUM_ALL_REDUCES.get(name, 1) if is_one else None
    # Of norms, where only the compiler knows how leaves are split.
    gathers = ["all-gather"] if name in KEEPS_AXES and kind == "Auto" and not given else []
    updates = check(name, update, placed[:2], placed[2], wanted, kind, gathers)
    assert_same_shardings(updates, placed[0])


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    slow_unless(
        lambda name, kind: kind == "tracked" or (kind == "specs" and name in SOME),
        [*product(METHODS, ("tracked", "specs")), *product(SOME, ("tracked, specs",))],
    ),
)
def test_methods_in_shard_map_match_single_device(name, kind):
    options = {"specs": SPECS} if "specs" in kind else {}
    tx = make(name, **options)
    update = jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh(),
            in_specs=(SPECS, P(), SPECS),
            out_specs=(SPECS, P()),
            check_vma="tracked" in kind,
        )
    )
    if name in KEEPS_AXES and not options:
        with pytest.raises(ValueError, match=r"specs is required because a leaf .*; pass a pytree"):
            update(TREES[0], on_one_device(name)[0], PARAMS)
        return
    wanted = None if name in SEVERAL else NUM_ALL_REDUCES.get(name, 1)
    check(name, update, TREES, PARAMS, wanted)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["global_norm", "block_rms", "masked", "zclip", "skip"])
def test_replicated_leaves_stay_bitwise_equal(name):
    def everywhere(grads, state):
        updates, state = make(name).update(grads, state, grads)
        return jax.tree.map(lambda x: x[None, None], (updates["b"], state))

    spread = jax.shard_map(
        everywhere, mesh=mesh(), in_specs=(SPECS, P()), out_specs=P("a", "b"), check_vma=False
    )
    with pytest.raises(ValueError, match=r"axis_name if .* or a pytree of PartitionSpec as specs"):
        jax.jit(spread)(TREES[0], on_one_device(name)[0])

    def by_specs(grads, state):
        updates, state = make(name, specs=SPECS).update(grads, state, grads)
        return jax.tree.map(lambda x: x[None, None], (updates["b"], state))

    spread = jax.shard_map(
        by_specs, mesh=mesh(), in_specs=(SPECS, P()), out_specs=P("a", "b"), check_vma=False
    )
    for copies in jax.tree.leaves(jax.jit(spread)(TREES[0], on_one_device(name)[0])):
        assert all(np.array_equal(copy, copies[0, 0]) for row in copies for copy in row)


def test_clip_by_global_norm_accepts_partly_manual_regions():
    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=({"w": P("a"), "b": P()},),
        out_specs=({"w": P("a"), "b": P()}, P()),
        axis_names={"a"},
    )
    def clip(tree):
        return ops.clip_by_global_norm(tree, 1.0)

    tree = {x: TREES[0][x] for x in ("w", "b")}
    placed = {x: jax.device_put(tree[x], shardings()[x]) for x in tree}
    assert_close(clip(placed), ops.clip_by_global_norm(tree, 1.0))


@pytest.mark.parametrize("axis_name", ["i", None])
def test_pmap_without_axis_name_raises(axis_name):
    with pytest.raises(
        ValueError, match=r"pmap .* axis_name if .* or a pytree of PartitionSpec as specs"
    ):
        jax.pmap(ops.global_norm, axis_name=axis_name)(jnp.ones((8, 2)))


def test_vmap_without_axis_name_clips_examples_separately():
    x = jnp.arange(1.0, 9.0)[:, None]
    np.testing.assert_array_equal(jax.jit(jax.vmap(ops.global_norm, axis_name="i"))(x), x[:, 0])


@functools.cache
def losses(norm):
    """Value and gradient of a clip's result by tree and scale, on one device and on many."""
    specs = {"w": P("a", "b"), "b": P()}

    def clip(tree, scale):
        return optaxclip.clip_tree(tree, scale, scope=scopes.tree(), norm=norm)[0]

    def loss(tree, scale):
        return sum(jnp.sum(jnp.sin(x / scale)) for x in jax.tree.leaves(clip(tree, scale)))

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(specs, P()), out_specs=P())
    def split_loss(tree, scale):
        clipped = clip(tree, scale)
        mine = jnp.sum(jnp.sin(clipped["w"] / scale))
        return jax.lax.psum(mine, ("a", "b")) + jnp.sum(jnp.sin(clipped["b"] / scale))

    return [jax.jit(jax.value_and_grad(fn)) for fn in (loss, split_loss)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", ["l2", "linf", "l1", norms.lp(3)], ids=str)
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_sharded_clip_gradients_match_across_float_range(norm, scale):
    tree = {x: TREES[0][x] * scale for x in ("w", "b")}
    (value, expected), (found, slopes) = (fn(tree, jnp.float32(scale)) for fn in losses(norm))
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for x in tree:
        np.testing.assert_allclose(slopes[x] * scale, expected[x] * scale, rtol=1e-4, atol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_skip_nonfinite_skips_on_all_devices(bad):
    tree = TREES[0] | {"w": TREES[0]["w"].at[5, 3].set(bad)}
    tx = optaxclip.skip_nonfinite(optax.sgd(1.0))
    update = jax.shard_map(tx.update, mesh=mesh(), in_specs=(SPECS, P()), out_specs=(SPECS, P()))
    updates, state = jax.jit(update)(tree, tx.init(PARAMS))
    assert state.num_skipped == 1
    assert all(np.all(x == 0) for x in jax.tree.leaves(updates))


def test_partial_sum_raises():
    def clip(x, y):
        partial = jnp.einsum("ij,jk->ik", x, y, out_sharding=P(None, None, unreduced={"a"}))
        return ops.global_norm(partial)

    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh("Explicit"), P(None, "a")))
    y = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh("Explicit"), P("a", None)))
    with pytest.raises(ValueError, match="partial sum"), jax.set_mesh(mesh("Explicit")):
        jax.jit(clip)(x, y)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"specs": {"w": P("a", "b", "a")}},
            ValueError,
            r"specs must have at most one entry .* for shape \(16, 8\)",
        ),
        ({"specs": {"w": "a"}}, TypeError, "^specs must be"),
        ({"specs": {"x": P()}}, ValueError, "^specs must be a pytree prefix"),
        ({"axis_name": 3}, TypeError, "^axis_name must be"),
        ({"specs": P()}, ValueError, "if no mesh is set"),
    ],
)
def test_invalid_specs_or_axis_name_raise(options, error, message):
    with pytest.raises(error, match=message):
        ops.global_norm({"w": TREES[0]["w"]}, **options)


def test_specs_contradicting_type_raise():
    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=P("a", "b"), out_specs=P())
    def norm(x):
        return ops.global_norm(x, specs=P("a"))

    with pytest.raises(ValueError, match=r"also varies over \['b'\]"):
        norm(TREES[0]["w"])


def test_clip_by_global_norm_needs_no_extra_collectives():
    placed = jax.device_put(TREES[0], shardings())

    def count(tx):
        compiled = jax.jit(tx.update).lower(placed, tx.init(placed)).compile()
        return len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text()))

    assert 1 <= count(optaxclip.clip_by_global_norm(1.0)) <= count(optax.clip_by_global_norm(1.0))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("shape", [(512, 256), (48, 250)], ids=str)
@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b"))], ids=str)
def test_float16_leaves_keep_sharding(spec, shape):
    leaf = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    placed = jax.device_put(leaf, NamedSharding(mesh(), spec))
    norm = jax.jit(ops.global_norm).lower(placed).compile()
    assert set(collectives(norm)) == {"all-reduce"}
    np.testing.assert_allclose(norm(placed), np.linalg.norm(leaf.astype(np.float64)), rtol=1e-6)
    local = jax.shard_map(ops.global_norm, mesh=mesh(), in_specs=spec, out_specs=P())
    np.testing.assert_allclose(jax.jit(local)(leaf), norm(placed), rtol=1e-6)


@pytest.mark.slow
def test_unit_rule_state_matches_on_explicit_mesh():
    tx = optaxclip.clip_by(scopes.unit(), thresholds.zscore(warmup_steps=1))
    placed = [jax.device_put(tree, shardings("Explicit")) for tree in TREES]
    update, state, expected = jax.jit(tx.update), tx.init(PARAMS), tx.init(PARAMS)
    for tree, split in zip(TREES, placed, strict=True):
        updates, state = update(split, state)
        found, expected = update(tree, expected)
        assert_close((updates, state), (found, expected))
