"""Every kind of clip under JAX's settings, and in the ways in which JAX runs a function.

Strict promotion of dtypes and ranks is on in all tests; `tests/conftest.py` says so.
"""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from jax import export

import optaxclip
from optaxclip import per_example

PARAMS = {"w": np.linspace(0.1, 1, 12, dtype=np.float32).reshape(4, 3), "b": np.ones(3, np.float32)}
SPIKE = np.float32([1, 8, 0.5, 2])
"""How large the gradients are at each step."""
STEPS = {name: SPIKE.reshape(-1, *[1] * x.ndim) * (1.1 - x) for name, x in PARAMS.items()}
EXAMPLES, SIZE = 5, 2
X = np.linspace(-1, 1, EXAMPLES * 4, dtype=np.float32).reshape(EXAMPLES, 4)

CHAINED = {
    "global norm": optaxclip.clip_by_global_norm(1.0),
    "units": optaxclip.adaptive_grad_clip(0.1),
    "zclip": optaxclip.zclip(warmup_steps=2),
    "skip": optaxclip.skip_nonfinite(
        optax.chain(optaxclip.clip_by_block_rms(0.1), optax.sgd(0.1, momentum=0.9))
    ),
    "skip above": optaxclip.skip_above(optax.sgd(0.1), 5.0),
    "values": optaxclip.clip(0.5),
}
PRIVATE = optaxclip.per_example_clip_and_aggregate(1.0, noise_multiplier=0.5, key=0)


def loss_fn(params, x):
    return jnp.sum(jnp.square(jnp.tanh(x @ params["w"]) + params["b"]))


def each_method(params, steps, x):
    """What every method makes of a few steps, and the states that it ends with."""
    aggregate = optax.chain(PRIVATE, optax.sgd(0.1))
    clipped = per_example.clipped_grad(loss_fn, 1.0, microbatch_size=SIZE)
    sums = clipped(params, x)
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, x)

    def step(states, updates):
        found = {name: tx.update(updates, states[name], params) for name, tx in CHAINED.items()}
        found["private"] = aggregate.update(grads, states["private"], params)
        return {name: x[1] for name, x in found.items()}, {name: x[0] for name, x in found.items()}

    states = {name: tx.init(params) for name, tx in CHAINED.items()}
    states, updates = jax.lax.scan(step, states | {"private": aggregate.init(params)}, steps)
    of_clips = {name: states[name].info._asdict() for name in ("global norm", "units", "zclip")}
    return updates, of_clips, sums.grads, sums.norms


ARGUMENTS = (PARAMS, STEPS, X)


@pytest.fixture(scope="module")
def expected():
    return jax.tree.map(np.asarray, jax.jit(each_method)(*ARGUMENTS))


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.dtype == y.dtype, path
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_methods_clip_skip_and_add_noise(expected):
    updates, _, sums, norms = expected
    clipped = np.sqrt(
        sum(np.square(x).reshape(4, -1).sum(1) for x in updates["global norm"].values())
    )
    np.testing.assert_allclose(clipped, 1, rtol=3e-6)
    skipped = [not np.any(x) for x in updates["skip above"]["w"]]
    assert skipped == [False, True, False, False]
    noise = updates["private"]["w"]
    assert all(np.any(noise[i] != noise[0]) for i in range(1, 4))
    assert norms[0] < 1 < min(norms[1:])
    assert np.sqrt(sum(np.square(x).sum() for x in sums.values())) <= EXAMPLES


def as_usual():
    """What users have, who turn nothing on."""
    both = contextlib.ExitStack()
    both.enter_context(jax.numpy_dtype_promotion("standard"))
    both.enter_context(jax.numpy_rank_promotion("allow"))
    return both


SETTINGS = {
    "as usual": as_usual,
    "64 bits": lambda: jax.enable_x64(True),
    "NaNs are errors": lambda: jax.debug_nans(True),
    "transfers are errors": lambda: jax.transfer_guard("disallow"),
    "matmul in bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
    "no jit": jax.disable_jit,
}
SLOW = {"matmul in bfloat16", "no jit"}
marked = slow_unless(lambda name: name not in SLOW, SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", marked)
def test_methods_agree_under_jax_settings(name, expected):
    arguments = jax.device_put(ARGUMENTS)
    with SETTINGS[name]():
        found = jax.jit(each_method)(*arguments)
    assert_close(found, expected)


@pytest.mark.slow
def test_methods_leak_no_tracers():
    jax.clear_caches()
    with jax.checking_leaks():
        jax.eval_shape(each_method, *ARGUMENTS)


def eagerly_with_nans_as_errors(*args):
    with jax.debug_nans(True):
        return each_method(*args)


def checkpointed(*args):
    return jax.checkpoint(each_method)(*args)


def ahead_of_time(*args):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return jax.jit(each_method).lower(*shapes).compile()(*args)


def exported(*args):
    platforms = ("cpu", "cuda", "tpu")
    return export.export(jax.jit(each_method), platforms=platforms)(*args).call(*args)


def in_two_threads(*args):
    found = {}

    def work(number):
        found[number] = each_method(*args)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(found[0], found[1])
    return found[1]


WAYS = [eagerly_with_nans_as_errors, checkpointed, exported, in_two_threads]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [ahead_of_time, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS)]
)
def test_methods_agree_under_jax_execution_modes(way, expected):
    assert_close(way(*ARGUMENTS), expected)


@pytest.mark.slow
def test_clips_differentiate_through_checkpoint():
    def clipped(grads):
        return {
            name: tx.update(grads, tx.init(PARAMS), PARAMS)[0]
            for name, tx in CHAINED.items()
            if "skip" not in name
        }

    def loss(grads, around):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(around(clipped)(grads)))

    derivative = jax.jit(jax.grad(loss), static_argnums=1)
    grads = jax.tree.map(lambda x: x[1], STEPS)
    assert_close(derivative(grads, jax.checkpoint), derivative(grads, lambda fn: fn))
