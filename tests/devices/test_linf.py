"""The largest modulus over devices: a NaN is not lost, ties share the derivative."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import ops, scopes

POLICIES = ("nan", "zero", "mask")
WHOLE = np.linspace(1, 2, 32, dtype=np.float32).reshape(8, 4)


def mesh(kind="Auto"):
    return jax.make_mesh((4,), ("i",), axis_types=(getattr(AxisType, kind),))


def clip_each(x, **options):
    """The updates and records of every policy, for the tree and for units."""
    found = {}
    for policy in POLICIES:
        for scope in (scopes.tree(), scopes.unit()):
            tx = optaxclip.clip_by(scope, 0.5, norm="linf", nonfinite=policy, **options)
            updates, state = tx.update(x, tx.init(x))
            found[policy, len(found) % 2] = updates, state.info
    return found


def on_mesh(kind):
    place = NamedSharding(mesh(kind), P("i"))
    run = jax.jit(clip_each)
    return lambda x: run(jax.device_put(x, place))


def in_shard_map(**options):
    outs = dict.fromkeys([(policy, i) for policy in POLICIES for i in (0, 1)], (P("i"), P()))
    fn = functools.partial(clip_each, specs=P("i"))
    return jax.jit(jax.shard_map(fn, mesh=mesh(), in_specs=P("i"), out_specs=outs, **options))


WAYS = {
    "one device": lambda: jax.jit(clip_each),
    "automatic": lambda: on_mesh("Auto"),
    "explicit": lambda: on_mesh("Explicit"),
    "tracked": in_shard_map,
    "not tracked": lambda: in_shard_map(check_vma=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_policy_acts_on_one_bad_entry(way):
    run = WAYS[way]()
    for bad in (np.nan, np.inf):
        grads = WHOLE.copy()
        grads[5, 2] = bad
        found = run(grads)
        for (policy, is_unit), (updates, info) in found.items():
            if policy == "mask":
                expected = np.where(np.isfinite(grads), grads, 0)
                largest = np.max(expected, axis=0 if is_unit else None)
                expected = expected * (0.5 / largest)
                norm, factor = 2, 0.25
                if is_unit:
                    norm, factor = np.max(largest), 0.5 / np.max(largest)
            else:
                norm, factor = bad, {"nan": np.nan, "zero": 0}[policy]
                largest = np.max(grads, axis=0)
                expected = np.where(np.arange(4) == 2, factor, grads * (0.5 / largest))
                expected = expected if is_unit else np.full((8, 4), factor)
            np.testing.assert_allclose(updates, expected, rtol=1e-5)
            np.testing.assert_allclose(info.norm, norm if not is_unit else [norm], rtol=1e-6)
            np.testing.assert_allclose(info.factor, factor if not is_unit else [factor], rtol=1e-5)
            np.testing.assert_array_equal(np.ravel(info.num_nonfinite), [1])


@pytest.mark.parametrize("way", ["automatic", "explicit", "tracked"])
def test_ties_over_devices_share_the_derivative(way):
    x = np.array([3, 1, 3, 2], np.float32)
    norm = functools.partial(ops.global_norm, norm="linf")
    if way == "tracked":
        norm = jax.shard_map(norm, mesh=mesh(), in_specs=P("i"), out_specs=P())
    else:
        x = jax.device_put(x, NamedSharding(mesh(way.capitalize()[:4] if way == "automatic" else "Explicit"), P("i")))
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_array_equal(jax.jit(derivative(norm))(x), [0.5, 0, 0.5, 0])
