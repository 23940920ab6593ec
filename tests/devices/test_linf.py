"""The largest modulus over devices: a NaN is not lost, ties share the derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import ops, scopes

SCOPES = {"tree": scopes.tree(), "unit": scopes.unit()}
CASES = [(policy, scope) for policy in ("nan", "zero", "mask") for scope in SCOPES]
WHOLE = np.linspace(1, 2, 32, dtype=np.float32).reshape(8, 4)


def mesh(kind="Auto"):
    return jax.make_mesh((4,), ("i",), axis_types=(getattr(AxisType, kind),))


def clip_each(x, **options):
    """The updates and records of every policy, for the tree and for units."""
    found = {}
    for policy, scope in CASES:
        tx = optaxclip.clip_by(SCOPES[scope], 0.5, norm="linf", nonfinite=policy, **options)
        updates, state = tx.update(x, tx.init(x))
        found[policy, scope] = updates, state.info
    return found


def on_mesh(kind):
    place = NamedSharding(mesh(kind), P("i"))
    run = jax.jit(clip_each)
    return lambda x: run(jax.device_put(x, place))


def in_shard_map(**options):
    outs = dict.fromkeys(CASES, (P("i"), P()))
    fn = functools.partial(clip_each, specs=P("i"))
    return jax.jit(jax.shard_map(fn, mesh=mesh(), in_specs=P("i"), out_specs=outs, **options))


WAYS = {
    "one device": lambda: jax.jit(clip_each),
    "automatic": lambda: on_mesh("Auto"),
    "explicit": lambda: on_mesh("Explicit"),
    "tracked": in_shard_map,
    "not tracked": lambda: in_shard_map(check_vma=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_linf_policies_handle_nonfinite_element_on_any_device(way):
    run = WAYS[way]()
    for bad in (np.nan, np.inf):
        grads = WHOLE.copy()
        grads[5, 2] = bad
        for (policy, scope), (updates, info) in run(grads).items():
            expected, norm, factor = truth(grads, policy, axis=0 if scope == "unit" else None)
            np.testing.assert_allclose(updates, expected, rtol=1e-5)
            np.testing.assert_allclose(np.ravel(info.norm), [norm], rtol=1e-6)
            np.testing.assert_allclose(np.ravel(info.factor), [factor], rtol=1e-5)
            np.testing.assert_array_equal(np.ravel(info.num_nonfinite), [1])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_mask_zeros_nonfinite_elements_of_sharded_leaves(check_vma):
    specs = {"split": P("i"), "whole": P()}
    mask = functools.partial(masked, specs=specs)
    run = jax.jit(
        jax.shard_map(
            mask, mesh=mesh(), in_specs=(specs,), out_specs=(specs, P()), check_vma=check_vma
        )
    )
    grads = {"split": np.float32([3, np.nan, 0, 0]), "whole": np.float32([np.inf, 4])}
    updates, number = run(grads)
    np.testing.assert_allclose(updates["split"], [0.6, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(updates["whole"], [0, 0.8], rtol=1e-6)
    assert number == 1


def masked(grads, **options):
    tx = optaxclip.clip_by_global_norm(1.0, nonfinite="mask", **options)
    updates, state = tx.update(grads, None)
    return updates, state.info.num_nonfinite


def truth(grads, policy, axis):
    """Updates, and the record of the worst group."""
    if policy == "mask":
        grads = np.where(np.isfinite(grads), grads, 0)
    norms = np.max(grads, axis)
    worst = np.max(norms)
    replacement = {"nan": np.nan, "zero": 0, "mask": 0.5 / worst}[policy]
    with np.errstate(invalid="ignore"):
        clipped = np.where(np.isfinite(norms), grads * (0.5 / norms), replacement)
    return clipped, worst, replacement


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "tracked"])
def test_linf_derivative_splits_ties_across_devices(kind):
    norm = functools.partial(ops.global_norm, norm="linf")
    if kind == "tracked":
        norm = jax.shard_map(norm, mesh=mesh(), in_specs=P("i"), out_specs=P())
    derivatives = {"reverse": jax.grad(norm), "forward": jax.jacfwd(norm)}
    of_both_ways = jax.jit(lambda x: {way: of(x) for way, of in derivatives.items()})
    for entries, expected in (([3, 1, 3, 2], [0.5, 0, 0.5, 0]), ([1, 1, 3, 2], [0, 0, 1, 0])):
        x = np.array(entries, np.float32)
        if kind != "tracked":
            x = jax.device_put(x, NamedSharding(mesh(kind), P("i")))
        for way, slope in of_both_ways(x).items():
            np.testing.assert_array_equal(slope, expected, err_msg=way)


@pytest.mark.slow
def test_linf_second_derivative_works_in_scan():
    """`lax.pmax` has no derivative; the rule of the largest modulus has to be kept in loops."""

    def total(x, specs=None):
        def step(x, _):
            clipped, _ = optaxclip.clip_tree(x, 0.5, scope=scopes.tree(), norm="linf", specs=specs)
            return x + clipped, None

        return jnp.sum(jnp.sin(lax.scan(step, x, length=2)[0]))

    whole = jax.shard_map(
        lambda x: lax.psum(total(x, P("i")), "i"), mesh=mesh(), in_specs=P("i"), out_specs=P()
    )
    x, direction = WHOLE, jnp.cos(WHOLE)

    def second(fn):
        return jax.jit(lambda x: jax.jvp(jax.grad(fn), (x,), (direction,))[1])(x)

    np.testing.assert_allclose(second(whole), second(total), rtol=1e-5, atol=1e-6)
