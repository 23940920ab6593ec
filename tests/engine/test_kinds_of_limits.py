"""Thresholds of each kind of number, and what is the same for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import METHODS, ONE_OF_EACH, assert_same

import optaxclip
from optaxclip import scopes, thresholds

THRESHOLDS = [
    np.float16(0.5),
    np.float64(0.5),
    lambda count: jnp.float16(0.5) + 0 * count.astype(jnp.float16),
    lambda count: 0.5,
    np.array(0.5, np.float32),
    jnp.bfloat16(0.5),
    jnp.asarray(0.5),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("bits", [32, 64])
def test_every_kind_of_threshold_gives_the_same(name, bits):
    with jax.enable_x64(bits == 64):
        grads = {"w": jnp.array([3.0, 0.25], jnp.float16), "b": jnp.array([4.0], jnp.float32)}
        schedules_too = name != "clip_by_group_norm_dict"

        @jax.jit
        def updates(grads, traced):
            threshold_values = [
                0.5,
                traced,
                *(x for x in THRESHOLDS if schedules_too or not callable(x)),
            ]
            methods = [METHODS[name].make(threshold) for threshold in threshold_values]
            return [method.update(grads, method.init(grads), grads)[0] for method in methods]

        expected, *others = updates(grads, jnp.float32(0.5))
        for update in others:
            assert_same(update, expected)


STEPS = np.float32([0.5, 2, 8])
"""A schedule by the number of the update, from 0."""


def scheduled(count):
    return jnp.asarray(STEPS)[count]


SCHEDULED = {
    "clip": optaxclip.clip(scheduled),
    "clip_by_value": optaxclip.clip_by_value(-1.0, scheduled),
    "clip_by_norm": optaxclip.clip_by_norm(scheduled),
    "rule": optaxclip.clip_by(scopes.leaf(), thresholds.schedule(scheduled)),
    "of weights": optaxclip.clip_by(scopes.leaf(), thresholds.relative_to_params(scheduled)),
    "by label": optaxclip.clip_by(scopes.group(lambda *_: "a"), {"a": scheduled}),
    "spectral": optaxclip.clip_by_spectral_norm(scheduled, "hard"),
    "normalize": optaxclip.normalize_by_global_norm(scheduled),
    "skip": optaxclip.skip_above(optax.identity(), scheduled),
    "skip by loss": optaxclip.skip_above(optax.identity(), np.inf, loss_threshold=scheduled),
}


def test_schedules_start_with_step_zero():
    grads = jnp.full((1, 1), 4.0)

    @jax.jit
    def run():
        found = {}
        for name, tx in SCHEDULED.items():
            state, params, found[name] = tx.init(jnp.ones((1, 1))), jnp.ones((1, 1)), []
            for _ in STEPS:
                update, state = tx.update(grads, state, params, value=4.0)
                found[name].append(update[0, 0])
        return found

    expected = dict.fromkeys(SCHEDULED, (0.5, 2.0, 4.0))
    expected |= {"normalize": STEPS, "skip": [0, 0, 4], "skip by loss": [0, 0, 4]}
    for name, found in run().items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["clip", "clip_by_global_norm", "clip_by_group_norm_dict"])
@pytest.mark.usefixtures("x64")
def test_a_64_bit_threshold_is_not_rounded(name):
    grads, threshold = {"w": jnp.array([3.0], jnp.float64), "v": jnp.zeros(2, jnp.float64)}, 0.1
    update = METHODS[name].make(threshold).update(grads, None)[0]["w"]
    assert update.dtype == jnp.float64
    assert threshold * (1 - 1e-12) <= update[0] <= threshold
