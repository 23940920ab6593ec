"""Leaves in the host's memory beside leaves in the device's: as if all were in one, bit for bit."""

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import NEEDS_JAX_0_10_2, slow_unless
from jax.sharding import AxisType
from methods_table import GRADS, PARAMS, SHAPES, assert_same, random_tree
from parts_table import TRANSFORMATIONS

import optaxclip
from optaxclip import monitor, ops, scopes

HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
# Those with noise have a key in their state, of which JAX does not say where it lies.
NAMES = [name for name in TRANSFORMATIONS if not name.startswith("per_example")]


def in_host(tree, leaves=("w", "v")):
    """The tree with these leaves in the host's memory."""
    return {name: jax.device_put(x, HOST) if name in leaves else x for name, x in tree.items()}


def all_in_host(tree):
    return jax.tree.map(lambda x: jax.device_put(x, HOST), tree)


def memories(tree):
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)


@NEEDS_JAX_0_10_2
@pytest.mark.parametrize(
    ("name", "how"),
    slow_unless(
        lambda name, how: (name, how) == ("zclip", "jit"),
        [(name, how) for name in NAMES for how in ("eager", "jit")],
    ),
)
def test_transformations_keep_memory_kinds_and_values(name, how):
    tx = TRANSFORMATIONS[name]

    def step(grads, state, params):
        return tx.update(grads, state, params, value=1.0)

    step = jax.jit(step) if how == "jit" else step
    states = [tx.init(PARAMS)]
    for seed in (1, 2):
        updates, state = step(random_tree(seed), states[-1], PARAMS)
        states.append(state)
    grads = in_host(random_tree(2))
    elsewhere = (all_in_host(states[1]), all_in_host(PARAMS))
    for old, params in ((states[1], in_host(PARAMS, ("b",))), elsewhere):
        found = step(grads, old, params)
        assert_same(found, (updates, states[2]))
        assert memories(found) == (memories(grads), memories(old))
    # A state may be made of parameters wherever they lie.
    assert_same(tx.init(in_host(PARAMS)), states[0])


@pytest.mark.slow
def test_per_example_accepts_key_in_host_memory():
    tx, grads = TRANSFORMATIONS["per_example"], random_tree(2, 2)
    state = tx.init(PARAMS)
    for function in (tx.update, jax.jit(tx.update)):
        found = function(grads, all_in_host(state))[0]
        jax.tree.map(assert_same, found, function(grads, state)[0])
    assert memories(tx.update(grads, all_in_host(state))[1].key) == "pinned_host"


def clipped_tree(tree):
    return optaxclip.clip_tree(tree, 1.0, scope=scopes.unit())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize(
    "function",
    [
        clipped_tree,
        ops.global_norm,
        lambda tree: ops.clip_by_value(tree, -0.5, 0.5),
        lambda tree: ops.clip_by_norm(tree, 1.0, axes=0),
        lambda tree: ops.clip_by_average_norm(tree, 0.1),
        lambda tree: ops.clip_by_global_norm(tree, 1.0),
        lambda tree: jax.vjp(lambda x: ops.clip_cotangent(x, clip_norm=1.0), tree)[1](tree)[0],
    ],
)
def test_ops_keep_memory_kinds_and_values(function, how):
    function = jax.jit(function) if how == "jit" else function
    found, expected = function(in_host(GRADS)), function(GRADS)
    assert_same(found, expected)
    clipped = found[0] if isinstance(found, tuple) else found
    if isinstance(clipped, dict):
        assert memories(clipped) == memories(in_host(GRADS))


@pytest.mark.slow
@NEEDS_JAX_0_10_2
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_adaptive_grad_clip_keeps_memory_kind_on_mesh(kind):
    mesh = jax.make_mesh((2,), ("data",), (kind,))
    split = jax.NamedSharding(mesh, jax.P("data"))
    tree = {name: jnp.arange(4.0 * len(shape)) for name, shape in SHAPES.items()}
    tree = jax.device_put(tree, split)
    mixed = tree | {"w": jax.device_put(tree["w"], split.with_memory_kind("pinned_host"))}
    tx = optaxclip.adaptive_grad_clip(0.1)
    for update in (tx.update, jax.jit(tx.update)):
        found, expected = (update(x, tx.init(x), x)[0] for x in (mixed, tree))
        assert_same(found, expected)
        assert all(found[name].sharding == mixed[name].sharding for name in mixed)


@pytest.mark.slow
def test_monitor_reads_states_in_host_memory():
    tx = optax.chain(
        monitor.record(3), optaxclip.clip_by_norm(1.0), optaxclip.skip_nonfinite(optax.sgd(0.1))
    )
    state = tx.update(GRADS, tx.init(PARAMS))[1]
    offloaded = all_in_host(state)
    numbers = (
        monitor.metrics,
        jax.jit(monitor.metrics),
        monitor.scalars,
        jax.jit(monitor.step_was_applied),
    )
    for function in numbers:
        assert_same(function(offloaded), function(state))
    assert_same(monitor.history(offloaded), monitor.history(state))
    assert monitor.bad_leaves(offloaded) == ()
    assert monitor.step_status(offloaded) == "ok"
