"""Each option acts: with another value of it alone another program is traced, or it is refused."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from public_names import GIVEN, public

from optaxclip import ThresholdRule
from optaxclip.monitor._noise_scale import NoiseSums
from optaxclip.per_example._aggregate import PerExampleState

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
    "target_decay": 0.5,
}
# What only devices, messages, or groups of several sizes show; and what is passed on together with
# `nonfinite`.
ELSEWHERE = {"axis_name", "specs", "name", "split", "strict", "norm"}
TREE = {"w": jnp.ones((2, 4, 6))}
WITHOUT_OPTIONS = ("thresholds.constant", "thresholds.fixed", "thresholds.schedule")


def is_made(function):
    returned = inspect.signature(function).return_annotation
    return returned is ThresholdRule or "Transformation[" in str(returned)


MADE = {
    name: function
    for name, function in public().items()
    if inspect.isfunction(function)
    and is_made(function)
    and name.partition(".")[0] not in ("monitor", "per_example")
    and name not in ("thresholds.adaptive", *WITHOUT_OPTIONS)
}


def first_step(made):
    """A function that makes a state and takes a step, and its argument."""
    more = {"value": 1.0, "grad_norm": 1.0, "max_logits": {"w": jnp.ones(6)}}
    more |= {"noise": NoiseSums(jnp.ones(()), jnp.ones(()))}

    def step(tree):
        state = made.init(tree)
        if isinstance(made, ThresholdRule):
            return made.update(tree, state, tree)
        params = None if isinstance(state, PerExampleState) else tree
        return made.update(tree, state, params, **more)

    return step, jnp.ones(2) if isinstance(made, ThresholdRule) else TREE


def traced(made):
    """The program of a first step, and its constants."""
    step, tree = first_step(made)
    jaxpr = jax.make_jaxpr(step)(tree)
    return str(jaxpr), jax.tree.map(str, jaxpr.consts)


def other(option, default):
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return 2 * default + 1 if isinstance(default, int) else default / 2 or 0.5
    return OTHER.get(option, 2)


@pytest.mark.by_day(4)
@pytest.mark.parametrize("name", MADE)
def test_options_change_traced_program(name):
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


@pytest.mark.parametrize("name", [name for name in MADE if name.startswith("thresholds.")])
def test_rule_arguments_change_rule(name):
    make, given = MADE[name], GIVEN.get(name, {})
    usual = jax.tree.flatten(make(**given))
    for option, parameter in inspect.signature(make).parameters.items():
        if option not in given:
            changed = make(**given | {option: other(option, parameter.default)})
            assert jax.tree.flatten(changed) != usual, option


@pytest.mark.parametrize("name", [*MADE, "monitor.noise_scale"])
def test_numeric_options_accept_any_dtype(name):
    """Types are promoted strictly here, so nothing else is mixed with float32."""

    def formats(given):
        step, tree = first_step(function(**given))
        return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(step, tree))]

    function, given = public()[name], GIVEN.get(name, {})
    usual = formats(given)
    for option, parameter in inspect.signature(function).parameters.items():
        number = given.get(option, parameter.default)
        if isinstance(number, float):
            try:
                found = formats(given | {option: jnp.bfloat16(number)})
            except (TypeError, ValueError) as error:
                assert option in str(error), option  # noqa: PT017
            else:
                assert found == usual, option
