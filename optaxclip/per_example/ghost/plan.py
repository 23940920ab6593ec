"""Divides the uses of a parameter into parts, and chooses how the norm of each is computed."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.rounding_bounds as rounding_bounds
import optaxclip.per_example.ghost.sites as sites
from optaxclip._base.numerics import norm_dtype, reciprocal_pow2, static_size_or_none
from optaxclip._base.trees import Grouping
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.scale import Multiplier
from optaxclip.per_example._batched_clip import compute_weighted_sums, sum_dtype
from optaxclip.per_example.ghost.interpreter import ParamSlice, ParamTracker, Program, evaluate
from optaxclip.per_example.ghost.norms import Estimate, NormTerm, bound_norms
from optaxclip.per_example.ghost.sites import BackpropResult, Layout, ParamUse, Sizes
from optaxclip.per_example.ghost.sums import compute_weighted_sum, gradients_of_examples


def choose_methods(program: Program, leaf: int) -> list[NormTerm] | None:
    """The parts of a parameter; None if its uses cannot be told apart."""
    by_layout: dict[Layout, list[tuple[ParamUse, bool]]] = {}
    for use in sites.uses_of(program, leaf):
        found, is_flipped = sites.layout(use)
        by_layout.setdefault(found, []).append((use, is_flipped))
    classes = list(by_layout.values())
    tied = _tied_term(by_layout)
    if tied is not None:
        return [tied]
    pairs = [(a, b) for i, a in enumerate(classes) for b in classes[:i]]
    if not all(sites.are_disjoint(a[0][0], b[0][0]) for a, b in pairs):
        return None
    return [_part(uses) for uses in classes]


def _tied_term(by_layout: dict[Layout, list[tuple[ParamUse, bool]]]) -> NormTerm | None:
    """The part of a table that is also a factor of products."""
    kinds = {found.kind: (found, uses) for found, uses in by_layout.items()}
    if len(by_layout) != 2 or kinds.keys() != {primitives.GATHER, primitives.DOT_GENERAL}:
        return None
    (of_rows, tables), (of_products, products) = (
        kinds[kind] for kind in (primitives.GATHER, primitives.DOT_GENERAL)
    )
    matrix = (0, (), (0,), (1,))
    if of_rows.moves or of_products.moves or of_products.axes != matrix:
        return None
    if any(use.reference.interval or any(use.loops) for use, _ in (*tables, *products)):
        return None
    part = _part(products)
    positions = part.sizes.positions + sum(sites.sizes_of(use).positions for use, _ in tables)
    sizes = part.sizes._replace(positions=positions)
    way = "tied" if _gram_is_cheaper(sizes) else "chunks"
    return NormTerm(way, (*products, *tables), sizes, _pieces(sizes))


def _part(uses: list[tuple[ParamUse, bool]]) -> NormTerm:
    found = [sites.sizes_of(use) for use, _ in uses]
    sizes = found[0]._replace(positions=sum(each.positions for each in found))
    if uses[0][1]:
        sizes = sizes._replace(inputs=sizes.outputs, outputs=sizes.inputs)
    kind = uses[0][0].site.kind
    if kind == primitives.GATHER:
        return NormTerm("rows", tuple(uses), sizes)
    if sizes.positions == 1:
        return NormTerm("vectors", tuple(uses), sizes)
    # A convolution's patches are stored for its norm, and its sum would read the data again.
    times = 2 if kind == primitives.CONVOLUTION else 1
    if not _gram_is_cheaper(sizes, times):
        return NormTerm("direct", tuple(uses), sizes)
    return NormTerm("gram", tuple(uses), sizes, _pieces(sizes))


def _gram_is_cheaper(sizes: Sizes, times: int = 1) -> bool:
    """Whether Gram matrices cost less than gradients of examples; data counts so many `times`."""
    inputs, outputs = sizes.inputs, sizes.outputs
    return sizes.positions * (times * inputs + outputs) < inputs * outputs


def _pieces(sizes: Sizes) -> tuple[int, int]:
    """How many pieces to sum the inner products of data, and of cotangents, in."""
    return rounding_bounds.pieces_of_inner(sizes.inputs), rounding_bounds.pieces_of_inner(
        sizes.outputs
    )


@dataclasses.dataclass(frozen=True, eq=False)
class GhostNormPlan:
    """How the norms of all parameters are found, from the program of one example.

    For each parameter there are the parts of its uses, empty if it is dense or unused; for each
    dense parameter the reason; and its type. `output` is the structure of what the loss returns.
    """

    program: Program
    output: Any
    parts: list[list[NormTerm]]
    materialized: dict[int, str]
    types: list[Any]

    @functools.cached_property
    def whole(self) -> frozenset[int]:
        """The parameters whose gradients are computed for each example by products.

        These gradients cost less than Gram matrices, and give both the norm and the sum.
        """
        rows = enumerate(self.parts)
        return frozenset(i for i, parts in rows if {part.way for part in parts} == {"direct"})

    @classmethod
    def create(cls, closed: Any, output: Any, count: int) -> "GhostNormPlan":
        """The plan for a loss, a program of so many parameters and of one example."""
        jaxpr = closed.jaxpr
        mesh = primitives.mesh_of(jaxpr.outvars[0].aval)
        dense: dict[int, str] = {}
        for i, variable in enumerate(jaxpr.invars[:count]):
            if not primitives.is_real(variable):
                dense[i] = f"has dtype {variable.aval.dtype}"
        while True:
            walk, before = ParamTracker(dense, mesh), len(dense)
            references: list[Any] = [(ParamSlice(i),) for i in range(count)]
            references += [()] * (len(jaxpr.invars) - count)
            program, outputs = walk.program(jaxpr, closed.consts, references)
            # Only the first output, which is the loss, has a derivative.
            walk.mark_materialized(outputs[0], "is the loss")
            dense = walk.dense
            if len(dense) == before:
                found = [choose_methods(program, i) for i in range(count)]
                parts = [each for each in found if each is not None]
                if len(parts) == count:
                    types = [v.aval for v in jaxpr.invars[:count]]
                    return cls(program, jax.tree.structure(output), parts, dense, types)
                mixed = (i for i, each in enumerate(found) if each is None)
                dense |= dict.fromkeys(mixed, "has uses of several kinds")

    def taps(self) -> list[Array]:
        """For each site, an array like its output, with an axis for each loop around it."""
        return [meshes.zeros_like_aval(site.output, site.lengths) for site in self.program.sites]

    def microbatch_size(self, examples: int) -> int:
        """How many examples to take at once if the user does not say it.

        Norms need gradients of examples, and data and cotangents of sites in checkpoints, which
        plain backpropagation would not keep. All examples are taken unless this exceeds both
        256 MiB and twice the memory of the parameters.
        """
        kept = sum(_bytes(self.types[i]) for i in {*self.materialized, *self.whole})
        for site in self.program.sites:
            if site.is_checkpointed:
                kept += math.prod(site.lengths) * (_bytes(site.data) + _bytes(site.output))
        room = max(2**28, 2 * sum(map(_bytes, self.types)))
        # A symbolic number of examples, in `jax.export`, cannot be compared with a number.
        is_known = static_size_or_none(examples) is not None
        return max(1, min(examples, room // max(kept, 1))) if is_known else examples

    def underflow(self, dtype: Any) -> float:
        """What an example may add beyond its threshold where numbers fall below the normal numbers."""
        sizes = [part.sizes for parts in self.parts for part in parts]
        each = [(n + 2) * math.sqrt(groups * k * m) for groups, n, k, m in sizes]
        return 8 * float(jnp.finfo(dtype).tiny) * sum(each)


Key = tuple[int, int]
"""The position of a parameter, and of one of its parts."""


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def differentiate(plan: GhostNormPlan, params: list[Any], batch: Any) -> BackpropResult:
    """One pass forward and one pass backward over a batch, without gradients of layers.

    The parameters are typed as varying where the batch varies.
    """

    def loss(taps: list[Array], dense: dict[int, Array], example: Any) -> Any:
        values = [dense.get(i, x) for i, x in enumerate(params)]
        outputs, data = evaluate(plan.program, [*values, *jax.tree.leaves(example)], taps)
        return outputs[0], (data, outputs)

    # In full on each device of an explicit mesh: gradients would be split by examples and like the
    # parameter, and a type cannot name the same devices twice.
    dense = {i: meshes.replicate(params[i]) for i in plan.materialized}
    taps = meshes.pvary_like(batch, plan.taps())

    def differentiate_example(example: Any) -> Any:
        # Taps and parameters are not arguments: `vmap` refuses an argument without an axis of
        # examples if the mesh axis that splits the examples splits it too.
        fn = jax.value_and_grad(loss, (0, 1), has_aux=True)
        (_, (data, outputs)), found = fn(taps, dense, example)
        return data, *found, outputs

    axes = [len(site.lengths) for site in plan.program.sites]
    data, cotangents, gradients, outputs = jax.vmap(differentiate_example, 0, (axes, axes, 0, 0))(
        batch
    )
    # Norms and sums must read the same numbers. Without the barrier, XLA (JAX 0.10.2) drops the
    # rounding to bfloat16 in one of two fusions, and an example was up to 0.2 % above its threshold.
    data, cotangents, gradients = lax.optimization_barrier((data, cotangents, gradients))
    return BackpropResult(data, cotangents, gradients, jax.tree.unflatten(plan.output, outputs))


def add_materialized_gradients(plan: GhostNormPlan, backward: BackpropResult) -> BackpropResult:
    """The results, with the gradients that cost less than Gram matrices.

    Gradients of bfloat16 parameters are in bfloat16, as backpropagation gives them: half the bytes.
    """
    whole = {}
    for i in plan.whole:
        leaf = plan.types[i]
        found = gradients_of_examples(leaf, plan.parts[i], backward)
        whole[i] = found.astype(leaf.dtype) if leaf.dtype == jnp.bfloat16 else found
    # A barrier as above, because norms and sums must read the same numbers.
    return backward._replace(gradients=backward.gradients | lax.optimization_barrier(whole))


@dataclasses.dataclass(frozen=True, eq=False)
class Norms:
    """Upper bounds of the norms of a batch, with room for the rounding of the sum (see `bounds`).

    Attributes:
      plan: the plan.
      backward: the batch, with all gradients that the plan computes.
      grouping: the groups.
      estimates: by the positions of parameters, and of their parts.
      lost: for parts with Gram matrices, which examples lost digits to them that their norms need.
      have_lost: which examples lost digits to any of them.
      upper: for each group, `[examples]`, from the estimates; the factor is computed from `bound`.
    """

    plan: GhostNormPlan
    backward: BackpropResult
    grouping: Grouping
    estimates: dict[Key, Estimate]
    lost: dict[Key, Array]
    have_lost: Array
    upper: list[ScaledNorms]

    @classmethod
    def create(
        cls, plan: GhostNormPlan, backward: BackpropResult, grouping: Grouping, is_padding: Array
    ) -> "Norms":
        """The norms, computed in the cheap way, and from the gradients that there are."""
        backward = add_materialized_gradients(plan, backward)
        examples, dtype = is_padding.size, _dtype(plan)
        found = {
            (i, k): part.estimate(backward, dtype)
            for i, parts in enumerate(plan.parts)
            for k, part in enumerate(parts)
            if i not in plan.whole
        }
        for i, gradient in backward.gradients.items():
            norm = bound_norms(gradient, tuple(range(1, gradient.ndim)), dtype)
            off = _combine_norms(
                [part.rounding_error(backward, dtype) for part in plan.parts[i]], examples, dtype
            )
            if i in plan.whole and gradient.dtype == jnp.bfloat16:
                off += rounding_bounds.ROUNDED * norm
            found[i, 0] = Estimate(norm, jnp.zeros_like(norm), off, norm + off)
        lost, upper = {}, []
        for group in grouping.groups:
            own = {key: found[key] for key in found if key[0] in group.leaf_indices}
            upper.append(_upper(plan, own, examples, dtype))
            norms = _bound_from_below([*own.values()], examples, dtype)
            for (i, k), estimate in own.items():
                if i not in backward.gradients and plan.parts[i][k].way in ("gram", "tied"):
                    # This is also true if squares overflow, although the norms do not.
                    lost[i, k] = (
                        ~(estimate.cancellation_error <= rounding_bounds.CANCELLATION_LIMIT * norms)
                        & ~is_padding
                    )
        have_lost = functools.reduce(jnp.logical_or, lost.values(), jnp.zeros_like(is_padding))
        return cls(plan, backward, grouping, found, lost, have_lost, upper)

    def select_exact(self, again: Array, first: Array) -> Array:
        """`again` for the examples that lost digits, `first` for others, bit for bit."""
        return jnp.where(self.have_lost, again, first)

    def recompute_exact(self) -> list[ScaledNorms]:
        """The upper bounds, from the gradients themselves for the examples that lost digits.

        What an example adds must not depend on what lies beside it, so this is chosen for each
        example alone, and the bounds of all others stay as they are, bit for bit.
        """
        careful, dtype = dict(self.estimates), _dtype(self.plan)
        for (i, k), flag in self.lost.items():
            part, cheap = self.plan.parts[i][k], self.estimates[i, k]
            of_data, of_cotangents = part.max_moduli(self.backward)
            # Zero or non-finite gradients would tell nothing new, but be computed for all examples.
            is_finite = jnp.isfinite(of_data) & jnp.isfinite(of_cotangents)
            is_worth = flag & is_finite & (of_cotangents > 0)
            made = lax.cond(
                jnp.any(is_worth),
                lambda _, part=part: part.estimate(self.backward, dtype, exact=True),
                lambda cheap: cheap,
                cheap,
            )
            known = [jnp.where(of_cotangents == 0, 0, x) for x in cheap]
            rows = zip(made, known, strict=True)
            careful[i, k] = Estimate(*(jnp.where(is_worth, *row) for row in rows))
        found = []
        for group, upper in zip(self.grouping.groups, self.upper, strict=True):
            own = {key: careful[key] for key in careful if key[0] in group.leaf_indices}
            again = _upper(self.plan, own, self.have_lost.size, dtype)
            found.append(ScaledNorms(*map(self.select_exact, again, upper)))
        return found

    def is_well_scaled(self, multipliers: list[Multiplier]) -> Array:
        """For each example, whether its numbers and products with its factor are in range."""
        info, flags = jnp.finfo(_dtype(self.plan)), []
        norms = [each.norm for each in self.upper]
        for group, norm, by in zip(self.grouping.groups, norms, multipliers, strict=True):
            stays = (by.ratio == 0) | ((by.power == 1) & (by.ratio == 1))
            for (i, k), estimate in self.estimates.items():
                if i in group.leaf_indices and i not in self.backward.gradients:
                    _, _, inputs, outputs = self.plan.parts[i][k].sizes
                    spread = math.sqrt(outputs) * estimate.of_data
                    spread += math.sqrt(inputs) * estimate.of_cotangents
                    # What products lose below the normal numbers is an eighth of a rounding.
                    is_in_range = by.factor * spread <= float(info.max) / 256
                    is_in_range &= 16 * float(info.tiny / info.eps) * spread <= by.factor * norm
                    flags.append(jnp.isfinite(estimate.total) & (stays | is_in_range))
        return functools.reduce(jnp.logical_and, flags)

    def sum_weighted(self, multipliers: list[Multiplier], *, are_ordinary: bool) -> list[Array]:
        """The sums of the gradients of all parameters, times the multipliers of their groups."""
        by_leaf, gradients = self.grouping.broadcast_to_leaves(multipliers), self.backward.gradients
        dtypes = [sum_dtype(leaf.dtype) for leaf in self.plan.types]
        axes = tuple(tuple(range(gradient.ndim - 1)) for gradient in gradients.values())
        leaves = [gradient.astype(dtypes[i]) for i, gradient in gradients.items()]
        sums = compute_weighted_sums(leaves, [by_leaf[i] for i in gradients], axes)
        found = dict(zip(gradients, sums, strict=True))
        for i, (leaf, parts) in enumerate(zip(self.plan.types, self.plan.parts, strict=True)):
            if i not in found:
                found[i] = compute_weighted_sum(
                    leaf, parts, self.backward, by_leaf[i], are_ordinary=are_ordinary
                )
        return [found[i] for i in range(len(dtypes))]


def _bound(plan: GhostNormPlan, key: Key, estimate: Estimate) -> Array:
    """An upper bound of the norm, with room for the rounding of the sum."""
    i, k = key
    if i in plan.materialized or i in plan.whole:
        return estimate.bound
    part, unit = plan.parts[i][k], rounding_bounds.unit_roundoff(sum_dtype(plan.types[i].dtype))
    additions = max(sites.block_split(use).additions for use, _ in part.uses)
    slack = 0.0
    types = (x for use, _ in part.uses for x in (use.site.data, use.site.output))
    if any(x.dtype == jnp.bfloat16 for x in types):
        additions, slack = 2 * additions, rounding_bounds.OTHER_ERRORS
    slack += rounding_bounds.relative_error(
        additions + len(part.uses) + rounding_bounds.PRODUCT + 4, unit
    )
    return estimate.bound + slack * estimate.total


def _upper(plan: GhostNormPlan, own: dict[Key, Estimate], examples: int, dtype: Any) -> ScaledNorms:
    """An upper bound of the norm of a group, and the one that its factor is computed from.

    An example whose positions cancel still adds terms of size `A` to the sum, whose rounding would
    change with what lies beside them: so the factor allows for a share of `A` too.
    """
    norm = _combine_norms([_bound(plan, *x) for x in own.items()], examples, dtype)
    sums = [
        (i, x) for (i, _), x in own.items() if i not in plan.materialized and i not in plan.whole
    ]
    total = _combine_norms([x.total for _, x in sums], examples, dtype)
    found = ScaledNorms.from_value(norm, 1.0)
    least = rounding_bounds.CANCELLED * total * reciprocal_pow2(found.scale)
    return found._replace(divisor=jnp.maximum(found.divisor, least))


def _bound_from_below(estimates: list[Estimate], examples: int, dtype: Any) -> Array:
    """Lower bounds of the norms of a group."""
    each = [
        jnp.sqrt(jnp.maximum(x.norm - x.cancellation_error, 0) * (x.norm + x.cancellation_error))
        for x in estimates
    ]
    return _combine_norms([jnp.where(jnp.isfinite(x), x, 0) for x in each], examples, dtype)


def _combine_norms(norms: list[Array], examples: int, dtype: Any) -> Array:
    """An upper bound of the norm of several parts together, from the norms `[examples]` of each."""
    if not norms:
        return jnp.zeros(examples, dtype)
    return norms[0] if len(norms) == 1 else bound_norms(meshes.stack(norms, 1), (1,), dtype)


def _dtype(plan: GhostNormPlan) -> jnp.dtype:
    return norm_dtype(x.dtype for x in plan.types)
