"""What the pages say of the two sets of constants that AdaGC was published with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import thresholds


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("constants", "doubles_in", "share"),
    [({}, 694, 0.42), ({"lambda_rel": 1.04, "beta": 0.99}, 1734, 0.49)],
)
def test_how_fast_limits_grow_and_what_they_clip(constants, doubles_in, share):
    rule = thresholds.adagc(warmup_steps=1, lambda_abs=1e9, **constants)

    @jax.jit
    def limits_of(norms):
        def body(state, norm):
            limits, state = rule.update(norm, state, None)
            return state, limits.trigger

        return jax.lax.scan(body, rule.init(norms[0]), norms)[1]

    always_above = np.asarray(limits_of(np.float32([1.0] + [1e6] * 2000)))[1:]
    found = np.argmax(always_above >= 2 * float(always_above[0]))
    assert found == pytest.approx(doubles_in, abs=1)  # whose limits are rounded at every step
    calm = jnp.exp(0.1 * jax.random.normal(jax.random.key(0), (50001,)))
    clipped = np.mean((np.asarray(calm) > limits_of(calm))[1000:])
    assert clipped == pytest.approx(share, abs=0.01)
