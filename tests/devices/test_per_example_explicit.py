"""Per-example clipping of what is split over an explicit mesh: the numbers of one device."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import per_example, scopes

SCOPES = {"tree": scopes.tree(), "leaf": scopes.leaf(), "unit": scopes.unit()}
BATCHES = {
    "split": {"w": P(("a", "b")), "v": P(("a", "b")), "b": P(("a", "b"))},
    "weights too": {"w": P("a", None, "b"), "v": P("a", "b"), "b": P("a")},
    "weights alone": {"w": P(None, "a", "b"), "v": P(None, "b"), "b": P()},
}


@functools.cache
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def placed(tree, specs):
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh(), spec), specs))


def assert_close(tree, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), tree, other)


def random_grads(examples):
    rng = np.random.default_rng(0)
    shapes = {"w": (examples, 4, 6), "v": (examples, 8), "b": (examples,)}
    grads = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads["v"][3, 1] = np.nan
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "batch"),
    slow_unless(
        lambda name, batch: name == "tree" or batch == "weights too", product(SCOPES, BATCHES)
    ),
)
def test_clip_sum_on_explicit_mesh_matches_single_device(name, batch):
    grads, specs = random_grads(16), BATCHES[batch]
    run = functools.partial(per_example.clip_sum, threshold=3.0, scope=SCOPES[name])
    split = placed(grads, specs)
    is_padding = np.arange(16) == 5
    expected = jax.jit(run)(grads, is_padding=is_padding)
    for clip in (run, jax.jit(run)):
        result = clip(split, is_padding=is_padding)
        assert_close(result, expected)
        for leaf, spec in zip(*map(jax.tree.leaves, (result.grads, specs)), strict=True):
            like = NamedSharding(mesh(), P(*spec[1:]))
            assert leaf.sharding.is_equivalent_to(like, leaf.ndim)
        examples = {spec[0] for spec in specs.values() if len(spec)}
        like = NamedSharding(mesh(), P(*examples - {None}))
        for norms in jax.tree.leaves(result.norms):
            assert norms.sharding.is_equivalent_to(like, norms.ndim)


@pytest.mark.slow
def test_noisy_aggregate_on_explicit_mesh_matches_single_device():
    tx = optaxclip.per_example_clip_and_aggregate(
        per_example.quantile_threshold(init_threshold=2.0, count_noise=1.0), 0.5, jax.random.key(1)
    )
    grads = random_grads(16)
    state = tx.init(jax.tree.map(lambda x: x[0], grads))
    expected = jax.jit(tx.update)(grads, state)
    split = placed(grads, BATCHES["weights too"])
    for update in (tx.update, jax.jit(tx.update)):
        updates, after = update(split, state)
        assert_close(updates, expected[0])
        assert_close(after._replace(key=0), expected[1]._replace(key=0))


def loss_fn(params, example):
    # The oldest JAX cannot draw from keys that are split over an explicit mesh.
    shift = (jax.random.key_data(example["key"])[0] % 7).astype(jnp.float32)
    x = jnp.tanh(example["x"] @ params["w"]) + 0.1 * shift
    loss = jnp.sum(x * params["b"])
    return loss, {"x": example["x"], "loss": loss}


def clipped_by(size):
    return per_example.clipped_grad(
        loss_fn, 0.7, has_aux=True, microbatch_size=size, scope=scopes.leaf()
    )


@functools.cache
def on_one_device(examples):
    """Parameters, a batch, and what comes of them in one batch."""
    keys = jax.random.split(jax.random.key(0), examples + 1)
    batch = {"x": jax.random.normal(keys[0], (examples, 4)), "key": keys[1:]}
    params = {"w": jnp.ones((4, 6)) / 3, "b": jnp.linspace(0, 1, 6)}
    return params, batch, jax.jit(clipped_by(None))(params, batch)


SPLITS = {8: P(("a", "b")), 4: P("a"), 1: P()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "ways"),
    slow_unless(lambda size, ways: size == 3 or ways == 8, product((None, 1, 3, 4, 8), SPLITS)),
)
def test_clipped_grad_microbatches_need_not_divide_batch(size, ways):
    split = SPLITS[ways]
    examples = 16 if split else 10
    params, batch, expected = on_one_device(examples)
    assert 0 < int(expected.num_clipped.sum()) < 2 * examples
    there = placed(batch, {"x": split, "key": split})
    specs = {"w": P(None, None if split == P(("a", "b")) else "b"), "b": P()}
    model = placed(params, specs)
    with jax.set_mesh(mesh()):
        result = jax.jit(clipped_by(size))(model, there)
    assert_close(result, expected)
    for name, spec in specs.items():
        leaf = result.grads[name]
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh(), spec), leaf.ndim)


@pytest.mark.slow
def test_clipped_grad_accepts_shardings_without_set_mesh():
    params, x = {"w": jnp.ones((4, 6)), "b": jnp.ones(6)}, jnp.linspace(-1, 1, 64).reshape(16, 4)
    specs = {"w": P(None, "b"), "b": P()}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]) * params["b"])

    for size in (None, 3, 8):
        clipped = jax.jit(per_example.clipped_grad(loss, 0.7, microbatch_size=size))
        assert_close(clipped(placed(params, specs), placed(x, P("a"))), clipped(params, x))


@pytest.mark.slow
def test_clipped_grad_accepts_partly_manual_mesh():
    x, w = jnp.linspace(-1, 1, 32).reshape(16, 2), jnp.ones(2)

    def shard(w, x):
        clipped = per_example.clipped_grad(lambda w, x: jnp.sum(w * x), 0.7, microbatch_size=3)
        return jax.lax.psum(clipped(w, x).grads, "a")

    with jax.set_mesh(mesh()):
        specs = {"in_specs": (P(), P("a")), "out_specs": P(), "axis_names": {"a"}}
        run = jax.jit(jax.shard_map(shard, **specs))
        total = run(placed(w, P("b")), placed(x, P("a", "b")))
    np.testing.assert_allclose(total, per_example.clip_sum(x, 0.7).grads, rtol=1e-5)


def layouts(split, size):
    """How the microbatches of 16 examples and what comes of each are split; nothing is computed."""
    long_names = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(jnp.ones((16, 4)), NamedSharding(long_names, split))
    parts = []

    @jax.custom_batching.custom_vmap
    def seen(x):
        return x

    @seen.def_vmap
    def _(examples, is_batched, x):
        parts.append((examples, jax.typeof(x).sharding.spec))
        return x, True

    def loss(w, x):
        return jnp.sum(w * seen(x)), x

    clipped = per_example.clipped_grad(loss, 1.0, has_aux=True, microbatch_size=size)
    found = jax.eval_shape(clipped, jnp.ones(4), x)
    return parts, [x.sharding.spec for x in (found.losses, found.norms, found.aux)]


BOTH, DATA, MODEL = P(("data", "model"), None), P("data", None), P(None, "model")
GRID = P("data", "model")


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("split", "size", "parts", "each"),
    [
        (BOTH, 8, {8: BOTH}, BOTH),
        (BOTH, 4, {4: DATA}, DATA),
        (BOTH, 6, {6: P(None, None), 4: DATA}, DATA),
        (GRID, 12, {12: GRID, 4: GRID}, GRID),
        (GRID, 3, {3: MODEL, 1: MODEL}, MODEL),
    ],
)
def test_microbatches_use_largest_dividing_mesh_axes(split, size, parts, each):
    assert layouts(split, size) == (list(parts.items()), [P(each[0])] * 2 + [each])


def test_norms_inherit_sharding_of_first_sharded_leaf():
    specs = {"b": P(), "v": P(None, "b"), "w": P("a", None, "b")}
    found = jax.eval_shape(lambda x: per_example.clip_sum(x, 1.0), placed(random_grads(8), specs))
    assert found.norms.sharding.spec == P("a")
    assert [x.sharding.spec for x in found.grads.values()] == [P(), P("b"), P(None, "b")]
