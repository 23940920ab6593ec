"""Keys of examples, and keys for noise: nothing shares random numbers by mistake."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optaxclip
from optaxclip import per_example

METHODS = ("vmap", "ghost")
X, W = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
aggregate = optaxclip.per_example_clip_and_aggregate


def noisy(w, x, key):
    return jnp.sum(jax.random.uniform(key, (2,)) * jnp.tanh(x @ w))


def in_loop(w, x, key):
    return lax.scan(lambda h, k: (h + noisy(w, x, k), None), 0.0, jax.random.split(key, 2))[0]


def from_raw(w, x, key):
    return noisy(w, x, jax.random.wrap_key_data(jax.random.key_data(key), impl="rbg"))


def folded(shared):
    return lambda w, x, i: noisy(w, x, jax.random.fold_in(shared, i))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_clipped_grad_refuses_rbg_keys(impl, method):
    shared = jax.random.key(0, impl=impl)
    keys, index = jax.random.split(shared, 4), np.arange(4)
    raw = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    cases = [(noisy, keys), (in_loop, keys), (from_raw, raw), (folded(shared), index)]
    for loss, batch in cases:
        with pytest.raises(ValueError, match=r"from the first key.*impl='threefry2x32'"):
            per_example.clipped_grad(loss, 1.0, method=method)(W, X, batch)
        with pytest.raises(ValueError, match="from the first key"):
            per_example.grad_norms(loss, method=method)(W, X, batch)


@pytest.mark.parametrize("method", METHODS)
def test_clipped_grad_accepts_shared_rbg_key(method):
    shared = jax.random.key(0, impl="rbg")

    def loss(w, x):
        return lax.scan(lambda h, k: (h + noisy(w, x, k), None), 0.0, jax.random.split(shared))[0]

    clip = jax.jit(per_example.clipped_grad(loss, 9.0, method=method))
    both, one = clip(W, X), clip(W, X[:1])
    np.testing.assert_allclose(both.grads, 4 * one.grads, rtol=1e-5)


def test_aggregate_keeps_all_bits_of_seed():
    seeds = (0, 2**32 - 1, 2**32, 2**32 + 1, 2**64, 2**64 + 2**32, -(2**40), np.int64(2**33))
    states = [aggregate(1.0, 1.0, key=seed).init(W).key for seed in seeds]
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in states}) == len(seeds)
    assert np.array_equal(
        jax.random.key_data(aggregate(1.0, 1.0, key=7).init(W).key),
        jax.random.key_data(jax.random.key(7)),
    )


def test_shared_noise_under_vmap_warns():
    params, grads = jnp.zeros((3, 2)), jnp.zeros((3, 4, 2))
    tx = aggregate(1.0, 1.0, key=0)
    for init in (jax.vmap(tx.init), jax.jit(jax.vmap(tx.init)), jax.vmap(jax.jit(tx.init))):
        with pytest.warns(UserWarning, match="key is the same for all 3"):
            init(params)
    with pytest.warns(UserWarning, match="key is the same for all 3"):
        jax.vmap(lambda g: tx.update(g, tx.init(None))[0])(grads)
    result = per_example.clip_sum(grads[0], 1.0)
    with pytest.warns(UserWarning, match="key is the same for all 3"):
        jax.vmap(
            lambda g: per_example.noisy_mean(result._replace(grads=g), 1.0, jax.random.key(0), 4)
        )(grads[:, 0])


def test_keys_of_seeds_give_separate_noise():
    keys, grads = jax.random.split(jax.random.key(0), 3), jnp.zeros((3, 4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = jax.jit(jax.vmap(lambda key, p: aggregate(1.0, 1.0, key=key).init(p)))(
            keys, jnp.zeros((3, 2))
        )
        noise = jax.jit(jax.vmap(aggregate(1.0, 1.0, key=0).update))(grads, states)[0]
    assert len(np.unique(np.asarray(noise))) == noise.size


def test_partitions_with_equal_keys_get_separate_noise():
    params = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    stages = {name: aggregate(1.0, 1.0, key=0) for name in params}
    tx = optax.partition(stages, {"a": "a", "b": "b"})
    grads = {name: jnp.zeros((4, 3)) for name in params}
    noise, _ = jax.jit(tx.update)(grads, tx.init(params))
    assert not np.any(np.isin(noise["a"], noise["b"]))
