"""One step: leaves and limits come in, clipped leaves, the rule's state and the record go out.

`clipped` and `norms_of` check and compile, on any mesh; `_steps` runs the steps in order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
import optaxclip.nonfinite as policies
from optaxclip._base.numerics import narrowed
from optaxclip._base.trees import FlatTree, is_sparse
from optaxclip._base.types import ClipInfo, Limits, NonFinite, NormTree, PyTree, Threshold
from optaxclip._border.calls import across
from optaxclip._border.checks import check_rule_state, matching_params, params_for
from optaxclip._border.options import Options
from optaxclip._border.placement import located
from optaxclip._engine.groups import Groups
from optaxclip._engine.masked import mask
from optaxclip._engine.measure import Measured, measure, slack
from optaxclip._engine.record import updated_info
from optaxclip._engine.respond import Multiplier, multiplier
from optaxclip._engine.scale import scale
from optaxclip.norms import Norm
from optaxclip.responses import Response, as_response
from optaxclip.thresholds.calling import limits_by


class Technique(Protocol):
    """How leaves are measured and changed; hashable, because it is static."""

    def measured(self, leaves: list[Any], groups: Groups, method: "Method") -> Measured:
        """The norms of all groups."""
        ...

    def columns(self, by: Multiplier, limits: Array) -> Sequence[Array]:
        """The numbers per group that `scaled` needs, each array of the shape of the norms."""
        ...

    def scaled(self, leaf: Any, columns: Array, axes: tuple[int, ...], method: "Method") -> Any:
        """The changed leaf.

        `columns` stacks along its first axis what the method `columns` gave; its other axes are the
        leaf's without `axes`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ByNorm:
    """Measures norms, and multiplies all entries of a group by one number."""

    def measured(self, leaves: list[Any], groups: Groups, method: "Method") -> Measured:
        """The norms of the groups."""
        return measure(leaves, groups, method.norm, from_above=method.strict)

    def columns(self, by: Multiplier, limits: Array) -> Sequence[Array]:
        """The fields of the multiplier."""
        del limits
        return by

    def scaled(self, leaf: Any, columns: Array, axes: tuple[int, ...], method: "Method") -> Any:
        """The leaf times its multiplier."""
        zeroes = method.nonfinite == "zero"
        return scale(leaf, columns, axes=axes, strict=method.strict, zeroes=zeroes)


BY_NORM = ByNorm()


@dataclasses.dataclass(frozen=True)
class Method:
    """All settings of a clip except its limits; static under `jit`."""

    norm: Norm
    response: Response
    nonfinite: NonFinite
    strict: bool
    name: str
    technique: Technique = BY_NORM
    leaf_names: tuple[str, ...] = ()
    """The leaves' names, where they are needed for messages."""

    @classmethod
    def of(cls, options: Options, response: str | Response, technique: Technique) -> "Method":
        """From the checked options, a response and a technique."""
        chosen = (options.norm, as_response(response), options.nonfinite, options.strict)
        return cls(*chosen, options.name, technique)


class Start(NamedTuple):
    """What a step needs besides the leaves and their parameters.

    Attributes:
      norm_of_tree: the norm of the whole tree, if the caller has it; else it is measured.
    """

    rule: Threshold
    rule_state: PyTree
    info: ClipInfo | None
    norm_of_tree: Array | None


def clipped(
    flat: FlatTree,
    params: PyTree | None,
    start: Start,
    groups: Groups,
    method: Method,
    options: Options,
) -> tuple[PyTree, PyTree, Any]:
    """The clipped tree, the rule's next state, and the record if there is one."""
    params = params_for(start.rule, params, method.name)
    weights, of_weights = None, groups
    if params is not None:
        weights, of_weights = weights_beside(flat, params, groups, options)
    raises = method.nonfinite == "error"
    if raises or method.technique is not BY_NORM:
        method = dataclasses.replace(method, leaf_names=tuple(flat.names()))
    operands = (flat.measured_leaves(), weights, start)
    static = {"groups": groups, "of_weights": of_weights, "method": method}
    # In eager mode `checkify.check` raises at once, but inside of a compiled call it cannot.
    new, rule_state, info = across(_steps, *operands, like=_results, compiled=not raises, **static)
    return flat.rebuild(new), rule_state, info


def _results(leaves: list[Any], weights: Any, start: Start) -> PyTree:
    """What the results of `_steps` are typed like."""
    del weights
    return leaves, start.rule_state, start.info


def weights_beside(
    flat: FlatTree, params: PyTree, groups: Groups, options: Options
) -> tuple[list[Any], Groups]:
    """The parameters of the measured leaves, and the same groups, placed as the parameters are.

    Parameters may be split differently from the updates.
    """
    found = matching_params(flat, params, options.name)
    placement = located(groups.grouping, found, options)
    return found.measured_leaves(), dataclasses.replace(groups, placement=placement)


def norms_of(flat: FlatTree, groups: Groups, norm: Norm) -> NormTree:
    """The norms of all groups, as users see them."""
    return across(_norms, flat.measured_leaves(), groups=groups, norm=norm)


def _steps(
    leaves: list[Any],
    weights: list[Any] | None,
    start: Start,
    *,
    groups: Groups,
    of_weights: Groups,
    method: Method,
) -> tuple[list[Any], PyTree, ClipInfo | None]:
    """The steps in order: measure, limit, respond, scale, record."""
    leaves, weight_norms = as_arrays(leaves), None
    if weights is not None:
        weight_norms = measure(as_arrays(weights), of_weights, method.norm).norm
    bad = None
    if method.nonfinite == "mask":
        leaves, bad = mask(leaves, groups)
    measured = _measured_or_given(leaves, start.norm_of_tree, groups, method)
    norm = measured.norm
    bad = ~jnp.isfinite(norm) if bad is None else bad
    chex.assert_shape([norm, bad], groups.shape)
    if method.nonfinite == "error":
        _report(bad, groups, method)
    limits, rule_state = limits_of(start.rule, start.rule_state, norm, weight_norms, method.name)
    chex.assert_shape(list(limits), groups.shape)
    options = {"response": method.response, "nonfinite": method.nonfinite, "strict": method.strict}
    by = multiplier(measured, *limits, **options)
    chex.assert_shape(list(by), groups.shape)
    scaled = _scaled(leaves, by, limits.trigger, groups, method)
    chex.assert_trees_all_equal_shapes_and_dtypes(leaves, scaled)
    info = start.info
    if info is not None:
        info = updated_info(info, groups, norm, limits.trigger, by.factor, bad)
    return scaled, rule_state, info


def _measured_or_given(
    leaves: list[Any], norm_of_tree: Array | None, groups: Groups, method: Method
) -> Measured:
    """The norms of all groups, or the norm that the caller has, with upper bounds if needed."""
    if norm_of_tree is None:
        return method.technique.measured(leaves, groups, method)
    given = Measured.of(norm_of_tree, 1.0)
    return given.from_above(slack(leaves, groups, method.norm)) if method.strict else given


def limits_of(
    rule: Threshold, state: PyTree, norms: NormTree, param_norms: NormTree | None, name: str
) -> tuple[Limits, PyTree]:
    """A rule's limits for these norms, and its next state, in the dtypes of the state before.

    A trainer may have cast the state to a narrower dtype.
    """
    check_rule_state(rule, state, norms, name)
    limits, new = limits_by(rule, norms, state, param_norms, name)
    return limits, jax.tree.map(_as_before, new, state) if jax.tree.leaves(state) else new


def _as_before(new: Array, old: Any) -> Array:
    dtype = jnp.result_type(old)
    is_cast = new.dtype != dtype and jnp.issubdtype(dtype, jnp.floating)
    return narrowed(new, dtype) if is_cast else new


def _report(bad: Array, groups: Groups, method: Method) -> None:
    """Reports groups that are not finite to `checkify`."""
    for flags, group in zip(groups.unpack(bad), groups.grouping.groups, strict=True):
        if group.members:
            names = [method.leaf_names[i] for i in group.members]
            # JAX shows this line where `checkify` is missing; see there.
            policies.check(flags, method.name, names)  # nonfinite="error" needs checkify


def _scaled(
    leaves: list[Any],
    by: Multiplier,
    triggers: Array,
    groups: Groups,
    method: Method,
) -> list[Any]:
    technique, axes = method.technique, groups.grouping.axes
    # Stacked, so that each leaf cuts its part out of one array in one operation.
    columns = devices.stack(technique.columns(by, triggers.astype(by.ratio.dtype)))
    parts = map(groups.placement.on_all_devices, groups.by_leaf(columns, leaves))
    rows = zip(leaves, parts, axes, strict=True)
    return [technique.scaled(*row, method) for row in rows]


def _norms(leaves: list[Any], *, groups: Groups, norm: Norm) -> NormTree:
    return groups.as_tree(measure(as_arrays(leaves), groups, norm).norm)


def as_arrays(leaves: list[Any]) -> list[Any]:
    """Leaves, of which some may be numbers, as arrays."""
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]
