"""Convolutions in which XLA mixes examples: one that is not finite adds nothing, others stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from compiling import AS_USERS
from jax import lax

from optaxclip import per_example

X = np.random.default_rng(0).normal(size=(8, 6, 4))
BAD = 3


def conv(x, w, groups=1):
    numbers = ("NWC", "WIO", "NWC")
    options = {"dimension_numbers": numbers, "feature_group_count": groups}
    return lax.conv_general_dilated(x[None], w, (1,), "SAME", **options)[0]


def squares(y):
    return jnp.sum(jnp.square(jnp.tanh(y)))


def weight_norm(w, x):
    norms = jnp.sqrt(jnp.sum(jnp.square(w), (0, 1), keepdims=True))
    return squares(conv(x, w / norms, 2))


def concatenated(w, x):
    return squares(conv(x, jnp.concatenate(jnp.split(w, 2, 2)[::-1], 2), 2))


@jax.custom_vjp
def hidden(w, x):
    return squares(conv(x, w, 2))


hidden.defvjp(
    lambda w, x: (hidden(w, x), (w, x)),
    lambda kept, g: jax.vjp(lambda w, x: squares(conv(x, w, 2)), *kept)[1](g),
)

LOSSES = {
    "grouped": (lambda w, x: squares(conv(x, w, 2)), (3, 2, 4)),
    "plain": (lambda w, x: squares(conv(x, w)), (3, 4, 4)),
    "computed": (lambda w, x: squares(conv(x, w / jnp.linalg.norm(w))), (3, 4, 4)),
    "inner vmap": (lambda w, x: squares(jax.vmap(conv)(x.reshape(2, 3, 4), w)), (2, 3, 4, 6)),
    "weight norm": (weight_norm, (3, 2, 4)),
    "concatenated": (concatenated, (3, 2, 4)),
    "in a scan": (
        lambda w, x: squares(lax.scan(lambda h, w: (conv(h, w, 2), 0), x, w)[0]),
        (2, 3, 2, 4),
    ),
    "custom_vjp": (hidden, (3, 2, 4)),
}


def params(dtype):
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=x) / 2, dtype) for name, (_, x) in LOSSES.items()}


def expected(thresholds, params, x):
    """The clipped sums without the bad example, from the gradients of single examples."""
    found = {}
    for name, (loss, _) in LOSSES.items():
        each = lax.map(lambda x, name=name, loss=loss: jax.grad(loss)(params[name], x), x)
        each = np.delete(np.asarray(each, np.float64), BAD, 0)
        norms = np.linalg.norm(each.reshape(len(each), -1), axis=1)
        factors = np.minimum(1, thresholds / norms)
        found[name] = np.einsum("i,i...->...", factors, each)
    return found


CASES = [
    (m, d, s)
    for m in ("vmap", "ghost")
    for d in ("float32", "bfloat16", "float64")
    for s in (None, 5)
]
QUICK = [("vmap", "float32", None), ("ghost", "float32", None)]


@pytest.mark.parametrize(
    ("method", "dtype", "size"), slow_unless(lambda *case: case in QUICK, CASES)
)
def test_nonfinite_example_drops_only_itself(method, dtype, size):
    threshold, is_padding = 0.5, np.arange(8) == BAD
    with jax.enable_x64(dtype == "float64"):
        weights = params(dtype)
        values = (1, np.nan, np.inf)
        x = jnp.asarray(
            np.stack([np.where(is_padding[:, None, None], v * X, X) for v in values]), dtype
        )
        # The last one is a single entry.
        x = x.at[2].set(x[0]).at[2, BAD, 0, 0].set(np.inf)

        @functools.partial(jax.jit, compiler_options=AS_USERS)
        def run(weights, x, is_padding):
            clip = functools.partial(per_example.clipped_grad, method=method, microbatch_size=size)
            return {
                n: clip(loss, threshold)(weights[n], x, is_padding=is_padding)
                for n, (loss, _) in LOSSES.items()
            }

        references = expected(threshold, weights, x[0])
        rounding = {"float32": 1e-3, "bfloat16": 4e-2, "float64": 1e-5}[dtype]
        for kind, value in enumerate(values):
            for flags in (is_padding, ~np.ones(8, bool)):
                if kind == 0 and not flags.any():
                    continue
                for name, found in run(weights, x[kind], flags).items():
                    case = f"{name}, {value}, padding {flags.any()}"
                    change = np.asarray(found.grads, np.float64) - references[name]
                    assert np.linalg.norm(change) <= rounding * threshold, case
                    assert found.num_dropped == (0 if flags.any() else 1), case
                    assert np.isfinite(np.delete(found.norms, BAD, 0)).all(), case


def test_transform_does_not_hide_mixed_examples():
    """A transform that replaces NaN would also replace the gradients of the other examples."""
    x = np.where(np.arange(8)[:, None, None] == BAD, np.nan, X)
    with jax.enable_x64(True):
        weights, loss = params("float64"), LOSSES["plain"][0]
        clip = per_example.clipped_grad(loss, 0.5, pre_clipping_transform=jnp.nan_to_num)
        found = jax.jit(clip)(weights["plain"], x)
        reference = expected(0.5, weights, X)["plain"]
    np.testing.assert_allclose(found.grads, reference, atol=1e-5)
    assert found.num_dropped == 0


def test_grad_norms_stay_finite_for_other_examples():
    x = np.where(np.arange(8)[:, None, None] == BAD, np.nan, X)
    with jax.enable_x64(True):
        w, loss = params("float64")["plain"], LOSSES["plain"][0]
        for method in ("vmap", "ghost"):
            found, _ = jax.jit(per_example.grad_norms(loss, method=method))(w, x)
            assert np.array_equal(np.isfinite(found), np.arange(8) != BAD)


def test_nonfinite_example_under_vmap_drops_one_position():
    """A condition for each element of the `vmap` would always run the slow branch too."""
    bad = np.arange(8)[:, None, None] == BAD
    with jax.enable_x64(True):
        w, loss = params("float64")["plain"], LOSSES["plain"][0]
        batches = jnp.stack([X, np.where(bad, np.nan, X)])
        clip = jax.vmap(per_example.clipped_grad(loss, 0.5), (None, 0))
        dropped = jax.jit(clip)(w, batches).num_dropped
        # The examples of one position are mixed over the elements of the `vmap`.
        assert dropped[0] <= dropped[1] == 1
        kinds = {eqn.primitive.name for eqn in jax.make_jaxpr(clip)(w, batches).jaxpr.eqns}
        assert "cond" in kinds
        assert "scan" not in kinds
