"""The table of models for the tests of per-example norms, and what their files share.

`ghost_layers`, `ghost_networks` and `ghost_libraries` fill it; `ghost_models` has it whole.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = 6


class Model(NamedTuple):
    """A loss `loss(params, *example)`, its parameters, and a batch of `EXAMPLES` examples.

    Attributes:
      loss: of one example.
      params: any tree.
      batch: arrays `[EXAMPLES, ...]`.
      has_aux: whether the loss returns `(loss, aux)`.
      digits: how exact its gradients are in the dtype that they are computed in.
      has_float64: whether it can be computed in float64 from the same parameters.
    """

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    has_aux: bool = False
    digits: float = 1e-5
    has_float64: bool = True


MODELS: dict[str, Callable[[], Model]] = {}
QUICK: dict[str, str] = {}
"""With which scope a model is tested by day: "tree" or "leaf"."""


def model(make=None, *, quick=None):
    """Adds a function that makes a model to the table."""
    if make is None:
        return functools.partial(model, quick=quick)

    @functools.cache
    @functools.wraps(make)
    def made():
        with as_users():
            found = make()
        return found._replace(loss=_as_users(found.loss))

    MODELS[make.__name__] = made
    if quick:
        QUICK[make.__name__] = quick
    return made


@contextlib.contextmanager
def as_users():
    """JAX's usual promotion of types and ranks, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _as_users(loss):
    @functools.wraps(loss)
    def run(*args):
        with as_users():
            return loss(*args)

    return run


class Draw:
    """Random arrays, reproducible, each other than the last."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def weight(self, *shape):
        """A kernel: entries of the size at which activations stay of one size."""
        fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 4
        return jnp.asarray(self.rng.normal(size=shape) / fan_in**0.5, jnp.float32)

    def x(self, *shape):
        """Examples of different sizes, so that their gradients are."""
        sizes = np.geomspace(0.3, 3, EXAMPLES).reshape(-1, *[1] * len(shape))
        return jnp.asarray(self.rng.normal(size=(EXAMPLES, *shape)) * sizes, jnp.float32)

    def ids(self, high, *shape, low=0):
        """Whole numbers."""
        return jnp.asarray(self.rng.integers(low, high, (EXAMPLES, *shape)), jnp.int32)


def entropy(logits, label):
    """The cross entropy, summed over positions."""
    of_label = jnp.take_along_axis(logits, label[..., None], -1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - of_label)


def normalized(x):
    """Without a gain."""
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
