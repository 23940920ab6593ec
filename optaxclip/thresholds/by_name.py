"""One rule for all groups, made from a rule for each group's name."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.states import StaticNames
from optaxclip._base.types import PyTree, ThresholdRule, Thresholds
from optaxclip._border.packing import ravel_and_concatenate, split_and_reshape
from optaxclip.thresholds.calling import call_rule


def apply_by_name(rules: Mapping[str, ThresholdRule], groups: StaticNames) -> ThresholdRule:
    """One rule that applies to each group the rule of that group's name.

    The names are in the order of the norms. The state is a dict from name to the state of that
    group's rule.
    """
    own = {name: rules[name].as_pytree() for name in groups}
    uses_params = any(rule.uses_params for rule in own.values())
    return ThresholdRule(
        Partial(_init, groups, own), Partial(_update, groups, own), uses_params=uses_params
    )


def _init(groups: StaticNames, rules: dict[str, ThresholdRule], norms: Array) -> dict[str, PyTree]:
    del norms
    shapes = dict(zip(groups, groups.shapes, strict=True))
    return {name: rule.init(jnp.zeros(shapes[name])) for name, rule in rules.items()}


def _update(
    groups: StaticNames,
    rules: dict[str, ThresholdRule],
    norms: Array,
    state: dict[str, PyTree],
    param_norms: Array | None,
) -> tuple[Thresholds, dict[str, PyTree]]:
    own = _split_by_group(norms, groups)
    of_params = {} if param_norms is None else _split_by_group(param_norms, groups)
    triggers, targets, new = {}, {}, {}
    for name, rule in rules.items():
        param_norms = of_params[name] if rule.uses_params else None
        thresholds, new[name] = call_rule(
            rule, own[name], state[name], param_norms, f"the threshold of {name!r}"
        )
        triggers[name], targets[name] = thresholds
    if not norms.size:
        return Thresholds(norms, norms), new
    thresholds = (
        ravel_and_concatenate([each[name] for name in groups]) for each in (triggers, targets)
    )
    return Thresholds(*(each.astype(norms.dtype).reshape(norms.shape) for each in thresholds)), new


def _split_by_group(norms: Array, groups: StaticNames) -> dict[str, Array]:
    """The norms of each group, by its name; NaN if there are none, as in a tree without leaves."""
    if not norms.size:
        pieces = [jnp.full(shape, jnp.nan, norms.dtype) for shape in groups.shapes]
    else:
        pieces = split_and_reshape(norms, groups.shapes) if norms.ndim else [norms]
    return dict(zip(groups, pieces, strict=True))
