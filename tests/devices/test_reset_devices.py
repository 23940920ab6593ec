"""Resetting the moments of an optimizer whose state is split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

SPECS = {"w": P("data", "model"), "b": P("model")}
RNG = np.random.default_rng(0)
PARAMS, GRADS = (
    {"w": RNG.normal(size=(8, 6)).astype("f4"), "b": RNG.normal(size=4).astype("f4")}
    for _ in range(2)
)


def transformation(**specs):
    return optaxclip.reset_state(
        optax.sgd(0.1, momentum=0.9), when=3.0, only=("trace",), warmup=2, **specs
    )


def two_steps(grads, state, **specs):
    """Of which the first is followed by a reset."""
    tx = transformation(**specs)
    _, state = tx.update(grads, state)
    return tx.update(jax.tree.map(lambda x: x / 64, grads), state)


@functools.cache
def on_one_device():
    state = jax.tree.map(np.asarray, transformation().init(PARAMS))
    return state, jax.jit(two_steps)(GRADS, state)


def assert_as_on_one_device(found):
    updates, state = on_one_device()[1]
    assert (int(state.num_resets), int(state.since)) == (1, 1)
    np.testing.assert_allclose(state.inner_state[0].trace["w"], GRADS["w"] / 64)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, (updates, state))


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def specs_of_state(on=None):
    """Those of the parameters, and on all devices for the rest."""
    made = (lambda spec: spec) if on is None else functools.partial(NamedSharding, on)
    return optax.tree_map_params(
        transformation(),
        lambda _, spec: made(spec),
        on_one_device()[0],
        SPECS,
        transform_non_params=lambda _: made(P()),
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_jit(kind):
    on = mesh(kind)
    shardings = {name: NamedSharding(on, spec) for name, spec in SPECS.items()}
    state = jax.device_put(on_one_device()[0], specs_of_state(on))
    grads = jax.device_put(GRADS, shardings)
    with jax.set_mesh(on):
        compiled = jax.jit(two_steps, donate_argnums=1).lower(grads, state).compile()
        found = compiled(grads, state)
    assert set(collectives(compiled)) == {"all-reduce"}
    for tree in (found[0], found[1].inner_state[0].trace):
        for name, x in tree.items():
            assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
    assert_as_on_one_device(found)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("tracked", [True, False])
def test_in_shard_map(tracked):
    run = jax.shard_map(
        functools.partial(two_steps, specs=SPECS),
        mesh=mesh(),
        in_specs=(SPECS, specs_of_state()),
        out_specs=(SPECS, specs_of_state()),
        check_vma=tracked,
    )
    compiled = jax.jit(run).lower(GRADS, on_one_device()[0]).compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    assert_as_on_one_device(compiled(GRADS, on_one_device()[0]))


@pytest.mark.slow
def test_sharding_stays_without_jit():
    shardings = {name: NamedSharding(mesh(), spec) for name, spec in SPECS.items()}
    grads = jax.device_put(GRADS, shardings)
    tx = transformation()
    _, state = tx.update(grads, tx.init(grads))
    for name, x in state.inner_state[0].trace.items():
        assert not jnp.any(x)
        assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
