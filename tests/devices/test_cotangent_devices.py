"""What comes back through `ops.clip_cotangent` has one norm over all devices that share a leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from optaxclip.ops import clip_cotangent

RNG = np.random.default_rng(0)


@pytest.mark.slow
def test_many_devices():
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
    with pytest.raises(ValueError, match="pass specs=PartitionSpec"):
        jax.eval_shape(lambda: sharded(False, clip_norm=1.0))


def test_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = np.float32(RNG.normal(size=(8, 2)))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.NamedSharding(mesh, P("x")))

        def loss(h):
            return jnp.sum(clip_cotangent(jnp.sin(h), clip_norm=1.0) ** 2)

        def each(h):
            return jnp.sum(jax.vmap(loss)(h))

        found = jax.jit(lambda h: (jax.grad(loss)(h), jax.grad(each)(h)))(split)
        # What is the same for all examples is split as they are, and not copied to all devices.
        alike = jax.vmap(lambda w, _: clip_cotangent(w, clip_norm=1.0), (None, 0))
        assert jax.typeof(jax.jit(alike)(jnp.ones(2), split)) == jax.typeof(split)
        d = 2 * np.sin(x)
        norms = np.linalg.norm(d), np.linalg.norm(d, axis=1, keepdims=True)
        for got, norm in zip(found, norms, strict=True):
            assert jax.typeof(got) == jax.typeof(split)
            np.testing.assert_allclose(got, d * np.minimum(1, 1 / norm) * np.cos(x), rtol=1e-5)
