"""What `clipped_grad` takes from an optimizer and a trainer, and what it tells an accountant."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from optaxclip import per_example, scopes

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
X, Y = (RNG.normal(size=(7, n)).astype(np.float32) for n in (3, 2))
SCALES = {"w": 0.1, "b": 4.0}


def loss_fn(params, x, y, *, weight=1.0, is_square=True):
    error = x @ params["w"] + params["b"] - y
    return weight * jnp.sum(jnp.square(error) if is_square else jnp.abs(error))


@functools.cache
def gradients():
    """Those of all examples."""
    return jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0, 0)))(PARAMS, X, Y)


def scaled(grads):
    return jax.tree.map(lambda x, scale: x * scale, grads, SCALES)


def as_matrix(grads):
    return {"all": jnp.concatenate([grads["w"], grads["b"][None]])}


@functools.cache
def clipped_sum(transform, scope):
    """By hand."""
    clip = jax.jit(functools.partial(per_example.clip_sum, scope=scope))
    return clip(jax.vmap(transform)(gradients()), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("transform", [scaled, as_matrix])
@pytest.mark.parametrize("scope", [scopes.tree(), scopes.leaf()])
def test_pre_clipping_transform_applies_before_clipping(size, transform, scope):
    options = {"scope": scope, "pre_clipping_transform": transform, "microbatch_size": size}
    result = jax.jit(per_example.clipped_grad(loss_fn, 1.0, **options))(PARAMS, X, Y)
    expected = clipped_sum(transform, scope)
    for found, own in zip(result[:5], expected[:5], strict=True):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, own
        )


def test_pre_clipping_transform_receives_jax_gradients():
    seen = []
    params = {**PARAMS, "steps": jnp.zeros(3, jnp.int32), "none": None}

    def transform(grads):
        seen.append(jax.tree.map(lambda x: x.dtype, grads))
        return grads["w"]

    fn = per_example.clipped_grad(loss_fn, 1.0, pre_clipping_transform=transform)
    grads = jax.eval_shape(fn, params, X, Y).grads
    assert grads.shape == (3, 2)
    expected = jax.eval_shape(jax.grad(loss_fn, allow_int=True), params, X[0], Y[0])
    assert seen[-1] == jax.tree.map(lambda x: x.dtype, expected)


def test_pre_clipping_transform_may_capture_traced_arrays():
    @jax.jit
    def step(scales):
        def transform(grads):
            return jax.tree.map(jnp.multiply, grads, scales)

        options = {"pre_clipping_transform": transform, "microbatch_size": 2}
        return per_example.clipped_grad(loss_fn, 1.0, **options)(PARAMS, X, Y).grads

    expected = clipped_sum(scaled, scopes.tree()).grads
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), step(SCALES), expected)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [None, 3])
def test_clipped_grad_passes_keywords_to_loss(size):
    fn = per_example.clipped_grad(loss_fn, 1e6, microbatch_size=size)
    fn = jax.jit(fn, static_argnames="is_square")
    result = fn(PARAMS, X, Y, weight=np.float32(3.0), is_square=False, is_padding=np.arange(7) > 4)
    per_loss = jax.vmap(lambda x, y: 3.0 * loss_fn(PARAMS, x, y, is_square=False))
    np.testing.assert_allclose(result.losses, jax.jit(per_loss)(X, Y), rtol=1e-6)
    fn = per_example.clipped_grad(lambda *args: loss_fn(*args, weight=3.0, is_square=False), 1e6)
    expected = jax.jit(fn)(PARAMS, X[:5], Y[:5]).grads
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), result.grads, expected)


def test_unknown_loss_keyword_raises():
    with pytest.raises(TypeError, match="unexpected keyword argument 'wait'"):
        per_example.clipped_grad(loss_fn, 1.0)(PARAMS, X, Y, wait=1.0)


def statistics_of_linen(x):
    layer = linen.BatchNorm(use_running_average=False)
    return layer.init_with_output(jax.random.key(0), x[None])[1]["batch_stats"]


def statistics_of_nnx(x):
    del x
    return nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.BatchStat, ...)[1]


STATISTICS = {
    "linen": lambda x: {"batch_stats": statistics_of_linen(x)},
    "nnx": statistics_of_nnx,
    "haiku": lambda x: {"net/~/batch_norm/~/mean_ema": {"average": x}},
}
MAKERS = {
    "vmap": functools.partial(per_example.clipped_grad, threshold=1.0),
    "ghost": functools.partial(per_example.clipped_grad, threshold=1.0, method="ghost"),
    "norms": per_example.grad_norms,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("library", STATISTICS)
def test_batch_norm_statistics_in_aux_warn(library, maker):
    def loss(params, x, y):
        return loss_fn(params, x, y), STATISTICS[library](x)

    with pytest.warns(UserWarning, match="running statistics of a BatchNorm layer, .*GroupNorm"):
        jax.eval_shape(MAKERS[maker](loss, has_aux=True), PARAMS, X, Y)
    without = MAKERS[maker](lambda *args: (loss_fn(*args), {"batch_norm": args[1]}), has_aux=True)
    jax.eval_shape(without, PARAMS, X, Y)  # any warning is an error


RELATIONS = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


def with_last(x, row):
    return np.append(x[:-1], np.broadcast_to(row, x[-1:].shape), axis=0).astype(x.dtype)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("relation", RELATIONS)
def test_sensitivity_bounds_change_by_single_example(relation):
    fn = per_example.clipped_grad(loss_fn, 0.5)
    sensitivity = fn.sensitivity(relation)
    assert sensitivity == 0.5 * RELATIONS[relation]
    x, y = X[:4], Y[:4]
    changed = {
        "add_or_remove_one": (X[:3], Y[:3]),
        "replace_special": (with_last(x, 0), with_last(y, 0)),
        # An example whose gradient is the opposite.
        "replace_one": (x, with_last(y, 2 * x[3] @ PARAMS["w"] - y[3])),
    }
    grads_of = jax.jit(lambda x, y: fn(PARAMS, x, y).grads)
    moved = optax.tree.norm(optax.tree.sub(grads_of(x, y), grads_of(*changed[relation])))
    np.testing.assert_allclose(moved, sensitivity, rtol=1e-5)


def test_sensitivity_accepts_dp_accounting_relations():
    accounting = pytest.importorskip("dp_accounting")
    fn = per_example.clipped_grad(loss_fn, 0.5)
    for relation, times in RELATIONS.items():
        member = accounting.NeighboringRelation[relation.upper()]
        assert fn.sensitivity(member) == 0.5 * times


@pytest.mark.slow
def test_thresholds_by_name_count_as_often_as_there_are_groups():
    thresholds = {"w": 3.0, "b": 4.0}
    fn = per_example.clipped_grad(loss_fn, thresholds, scope=scopes.leaf())
    assert fn.sensitivity(params=PARAMS) == 5.0
    fn = per_example.clipped_grad(loss_fn, thresholds, scope=scopes.axes(0))
    np.testing.assert_allclose(fn.sensitivity("replace_one", PARAMS), 2 * (18 + 16) ** 0.5)
    options = {"scope": scopes.leaf(), "pre_clipping_transform": as_matrix}
    fn = per_example.clipped_grad(loss_fn, {"all": 2.0}, **options)
    assert fn.sensitivity(params=PARAMS) == 2.0
    with pytest.raises(
        ValueError, match=r"params are required if threshold is a dict; pass the parameters"
    ):
        fn.sensitivity()


def test_a_traced_threshold_has_a_traced_sensitivity():
    @jax.jit
    def step(threshold):
        return per_example.clipped_grad(loss_fn, threshold).sensitivity("replace_one")

    assert step(0.25) == 0.5
