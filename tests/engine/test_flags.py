"""Arguments that are True or False: anything else is an error that names the argument."""

import inspect

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_names import GIVEN, public

import optaxclip
from optaxclip import scopes

ROWS = jnp.ones((2, 3))

# What other functions with a flag must be given beside it.
ARGUMENTS = GIVEN | {
    "accumulate.value_and_grad": {"loss_fn": jnp.dot, "microbatch_size": 1},
    "clip_tree": {"tree": ROWS, "thresholds": 1.0, "scope": scopes.tree()},
    "per_example.clipped_grad": {"loss_fn": jnp.dot, "threshold": 1.0},
    "per_example.explain": {"loss_fn": jnp.dot},
    "per_example.grad_norms": {"loss_fn": jnp.dot},
    "optaxclip.per_example_layer_norm_clip": {"grads": ROWS, "global_l2_norm_clip": 1.0},
    "per_example_layer_norm_clip": {"grads": ROWS, "global_l2_norm_clip": 1.0},
    "thresholds.adaptive": {"statistic": None, "settings": 1.0, "record": "raw"},
    "tuning.sweep": {
        "init_fn": lambda key: 0.0,
        "step_fn": lambda w, x, threshold: (w, w, w),
        "thresholds": [1.0],
        "steps": 1,
        "key": 0,
        "data": np.ones(1),
    },
}


def flags():
    """The public functions and their flags, which are the arguments with such a default."""
    for name, function in public().items():
        if inspect.isfunction(function):
            for flag, parameter in inspect.signature(function).parameters.items():
                # `tests/monitor/test_metrics.py` tests `per_group`, which needs a state.
                if isinstance(parameter.default, bool) and flag != "per_group":
                    yield name, function, flag


@pytest.mark.parametrize("wrong", [1, "yes", jnp.ones((), bool)])
def test_flags_reject_non_bool_values(wrong):
    found = list(flags())
    assert {flag for _, _, flag in found} >= {"debias", "geometric", "has_aux", "loss"}
    for name, function, flag in found:
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, got "):
            function(**ARGUMENTS.get(name, {}), **{flag: wrong})


def test_inject_hyperparams_skips_flags():
    make = optax.inject_hyperparams(optaxclip.clip_by_quantile)
    assert "geometric" not in make(geometric=False).init(ROWS).hyperparams
