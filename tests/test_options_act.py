"""Each option acts: with another value of it alone another program is traced, or it is refused."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from public_names import public

import optaxclip
from optaxclip import Threshold, scopes
from optaxclip.per_example.aggregate import PerExampleState

INNER = {"inner": optaxclip.scale_by_stable_adam()}
# What has no default, and what other options need in order to act.
GIVEN = {
    "adaptive_grad_clip": {"clipping": 0.1},
    "clip": {"max_delta": 1.0},
    "clip_attention_logits": {"heads": lambda path, leaf: optaxclip.Heads(-1)},
    "clip_by": {"scope": scopes.tree(), "limit": 1.0},
    "clip_by_block_rms": {"threshold": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_group_norm": {"max_norm": 1.0, "labels": "a"},
    "clip_by_norm": {"max_norm": 1.0},
    "clip_by_spectral_norm": {"c": 1.0},
    "clip_by_value": {"min_value": -1.0, "max_value": 1.0},
    "hyperball": {"learning_rate": 0.1},
    "per_example_clip_and_aggregate": {
        "limit": 1.0,
        "noise_multiplier": 1.0,
        "key": 0,
        "scope": scopes.leaf(),
    },
    "reset_state": INNER | {"every": 5},
    "scale_loss": INNER,
    "skip_above": INNER | {"limit": 1.0},
    "skip_nonfinite": INNER,
    "thresholds.relative_to_params": {"ratio": 0.1},
}
OTHER = {
    "axes": 0,
    "axis": lambda path, leaf: 1,
    "known_norm": "grad_norm",
    "mode": "hard",
    "nonfinite": "zero",
    "norm": "l1",
    "only": ("mu",),
    "option": "mean",
    "radius": "current",
    "record": "capped",
    "reduction": "sum",
    "response": "normalize",
    "stacked": 1,
}
# What only devices, messages, or groups of several sizes show; and what is passed on together with
# `nonfinite`.
ELSEWHERE = {"axis_name", "specs", "name", "split", "strict", "norm"}
TREE = {"w": jnp.ones((2, 4, 6))}
WITHOUT_OPTIONS = ("thresholds.constant", "thresholds.given", "thresholds.schedule")


def is_made(function):
    returned = inspect.signature(function).return_annotation
    return returned is Threshold or "Transformation[" in str(returned)


MADE = {
    name: function
    for name, function in public().items()
    if inspect.isfunction(function)
    and is_made(function)
    and name.partition(".")[0] not in ("monitor", "per_example")
    and name not in ("thresholds.adaptive", *WITHOUT_OPTIONS)
}


def traced(made):
    """The program of a first step, and its constants."""
    more = {"value": 1.0, "grad_norm": 1.0, "max_logits": {"w": jnp.ones(6)}}

    def step(tree):
        state = made.init(tree)
        if isinstance(made, Threshold):
            return made.update(tree, state, tree)
        params = None if isinstance(state, PerExampleState) else tree
        return made.update(tree, state, params, **more)

    jaxpr = jax.make_jaxpr(step)(jnp.ones(2) if isinstance(made, Threshold) else TREE)
    return str(jaxpr), jax.tree.map(str, jaxpr.consts)


def other(option, default):
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return 2 * default + 1 if isinstance(default, int) else default / 2 or 0.5
    return OTHER.get(option, 2)


@pytest.mark.by_day(6)
@pytest.mark.parametrize("name", MADE)
def test_each_option_acts(name):
    function, given = MADE[name], GIVEN.get(name, {})
    usual = traced(function(**given))
    for option, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty and option not in {*given, *ELSEWHERE}:
            try:
                found = traced(function(**given | {option: other(option, parameter.default)}))
            except ValueError as error:  # such as a rule that needs its record
                assert option in str(error)  # noqa: PT017
            else:
                assert found != usual, option
