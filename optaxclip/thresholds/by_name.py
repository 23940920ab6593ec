"""A rule for each group: what is given by name, as one rule over all groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial

from optaxclip._base.types import Limits, NormTree, PyTree, Threshold


def by_name(rules: Mapping[str, Threshold], names: Sequence[str]) -> Threshold:
    """Each group's own rule.

    Args:
      rules: by the names of the groups.
      names: of all groups, in the order in which norms lie in one array.

    Returns:
      A rule whose state is a dict from name to the state of the group's rule.
    """
    ordered = {name: rules[name].as_pytree() for name in names}
    uses_params = any(rule.uses_params for rule in ordered.values())
    return Threshold(Partial(_init, ordered), Partial(_update, ordered), uses_params=uses_params)


def _init(rules: dict[str, Threshold], norms: NormTree) -> dict[str, PyTree]:
    each = _parted(norms, rules)
    return {name: rule.init(each[name]) for name, rule in rules.items()}


def _update(
    rules: dict[str, Threshold],
    norms: NormTree,
    state: dict[str, PyTree],
    param_norms: NormTree | None,
) -> tuple[Limits, dict[str, PyTree]]:
    each = _parted(norms, rules)
    of_params = {} if param_norms is None else _parted(param_norms, rules)
    triggers, targets, new = {}, {}, {}
    for name, rule in rules.items():
        limits, new[name] = rule.update(
            each[name], state[name], of_params[name] if rule.uses_params else None
        )
        triggers[name], targets[name] = limits
    return Limits(_joined(triggers, norms), _joined(targets, norms)), new


def _parted(norms: NormTree, rules: Mapping[str, Any]) -> dict[str, Any]:
    """What limit rules see of all groups, by name."""
    if isinstance(norms, dict):
        return norms
    return dict(zip(rules, jnp.atleast_1d(norms), strict=True))


def _joined(arrays: dict[str, Any], norms: NormTree) -> NormTree:
    """From an array for each name to the structure of the norms."""
    if isinstance(norms, dict):
        return arrays
    columns = [x.astype(norms.dtype) for x in arrays.values()]
    return jnp.stack(columns).reshape(norms.shape)
