"""Statistics of gradients and parameters: each has one number for each group.

Each statistic is computed from a few norms. A norm that several statistics need is measured once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
import optaxclip.norms as norms
from optaxclip._base.numerics import promoted, safe_divide
from optaxclip._base.trees import FlatTree, is_sparse
from optaxclip._base.types import PyTree
from optaxclip._border.crossing import global_view
from optaxclip._border.entries import as_arrays
from optaxclip._engine.measure import measure, with_entries
from optaxclip._engine.options import Options
from optaxclip._engine.plan import Plan, weights_beside
from optaxclip._engine.products import Products, products
from optaxclip.norms import Norm


class Sources:
    """The norms and products that statistics are made of; each is measured at its first use."""

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
        """Keeps the leaves; nothing is measured yet.

        `of_weights` is the plan with the placement of the parameters. The pass for cosines also
        gives the parameters' L2 norms.
        """
        self.norm = norm
        self._leaves, self._weights = leaves, weights or []
        self._plan, self._of_weights = plan, of_weights
        self._with_cosines = with_cosines
        self._is_sparse = any(map(is_sparse, leaves))
        self._found: dict[tuple[str, Norm], Array] = {}

    def of_leaves(self, norm: Norm) -> Array:
        """The norms of the gradients' groups."""
        if ("leaves", norm) not in self._found:
            self._found["leaves", norm] = measure(self._leaves, self._plan, norm).norm
        return self._found["leaves", norm]

    def of_weights(self, norm: Norm) -> Array:
        """The norms of the parameters' groups."""
        if ("weights", norm) not in self._found:
            self._found["weights", norm] = self._of_weights_at_first(norm)
        return self._found["weights", norm]

    def _of_weights_at_first(self, norm: Norm) -> Array:
        if not self._with_cosines or norm is not norms.l2 or self._is_sparse:
            return measure(self._weights, self._of_weights, norm).norm
        return jnp.where(self._plan.have_leaves(), self._products.of_others, jnp.nan)

    def zero_fractions(self) -> Array:
        """For each group, the share of its entries that are 0; 0 for a group without entries."""
        not_zero = self.of_leaves(NOT_ZERO)
        return jnp.asarray(with_entries(self._leaves, self._plan), not_zero.dtype) - not_zero

    def cosines(self) -> Array:
        """The cosines of the gradients' groups with the parameters'."""
        return self._products.cosine

    def shares(self) -> Array:
        """For each group, its share of the squared norm of the whole tree."""
        norm, present = self.of_leaves(norms.l2), self._plan.have_leaves()
        known = jnp.where(present, norm, 0)
        # Norms are divided by the largest, so that no square leaves the range.
        squares = jnp.square(safe_divide(known, jnp.max(known, initial=0), 0.0))
        return jnp.where(present, safe_divide(squares, jnp.sum(squares), 0.0), norm)

    @functools.cached_property
    def _products(self) -> Products:
        """The inner products of gradients and parameters."""
        placement = self._plan.placement
        in_one_piece = placement.in_one_piece and self._of_weights.placement.in_one_piece
        placement = dataclasses.replace(placement, in_one_piece=in_one_piece)
        plan = dataclasses.replace(self._plan, placement=placement)

        found = [self.of_leaves(norms.l2)]
        if self._is_sparse:
            found.append(self.of_weights(norms.l2))
        return products(self._leaves, self._weights, plan, *found)


@dataclasses.dataclass(frozen=True)
class GroupStatistic:
    """A number for each group of a tree, made from the sources."""

    compute: Callable[[Sources], Array]
    needs_params: bool = False


def _is_not_zero(x: Array) -> Array:
    return (x != 0).astype(jnp.finfo(x.dtype).dtype)


NOT_ZERO = Norm("not_zero", _is_not_zero, norms.mean_abs.finish, degree=0)
"""The share of entries that are not 0: a norm for which each entry counts as 0 or 1."""


def _ratio(source: Sources) -> Array:
    found = [source.of_leaves(source.norm), source.of_weights(source.norm)]
    norm, of_weights = promoted(found)
    return safe_divide(norm, of_weights, jnp.where(norm > 0, jnp.inf, norm))


STATISTICS: dict[str, GroupStatistic] = {
    "norm": GroupStatistic(lambda source: source.of_leaves(source.norm)),
    "max": GroupStatistic(lambda source: source.of_leaves(norms.linf)),
    "mean_abs": GroupStatistic(lambda source: source.of_leaves(norms.mean_abs)),
    "zero_fraction": GroupStatistic(Sources.zero_fractions),
    "share": GroupStatistic(Sources.shares),
    "param_norm": GroupStatistic(lambda source: source.of_weights(source.norm), needs_params=True),
    "ratio": GroupStatistic(_ratio, needs_params=True),
    "cosine_param": GroupStatistic(Sources.cosines, needs_params=True),
}


def recorded_statistics(
    flat: FlatTree, params: PyTree | None, plan: Plan, names: tuple[str, ...], options: Options
) -> dict[str, Array]:
    """The statistics of these names: each has a number per group, or one for the tree."""
    weights, of_weights = None, plan
    needing = [name for name in names if STATISTICS[name].needs_params]
    if needing:
        if params is None:
            raise ValueError(
                f"{options.name}: the statistics {needing} need the parameters; pass them: "
                "update(updates, state, params)"
            )
        weights, of_weights = weights_beside(flat, params, plan, options)
    return _statistics(
        flat.measured_leaves(),
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
    sources = Sources(as_arrays(leaves), weights, plan, of_weights, **chosen)
    return {name: _by_name(STATISTICS[name].compute(sources), plan) for name in names}


def _by_name(packed: Array, plan: Plan) -> Array:
    """A number for each name: a leaf with many groups gets their largest."""
    if plan.grouping.layout != "dict":
        return packed
    largest = [_largest(x) for x in plan.unpack(packed)]
    return devices.stack(largest) if largest else jnp.zeros(0)


def _largest(x: Array) -> Array:
    """The largest number over all devices; 0 if there is none, NaN if one is NaN."""
    is_unknown = jnp.isnan(x)
    least = jnp.asarray(-jnp.inf, x.dtype)
    largest = jnp.max(jnp.where(is_unknown, least, x), initial=least)
    largest = jnp.where(largest == least, 0, largest)
    return jnp.where(jnp.any(is_unknown), jnp.nan, largest)
