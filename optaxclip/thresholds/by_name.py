"""One rule for all groups, made from a rule for each group's name."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.states import Names
from optaxclip._base.types import Limits, PyTree, Threshold
from optaxclip._border.packing import concatenated, split_up
from optaxclip.thresholds.calling import limits_by


def by_name(rules: Mapping[str, Threshold], groups: Names) -> Threshold:
    """One rule that applies to each group the rule of that group's name.

    The names are in the order of the norms. The state is a dict from name to the state of that
    group's rule.
    """
    own = {name: rules[name].as_pytree() for name in groups}
    uses_params = any(rule.uses_params for rule in own.values())
    return Threshold(
        Partial(_init, groups, own), Partial(_update, groups, own), uses_params=uses_params
    )


def _init(groups: Names, rules: dict[str, Threshold], norms: Array) -> dict[str, PyTree]:
    del norms
    shapes = dict(zip(groups, groups.shapes, strict=True))
    return {name: rule.init(jnp.zeros(shapes[name])) for name, rule in rules.items()}


def _update(
    groups: Names,
    rules: dict[str, Threshold],
    norms: Array,
    state: dict[str, PyTree],
    param_norms: Array | None,
) -> tuple[Limits, dict[str, PyTree]]:
    own = _by_group(norms, groups)
    of_params = {} if param_norms is None else _by_group(param_norms, groups)
    triggers, targets, new = {}, {}, {}
    for name, rule in rules.items():
        param_norms = of_params[name] if rule.uses_params else None
        limits, new[name] = limits_by(
            rule, own[name], state[name], param_norms, f"the limit of {name!r}"
        )
        triggers[name], targets[name] = limits
    if not norms.size:
        return Limits(norms, norms), new
    limits = (concatenated([each[name] for name in groups]) for each in (triggers, targets))
    return Limits(*(each.astype(norms.dtype).reshape(norms.shape) for each in limits)), new


def _by_group(norms: Array, groups: Names) -> dict[str, Array]:
    """The norms of each group, by its name; NaN if there are none, as in a tree without leaves."""
    if not norms.size:
        pieces = [jnp.full(shape, jnp.nan, norms.dtype) for shape in groups.shapes]
    else:
        pieces = split_up(norms, groups.shapes) if norms.ndim else [norms]
    return dict(zip(groups, pieces, strict=True))
