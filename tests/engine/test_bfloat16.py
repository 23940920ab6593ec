"""Products in bfloat16 on bit patterns, as a CPU takes them: every entry there is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._backend.kernels import scale_bfloat16_on_cpu

EVERY = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("strict", [False, True])
def test_scale_bfloat16_bits_rounds_all_values_correctly(strict):
    factors = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 0.3, 2**-20])

    @jax.jit
    def scaled(by):
        return scale_bfloat16_on_cpu(EVERY, jnp.ones_like(by), by, strict=strict)

    entries = np.float32(EVERY)
    for by in factors:
        found, wide = np.float32(scaled(by)), np.float32(jnp.asarray(entries) * by)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(entries))
        # What underflows on the way need not be rounded once.
        is_usual = ~np.isnan(entries) & (np.abs(wide) > 2.0**-100) & (np.abs(wide) < 3e38)
        found, wide = found[is_usual], wide[is_usual]
        nearest = np.float32(jnp.asarray(wide).astype(jnp.bfloat16))
        if not strict:
            np.testing.assert_array_equal(found, nearest)
        else:
            assert np.all(np.abs(found) <= np.abs(wide))
            assert np.all(np.abs(found - wide) < 2.0**-7 * np.abs(wide))
