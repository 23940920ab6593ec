"""Computes statistics of gradients and params, with one number per group.

Statistics are computed from a few norms. A norm that several statistics need is measured once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.norms as norms
from optaxclip._backend.elementwise import as_arrays
from optaxclip._backend.global_view import global_view
from optaxclip._base.numerics import divide_no_nan, promote_dtypes
from optaxclip._base.trees import FlatTree, is_sparse
from optaxclip._base.types import PyTree
from optaxclip._engine.measure import measure, with_entries
from optaxclip._engine.options import Options
from optaxclip._engine.plan import Plan, get_param_leaves
from optaxclip._engine.products import InnerProducts, products
from optaxclip.norms import Norm


class StatisticInputs:
    """The norms and products used by statistics, which are measured at their first use."""

    def __init__(
        self,
        leaves: list[Any],
        weights: list[Any] | None,
        plan: Plan,
        of_weights: Plan,
        norm: Norm,
        *,
        with_cosines: bool,
    ) -> None:
        """Stores the leaves without measuring them.

        `of_weights` is the plan with the placement of the params. The pass for cosines also
        returns the L2 norms of the params.
        """
        self.norm = norm
        self._leaves, self._weights = leaves, weights or []
        self._plan, self._of_weights = plan, of_weights
        self._with_cosines = with_cosines
        self._is_sparse = any(map(is_sparse, leaves))
        self._found: dict[tuple[str, Norm], Array] = {}

    def grad_norms(self, norm: Norm) -> Array:
        """Returns the norms of the gradients' groups, f32[groups]."""
        if ("leaves", norm) not in self._found:
            self._found["leaves", norm] = measure(self._leaves, self._plan, norm).norm
        return self._found["leaves", norm]

    def param_norms(self, norm: Norm) -> Array:
        """Returns the norms of the params' groups, f32[groups]."""
        if ("weights", norm) not in self._found:
            self._found["weights", norm] = self._initial_param_norms(norm)
        return self._found["weights", norm]

    def _initial_param_norms(self, norm: Norm) -> Array:
        if not self._with_cosines or norm is not norms.l2 or self._is_sparse:
            return measure(self._weights, self._of_weights, norm).norm
        return jnp.where(self._plan.has_leaves(), self._products.other_norm, jnp.nan)

    def zero_fractions(self) -> Array:
        """Returns the fractions of zeros in groups, or 0 for a group without elements."""
        not_zero = self.grad_norms(NOT_ZERO)
        return jnp.asarray(with_entries(self._leaves, self._plan), not_zero.dtype) - not_zero

    def cosines(self) -> Array:
        """Returns the cosines between the groups of gradients and params."""
        return self._products.cosine

    def shares(self) -> Array:
        """Returns the fractions of groups in the squared norm of the whole tree."""
        norm, present = self.grad_norms(norms.l2), self._plan.has_leaves()
        known = jnp.where(present, norm, 0)
        # [groups]. Norms are divided by the largest one so squares cannot overflow.
        squares = jnp.square(divide_no_nan(known, jnp.max(known, initial=0), 0.0))
        return jnp.where(present, divide_no_nan(squares, jnp.sum(squares), 0.0), norm)

    @functools.cached_property
    def _products(self) -> InnerProducts:
        """Computes the inner products of gradients and params."""
        placement = self._plan.placement
        in_one_piece = placement.is_unsharded and self._of_weights.placement.is_unsharded
        placement = dataclasses.replace(placement, is_unsharded=in_one_piece)
        plan = dataclasses.replace(self._plan, placement=placement)

        found = [self.grad_norms(norms.l2)]
        if self._is_sparse:
            found.append(self.param_norms(norms.l2))
        return products(self._leaves, self._weights, plan, *found)


@dataclasses.dataclass(frozen=True)
class GroupStatistic:
    """A statistic with one number per group of a tree."""

    compute: Callable[[StatisticInputs], Array]
    needs_params: bool = False


def _is_not_zero(x: Array) -> Array:
    return (x != 0).astype(jnp.finfo(x.dtype).dtype)


NOT_ZERO = Norm("not_zero", _is_not_zero, norms.mean_abs.finalize, degree=0)
"""A norm that counts elements as 0 or 1 and returns the fraction of nonzero elements."""


def _ratio(source: StatisticInputs) -> Array:
    found = [source.grad_norms(source.norm), source.param_norms(source.norm)]
    norm, of_weights = promote_dtypes(found)
    return divide_no_nan(norm, of_weights, jnp.where(norm > 0, jnp.inf, norm))


STATISTICS: dict[str, GroupStatistic] = {
    "norm": GroupStatistic(lambda source: source.grad_norms(source.norm)),
    "max": GroupStatistic(lambda source: source.grad_norms(norms.linf)),
    "mean_abs": GroupStatistic(lambda source: source.grad_norms(norms.mean_abs)),
    "zero_fraction": GroupStatistic(StatisticInputs.zero_fractions),
    "share": GroupStatistic(StatisticInputs.shares),
    "param_norm": GroupStatistic(lambda source: source.param_norms(source.norm), needs_params=True),
    "ratio": GroupStatistic(_ratio, needs_params=True),
    "cosine_param": GroupStatistic(StatisticInputs.cosines, needs_params=True),
}


def compute_statistics(
    flat: FlatTree, params: PyTree | None, plan: Plan, names: tuple[str, ...], options: Options
) -> dict[str, Array]:
    """Computes the named statistics, with one number per group or one for the tree."""
    weights, of_weights = None, plan
    needing = [name for name in names if STATISTICS[name].needs_params]
    if needing:
        if params is None:
            raise ValueError(
                f"{options.name}: the statistics {needing} need the parameters; pass them: "
                "update(updates, state, params)"
            )
        weights, of_weights = get_param_leaves(flat, params, plan, options)
    return _statistics(
        flat.inexact_leaves(),
        weights,
        plan=plan,
        of_weights=of_weights,
        names=names,
        norm=options.norm,
    )


@global_view()
def _statistics(
    leaves: list[Any],
    weights: list[Any] | None,
    *,
    plan: Plan,
    of_weights: Plan,
    names: tuple[str, ...],
    norm: Norm,
) -> dict[str, Array]:
    weights = None if weights is None else as_arrays(weights)
    chosen = {"norm": norm, "with_cosines": "cosine_param" in names}
    sources = StatisticInputs(as_arrays(leaves), weights, plan, of_weights, **chosen)
    return {name: _reduce_to_names(STATISTICS[name].compute(sources), plan) for name in names}


def _reduce_to_names(packed: Array, plan: Plan) -> Array:
    """Reduces to one number per name, the largest for a leaf with many groups."""
    if plan.grouping.layout != "dict":
        return packed
    # f32[groups] -> f32[names]
    largest = [_global_max(x) for x in plan.unpack(packed)]
    return meshes.stack(largest) if largest else jnp.zeros(0)


def _global_max(x: Array) -> Array:
    """Returns the maximum over all devices, 0 if there are no elements, or NaN if one is NaN."""
    # A maximum over devices drops NaN on a CPU (as of JAX 0.10.2).
    is_unknown = jnp.isnan(x)
    least = jnp.asarray(-jnp.inf, x.dtype)
    largest = jnp.max(jnp.where(is_unknown, least, x), initial=least)
    largest = jnp.where(largest == least, 0, largest)
    return jnp.where(jnp.any(is_unknown), jnp.nan, largest)
