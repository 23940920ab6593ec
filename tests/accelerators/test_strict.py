"""Checks strict rounding in programs that are compiled for an H100 and a TPU v5e."""

import re

import jax
import jax.numpy as jnp
import pytest

from optaxclip._engine.scale import Multiplier, scale


@pytest.mark.parametrize("device", ["h100", "v5e"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_strict_rounding_multiplies_in_float32(device, dtype):
    """XLA once compared a product with itself on GPUs to detect how it had been rounded."""
    from benchmarks.accelerators.steps import Placement

    placement = Placement(device).replicated
    x = jax.ShapeDtypeStruct((64, 256), dtype, sharding=placement)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=placement)

    def scaled(x, power, ratio):
        return scale(x, Multiplier(power, ratio), axes=(0, 1), strict=True)

    text = jax.jit(scaled).lower(x, number, number).compile().as_text()
    assert re.search(r"= f32\S* multiply\(", text)
    assert not re.search(r"compare\((%\S+), \1\)", text)
