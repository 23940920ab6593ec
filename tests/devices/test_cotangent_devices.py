"""What comes back through `ops.clip_cotangent` has one norm over all devices that share a leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType

from optaxclip.ops import clip_cotangent

RNG = np.random.default_rng(0)


@pytest.mark.slow
def test_clip_cotangent_shares_norm_across_devices():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.float32(RNG.normal(size=(8, 2)))
    norm, column = np.sqrt(np.sum(x**2)), np.sqrt(np.sum(x**2, 0))

    def gradient(h, d, **options):
        return jax.grad(lambda h: jnp.sum(clip_cotangent(h, **options) * d))(h)

    def sharded(check_vma, **options):
        fn = functools.partial(gradient, **options)
        return jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)(
            x, x
        )

    def around(h):
        loss = jax.shard_map(
            lambda h, d: lax.psum(jnp.sum(clip_cotangent(h, clip_norm=1.0) * d), "x"),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P(),
        )
        return loss(h, x)

    found = jax.jit(
        lambda: {
            "tracked": (sharded(True, clip_norm=1.0), x / norm),
            "by name": (sharded(False, clip_norm=1.0, axis_name="x"), x / norm),
            "by specs": (sharded(False, clip_norm=1.0, axes=0, specs=P("x")), x / column),
            "each its own": (
                sharded(False, clip_norm=1.0, specs=P()),
                x / np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True)),
            ),
            "grad around": (jax.grad(around)(x), x / norm),
        }
    )()
    for name, (got, wanted) in found.items():
        np.testing.assert_allclose(got, wanted, rtol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match=r"pass specs=PartitionSpec\(\)"):
        jax.eval_shape(lambda: sharded(False, clip_norm=1.0))


WAYS = {
    "vmap of grad": lambda loss: jax.vmap(jax.grad(loss)),
    "a jit between": lambda loss: jax.vmap(jax.jit(jax.grad(loss))),
    "grad of vmap": lambda loss: jax.grad(lambda h, d: jnp.sum(jax.vmap(loss)(h, d))),
    "in a loop": lambda loss: jax.vmap(
        lambda h, d: lax.map(jax.grad(lambda h: loss(h, d)), h[None])[0]
    ),
}


def by_devices(fn):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


def test_clip_cotangent_under_vmap_requires_axis_name():
    """Types do not tell which, so one has to say it."""
    x = np.float32(RNG.normal(size=(16, 3)))

    def each(**options):
        def loss(h, d):
            return jnp.sum(clip_cotangent(h, clip_norm=0.5, **options) * d)

        return [by_devices(way(loss)) for way in WAYS.values()]

    for way in each():
        with pytest.raises(ValueError, match=r"varies over \['x'\]; pass axis_name=\(\)"):
            jax.eval_shape(way, x, x)

    def second_derivative(h, d):
        def squared(h):
            return jnp.sum(jax.grad(lambda h: jnp.sum(clip_cotangent(h * h, clip_norm=1.0) * d))(h))

        return jax.grad(squared)(h)

    found = jax.jit(
        lambda x: (
            [way(x, x) for way in each(axis_name=())],
            [way(x, x) for way in each(axis_name="x")],
            by_devices(second_derivative)(x, x),
        )
    )(x)
    rows, pairs = np.linalg.norm(x, axis=1), np.linalg.norm(x.reshape(8, 2, 3), axis=(0, 2))
    for got, norms in zip(found[:2], (rows, np.tile(pairs, 8)), strict=True):
        for each_way in got:
            wanted = x * np.minimum(1, 0.5 / norms)[:, None]
            np.testing.assert_allclose(each_way, wanted, rtol=1e-5)
    np.testing.assert_allclose(found[2], 2 * x / np.linalg.norm(x), rtol=1e-5)


def test_clip_cotangent_accepts_explicit_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = np.float32(RNG.normal(size=(8, 2)))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.NamedSharding(mesh, P("x")))

        def loss(h):
            return jnp.sum(clip_cotangent(jnp.sin(h), clip_norm=1.0) ** 2)

        def each(h):
            return jnp.sum(jax.vmap(loss)(h))

        def from_outside(w, h):
            return jnp.sum(jax.vmap(lambda h: jnp.vdot(clip_cotangent(w, clip_norm=1.0), h))(h))

        found = jax.jit(lambda h: (jax.grad(loss)(h), jax.grad(each)(h)))(split)
        of_outside = jax.jit(jax.grad(from_outside))(jnp.ones(2), split)
        # What is the same for all examples is split as they are, and not copied to all devices.
        alike = jax.vmap(lambda w, _: clip_cotangent(w, clip_norm=1.0), (None, 0))
        assert jax.typeof(jax.jit(alike)(jnp.ones(2), split)) == jax.typeof(split)
        wanted = np.sum(x / np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True)), 0)
        np.testing.assert_allclose(of_outside, wanted, rtol=1e-5)
        d = 2 * np.sin(x)
        norms = np.linalg.norm(d), np.linalg.norm(d, axis=1, keepdims=True)
        for got, norm in zip(found, norms, strict=True):
            assert jax.typeof(got) == jax.typeof(split)
            np.testing.assert_allclose(got, d * np.minimum(1, 1 / norm) * np.cos(x), rtol=1e-5)


def test_clip_cotangent_names_missing_mesh():
    """Without a set mesh JAX cannot split a copy for each example, and showed an internal error."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))

    def loss(w, x):
        clipped = functools.partial(clip_cotangent, clip_norm=1.0)
        return jnp.sum(jax.vmap(lambda one: jnp.sum(clipped(w) * one))(x))

    with pytest.raises(ValueError, match=r"x must be on the explicit mesh .*jax\.set_mesh"):
        jax.grad(loss)(jnp.ones(3), x)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(jnp.ones(3), x)
    np.testing.assert_allclose(found, 7 / 3**0.5, rtol=1e-6)
