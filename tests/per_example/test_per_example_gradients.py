"""Clipped gradients by microbatches, and where they run."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from compiling import AS_USERS, collectives, where_sums_are_fused

from optaxclip import per_example, scopes


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(jnp.square(hidden @ params["v"] - y))


@functools.cache
def task(examples=10):
    rng = np.random.default_rng(0)
    shapes = {"w": (5, 70), "v": (70, 2), "x": (examples, 5), "y": (examples, 2)}
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params = {"w": drawn["w"], "b": np.zeros(70, np.float32), "v": drawn["v"]}
    return params, drawn["x"], drawn["y"]


@jax.jit
def losses_and_grads(params, x, y):
    return jax.vmap(jax.value_and_grad(loss_fn), (None, 0, 0))(params, x, y)


IS_PADDING = np.arange(10) == 7


@functools.cache
def in_one_batch(scope):
    """A threshold that clips half of the examples, their losses and sums."""
    losses, grads = losses_and_grads(*task())
    threshold = float(np.median(jax.jit(per_example.clip_sum)(grads, 1.0).norms))
    clip_sum = jax.jit(functools.partial(per_example.clip_sum, scope=scope))
    return threshold, losses, clip_sum(grads, threshold, is_padding=IS_PADDING)


def assert_close(tree, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), tree, other)


SCOPES = {"tree": scopes.tree(), "leaf": scopes.leaf()}


def by_tree_and_leaf(quick, sizes):
    """The microbatches know nothing of scopes: by leaf but one size is quick."""
    return slow_unless(
        lambda scope, size: size == 3 if scope == "leaf" else size in quick, product(SCOPES, sizes)
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("scope", "size"), by_tree_and_leaf([None, 1, 3, 10, 64], [None, 1, 2, 3, 4, 9, 10, 64])
)
def test_clipped_grad_sum_ignores_microbatch_size(scope, size):
    threshold, losses, expected = in_one_batch(SCOPES[scope])
    clipped = per_example.clipped_grad(
        loss_fn, threshold, microbatch_size=size, scope=SCOPES[scope]
    )
    result = jax.jit(clipped)(*task(), is_padding=IS_PADDING)
    assert_close(result._replace(losses=None), expected)
    assert 0 < np.min(result.num_clipped) < 9
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)


def test_clipped_grad_scans_over_microbatches():
    """Whatever the sums are, more gradients than these would take more memory."""
    for size, lengths in ((3, [3]), (64, [])):
        clipped = per_example.clipped_grad(loss_fn, 1.0, microbatch_size=size)
        eqns = jax.make_jaxpr(clipped)(*task()).eqns
        loops = [eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"]
        assert loops == lengths


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [None, 1, 2])
def test_clipped_grad_accepts_python_number_params(size):
    clipped = per_example.clipped_grad(lambda w, x: w * x, 1.0, microbatch_size=size)
    found = jax.jit(clipped)(2.0, jnp.array([0.5, -3.0, 4.0, 2.0])).grads
    np.testing.assert_allclose(found, 1.5, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 3])
def test_clipped_grad_supports_aux_keys_and_argument_positions(size):
    params, x, _ = task()

    def loss(scale, example, params):
        noise = jax.random.normal(example["key"], ())
        total = scale * jnp.sum(jnp.tanh(example["x"] @ params["w"]))
        return total + noise, {"x": example["x"], "noise": noise}

    keys = jax.random.split(jax.random.key(1), 10)
    clipped = per_example.clipped_grad(
        loss, 1.0, argnums=2, batch_argnums=1, has_aux=True, microbatch_size=size
    )
    result = jax.jit(clipped)(jnp.float32(0.1), {"key": keys, "x": x}, params)
    np.testing.assert_array_equal(result.aux["x"], x)
    expected = jax.jit(jax.vmap(lambda key: jax.random.normal(key, ())))(keys)
    np.testing.assert_allclose(result.aux["noise"], expected, rtol=1e-6)
    assert jax.tree.structure(result.grads) == jax.tree.structure(params)


def test_clipped_grad_clips_several_argnums_together():
    params, x, y = task()

    def loss(w, v, x, y):
        return loss_fn({"w": w, "b": jnp.zeros(70), "v": v}, x, y)

    def by_hand(*args):
        grads = jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0, 0))(*args)
        return per_example.clip_sum(grads, 0.5)

    args = params["w"], params["v"], x, y
    result = jax.jit(per_example.clipped_grad(loss, 0.5, argnums=(0, 1)))(*args)
    assert isinstance(result.grads, tuple)
    assert_close(result.grads, jax.jit(by_hand)(*args).grads)


def test_clipped_grad_returns_float0_for_integer_leaves():
    params, x, y = task()
    params = {**params, "none": None, "steps": jnp.zeros(3, jnp.int32)}
    clipped = per_example.clipped_grad(loss_fn, 1.0, microbatch_size=4)
    result = jax.eval_shape(clipped, params, x, y)
    assert result.grads["none"] is None
    steps = result.grads["steps"]
    assert (steps.dtype, steps.shape) == (jax.dtypes.float0, (3,))


NO_GROUPS = [
    (scopes.tree(), 1.0),
    (scopes.leaf(), 1.0),
    (scopes.leaf(), {"w": 1.0}),
    (scopes.unit(), 1.0),
    (scopes.group("a"), {"a": 1.0}),
]


def test_clipped_grad_without_differentiable_params_returns_zero_norms():
    params = {"steps": jnp.arange(3), "none": None}

    def loss(params, x):
        return jnp.mean(x), jnp.zeros(0)

    @jax.jit
    def found():
        return [
            per_example.clipped_grad(
                loss, threshold, scope=scope, has_aux=True, microbatch_size=size
            )(params, jnp.ones((4, 2)))
            for scope, threshold in NO_GROUPS
            for size in (None, 3)
        ]

    results = found()
    for result in results:
        assert (result.num_unclipped, result.num_dropped) == (4, 0)
        assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(result.num_clipped))
        assert result.aux.shape == (4, 0)
    for of_tree in results[:2]:
        np.testing.assert_array_equal(of_tree.norms, np.zeros(4))
    for of_leaves in results[2:6]:
        assert of_leaves.norms.shape == (4, 0)
    by_name = per_example.clipped_grad(loss, {"w": 1.0}, scope=scopes.leaf(), has_aux=True)
    assert by_name.sensitivity(params=params) == 0


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [None, 1, 4])
def test_clipped_grad_accepts_nan_example_and_empty_batch(size):
    params, x, y = jax.tree.map(np.array, task())
    clipped = jax.jit(per_example.clipped_grad(loss_fn, 1.0, microbatch_size=size))
    kept = np.arange(10) != 3
    result = clipped(params, np.where(kept[:, None], x, np.float32(np.nan)), y)
    assert_close(result.grads, clipped(params, x[kept], y[kept]).grads)
    assert int(result.num_dropped) == 1
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(clipped(params, x[:0], y[:0]).grads))


@where_sums_are_fused
@pytest.mark.slow
def test_clipped_grad_memory_grows_with_microbatch_only():
    def memory(batch, size):
        shapes = ({"w": (200, 200), "b": (200,), "v": (200, 2)}, (batch, 200), (batch, 2))
        args = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
        )
        clipped = per_example.clipped_grad(loss_fn, 1.0, microbatch_size=size)
        compiled = jax.jit(clipped, compiler_options=AS_USERS).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    eight = memory(256, 8)
    one = 4 * (200 * 200 + 200 + 400)
    assert memory(256, 1) < 4 * one
    assert 8 * one < eight < 14 * one
    assert eight < memory(64, 8) + 2 * one
    assert memory(256, 256) > 200 * one


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "size"), by_tree_and_leaf([3], [None, 2, 3]))
def test_clipped_grad_in_shard_map_adds_no_collectives(scope, size):
    """None but those of the `psum`: one for the floats, one for the counts."""
    params, x, y = task(examples=64)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    clipped = per_example.clipped_grad(loss_fn, 1.0, microbatch_size=size, scope=SCOPES[scope])

    def shard(summed, params, x, y):
        result = clipped(params, x, y)
        sums = (result.grads, result.num_clipped, result.num_dropped)
        if summed:
            return jax.lax.psum(sums, "x"), result.norms
        return jax.tree.map(lambda leaf: leaf[None], sums), result.norms

    for summed, wanted in ((True, 2), (False, 0)):
        run = jax.shard_map(
            functools.partial(shard, summed),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("x"), jax.P("x")),
            out_specs=(jax.P() if summed else jax.P("x"), jax.P("x")),
        )
        found = collectives(jax.jit(run).lower(params, x, y).compile())
        assert found == ({"all-reduce": wanted} if wanted else {})
