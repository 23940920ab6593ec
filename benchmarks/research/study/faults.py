"""Draws the faults of a run from its seed.

Faults change the weights of examples in the loss, or scramble labels, tokens or rewards. They are
inputs, so that all faults share one program.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

FAULTS = {
    "none": "nothing goes wrong",
    "spike": "about one batch in 200 counts 100 times as much",
    "tails": "one batch in ten is scrambled",
    "nan": "in one batch in 100 a quarter of the examples, a microbatch, has the loss NaN",
    "jump": "from the middle on every loss counts ten times as much",
    "stretch": "a tenth of the steps, from the middle on, have scrambled batches",
}
"""Descriptions of the faults."""
HARMLESS = {
    "times 100": "every loss counts 100 times; SGD's rate is a hundredth",
    "over 100": "every loss counts a hundredth; SGD's rate is 100 times as large",
    "late rate": "until three fifths of the run the rate is a tenth",
}
"""Conditions without a fault, which safeguards should not hurt."""
NUMBERS = {name: number for number, name in enumerate(FAULTS | HARMLESS)}
SCALES = {"times 100": 100.0, "over 100": 0.01}
LATE, EARLY_SHARE = 0.6, 0.1

SPIKE, JUMP = 100.0, 10.0
SPIKE_EVERY, NAN_EVERY = 200, 100
SCRAMBLED, STRETCH = 0.1, 0.1
"""Fractions of the batches."""
MICROBATCHES = 4


class Faults(NamedTuple):
    """The faults of a run, with arrays `[steps]`.

    Attributes:
      factor: The factor of the weights of the examples.
      is_scrambled: Whether the batch is scrambled.
      is_nan: Whether a microbatch has the weight NaN.
      rate: The factor of the learning rate.
      scale: The factor of all losses of the run, float32[], which `factor` includes.
      onset: The first bad step, int32[], or -1 if there is none or bad steps occur throughout.
    """

    factor: Array
    is_scrambled: Array
    is_nan: Array
    rate: Array
    scale: Array
    onset: Array


def draw(fault: Array, key: Array, steps: int) -> Faults:
    """Draws the faults of a run from the number of its fault, int32[]."""
    spikes, scrambled, nans = jax.random.split(key, 3)
    step = jnp.arange(steps)
    middle = steps // 2
    is_late = step >= middle
    in_stretch = is_late & (step < middle + math.ceil(STRETCH * steps))
    is_spike = _select_one_in(SPIKE_EVERY, spikes, steps)
    is_nan = _select_one_in(NAN_EVERY, nans, steps)
    at_random = jax.random.bernoulli(scrambled, SCRAMBLED, (steps,))
    no_steps = jnp.zeros(steps, bool)
    masks = {
        "spike": (is_spike, no_steps),
        "tails": (no_steps, at_random),
        "jump": (is_late, no_steps),
        "stretch": (no_steps, in_stretch),
    }
    each = [masks.get(name, (no_steps, no_steps)) for name in NUMBERS]
    is_larger, is_scrambled = (jnp.stack(rows)[fault] for rows in zip(*each, strict=True))
    is_nan &= fault == NUMBERS["nan"]
    large_factor = jnp.where(fault == NUMBERS["spike"], SPIKE, JUMP)
    is_bad = is_larger | is_scrambled | is_nan
    has_onset = is_bad.any() & (fault != NUMBERS["tails"])
    onset = jnp.where(has_onset, jnp.argmax(is_bad), -1)
    scale = jnp.array([SCALES.get(name, 1.0) for name in NUMBERS])[fault]
    is_low = (fault == NUMBERS["late rate"]) & (step < LATE * steps)
    rate = jnp.where(is_low, EARLY_SHARE, 1.0)
    return Faults(
        scale * jnp.where(is_larger, large_factor, 1.0), is_scrambled, is_nan, rate, scale, onset
    )


def compute_weights(factor: Array, is_nan: Array, examples: int) -> Array:
    """Returns the weights of a step, float32[examples]. A microbatch has every fourth example."""
    is_of_first = jnp.arange(examples) % MICROBATCHES == 0
    return jnp.where(is_nan & is_of_first, jnp.nan, factor)


def _select_one_in(every: int, key: Array, steps: int) -> Array:
    """Selects a step in the middle half of every `every` steps, so that runs can recover."""
    blocks = max(1, steps // every)
    size = steps // blocks
    offsets = jax.random.randint(key, (blocks,), size // 4, max(size * 3 // 4, size // 4 + 1))
    chosen = jnp.arange(blocks) * size + offsets
    return (jnp.arange(steps)[:, None] == chosen[None]).any(1)
