"""Functions with derivatives of their own keep these in loops, whatever is differentiated first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax import P, lax

from optaxclip._base.derivatives import custom_jvp


@custom_jvp()
def squared(x):
    """Without its rule it has no derivative."""
    return lax.stop_gradient(x * x)


@squared.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return squared(x), 2 * x * dx


@custom_jvp(nondiff_argnums=(1,))
def of_all(x, axis):
    """`lax.pmax`, which has no derivative."""
    return lax.pmax(x, axis)


@of_all.defjvp
def _(axis, primals, tangents):
    (x,), (dx,) = primals, tangents
    largest = of_all(x, axis)
    return largest, lax.psum(jnp.where(x == largest, dx, 0), axis)


def in_scan(fn, x):
    return lax.scan(lambda x, _: (fn(x), None), x, length=2)[0]


LOOPS = {
    "scan": in_scan,
    "jit in scan": lambda fn, x: in_scan(jax.jit(fn), x),
    "scan in scan": lambda fn, x: in_scan(lambda x: in_scan(fn, x), x) ** 0.25,
    "fori_loop": lambda fn, x: lax.fori_loop(0, 2, lambda _, x: fn(x), x),
    "map": lambda fn, x: jnp.sum(lax.map(lambda by: fn(x * by) ** 2, jnp.ones(1))),
    "vmap": lambda fn, x: jnp.sum(jax.vmap(lambda x: in_scan(fn, x))(x[None])),
    "checkpoint": lambda fn, x: in_scan(jax.checkpoint(fn), x),
    "cond in scan": lambda fn, x: in_scan(lambda x: lax.cond(x > 0, fn, fn, x), x),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("loop", slow_unless({"scan", "map"}.__contains__, LOOPS))
def test_custom_jvp_supports_higher_derivatives_in_loops(loop):
    def fn(x):
        return LOOPS[loop](squared, x)

    ways = [
        jax.grad(jax.grad(fn)),
        jax.jacfwd(jax.grad(fn)),
        jax.grad(jax.jacfwd(fn)),
        jax.jacfwd(jax.jacfwd(fn)),
    ]
    thirds = [jax.grad(ways[0]), jax.jacfwd(ways[0]), jax.grad(ways[1]), jax.grad(ways[2])]
    found = jax.jit(lambda x: ([way(x) for way in ways], [way(x) for way in thirds]))
    # Of x**4.
    second, third = found(jnp.float32(1.5))
    np.testing.assert_allclose(second, 12 * 1.5**2, rtol=1e-4)
    np.testing.assert_allclose(third, 24 * 1.5, rtol=1e-4)


def test_custom_jvp_supports_mixed_derivatives_in_scan():
    def total(by, x):
        def step(carry, _):
            x, found = carry
            return (squared(x), found + by * x), None

        return lax.scan(step, (x, jnp.zeros(())), length=3)[0][1]

    mixed = [
        jax.grad(jax.grad(total), 1),
        jax.jacfwd(jax.grad(total), 1),
        jax.grad(jax.jacfwd(total), 1),
    ]
    found = jax.jit(lambda by, x: [way(by, x) for way in mixed])(1.0, 1.5)
    # Of x + x**2 + x**4.
    np.testing.assert_allclose(found, 1 + 2 * 1.5 + 4 * 1.5**3, rtol=1e-6)


def test_custom_jvp_supports_functions_without_derivative():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def total(x):
        def step(x, _):
            return x * of_all(x, "x"), None

        return lax.psum(jnp.sum(lax.scan(step, x, length=2)[0]), "x")

    def plain(x):
        once = x * jnp.max(x)
        return jnp.sum(once * jnp.max(once))

    whole = jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P())
    x = jnp.linspace(0.2, 1.6, 8)
    found = jax.jit(jax.jacfwd(jax.grad(whole)))(x)
    np.testing.assert_allclose(found, jax.jit(jax.hessian(plain))(x), rtol=1e-5, atol=1e-5)
