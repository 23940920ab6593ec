"""Plans the norms of a loss by choosing a method for every use of a parameter."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.per_example._ghost_primitives as primitives
import optaxclip.per_example._ghost_sites as sites
from optaxclip._base.numerics import norm_dtype, static_size_or_none
from optaxclip.per_example._ghost_interpreter import ParamSlice, ParamTracker, Program, evaluate
from optaxclip.per_example._ghost_norms import NormTerm
from optaxclip.per_example._ghost_sites import BackpropResult, Layout, ParamUse, Sizes
from optaxclip.per_example._ghost_sums import gradients_of_examples


@dataclasses.dataclass(frozen=True, eq=False)
class GhostNormPlan:
    """The methods for the norms of all parameters, from the program of one example."""

    program: Program
    output: Any  # The structure of the output of the loss.
    parts: list[list[NormTerm]]  # Empty for parameters that are unused or materialized.
    # Parameters that are differentiated for all examples, and the reasons.
    materialized: dict[int, str]
    types: list[Any]

    @functools.cached_property
    def direct(self) -> frozenset[int]:
        """The parameters whose gradients, which cost less than Gram matrices, are computed."""
        rows = enumerate(self.parts)
        return frozenset(i for i, terms in rows if {term.method for term in terms} == {"direct"})

    @property
    def norm_dtype(self) -> jnp.dtype:
        """The dtype of the norms, float32 or float64."""
        return norm_dtype(x.dtype for x in self.types)

    @classmethod
    def create(cls, closed: Any, output: Any, count: int) -> "GhostNormPlan":
        """Returns the plan for a program of `count` parameters and one example."""
        jaxpr = closed.jaxpr
        mesh = primitives.mesh_of(jaxpr.outvars[0].aval)
        materialized: dict[int, str] = {}
        for i, variable in enumerate(jaxpr.invars[:count]):
            if not primitives.is_real(variable):
                materialized[i] = f"has dtype {variable.aval.dtype}"
        # Repeats tracing without the materialized parameters until no more of them are found.
        while True:
            tracker = ParamTracker(dict(materialized), mesh)
            references: list[Any] = [(ParamSlice(i),) for i in range(count)]
            references += [()] * (len(jaxpr.invars) - count)
            program, outputs = tracker.program(jaxpr, closed.consts, references)
            # Only the first output, the loss, is differentiated.
            tracker.mark_materialized(outputs[0], "is the loss")
            is_complete = len(tracker.materialized) == len(materialized)
            materialized = tracker.materialized
            if is_complete:
                terms = [choose_methods(program, i) for i in range(count)]
                parts = [part for part in terms if part is not None]
                if len(parts) == count:
                    types = [v.aval for v in jaxpr.invars[:count]]
                    return cls(program, jax.tree.structure(output), parts, materialized, types)
                mixed = (i for i, part in enumerate(terms) if part is None)
                materialized |= dict.fromkeys(mixed, "has uses of several kinds")

    def microbatch_size(self, examples: int) -> int:
        """Returns the default number of examples in a microbatch."""
        # Norms keep per-example gradients, and the data and cotangents of sites in checkpoints. All
        # examples are used unless this memory exceeds both 256 MiB and twice the memory of the
        # parameters.
        kept = sum(_num_bytes(self.types[i]) for i in {*self.materialized, *self.direct})
        for site in self.program.sites:
            if site.is_checkpointed:
                kept += math.prod(site.lengths) * (_num_bytes(site.data) + _num_bytes(site.output))
        available = max(2**28, 2 * sum(map(_num_bytes, self.types)))
        # A symbolic number of examples, in `jax.export`, cannot be compared with a number.
        is_known = static_size_or_none(examples) is not None
        return max(1, min(examples, available // max(kept, 1))) if is_known else examples

    def underflow(self, dtype: Any) -> float:
        """Bounds the amount by which underflow can raise a contribution above its threshold."""
        sizes = [term.sizes for terms in self.parts for term in terms]
        errors = [(n + 2) * math.sqrt(groups * k * m) for groups, n, k, m in sizes]
        return 8 * float(jnp.finfo(dtype).tiny) * sum(errors)


def _num_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def choose_methods(program: Program, leaf: int) -> list[NormTerm] | None:
    """Returns the terms of a parameter, or None if its uses cannot be separated."""
    by_layout: dict[Layout, list[tuple[ParamUse, bool]]] = {}
    for number, site in enumerate(program.sites):
        for reference in site.references:
            if reference.leaf == leaf:
                use = ParamUse(number, site, reference)
                layout, is_flipped = sites.layout(use)
                by_layout.setdefault(layout, []).append((use, is_flipped))
    tied = _make_tied_term(by_layout)
    if tied is not None:
        return [tied]
    classes = list(by_layout.values())
    pairs = [(a, b) for i, a in enumerate(classes) for b in classes[:i]]
    if not all(sites.are_disjoint(a[0][0], b[0][0]) for a, b in pairs):
        return None
    return [_make_term(uses) for uses in classes]


def _make_tied_term(by_layout: dict[Layout, list[tuple[ParamUse, bool]]]) -> NormTerm | None:
    """Returns the term of an embedding table that is also a factor of products."""
    kinds = {layout.kind: (layout, uses) for layout, uses in by_layout.items()}
    if len(by_layout) != 2 or kinds.keys() != {primitives.GATHER, primitives.DOT_GENERAL}:
        return None
    gather_layout, gathers = kinds[primitives.GATHER]
    product_layout, products = kinds[primitives.DOT_GENERAL]
    matrix_axes = (0, (), (0,), (1,))
    if gather_layout.moves or product_layout.moves or product_layout.axes != matrix_axes:
        return None
    if any(use.reference.interval or any(use.loops) for use, _ in (*gathers, *products)):
        return None
    sizes = _make_term(products).sizes
    positions = sizes.positions + sum(sites.sizes_of(use).positions for use, _ in gathers)
    sizes = sizes._replace(positions=positions)
    method = "tied" if _is_gram_cheaper(sizes) else "chunks"
    return NormTerm(method, (*products, *gathers), sizes)


def _make_term(uses: list[tuple[ParamUse, bool]]) -> NormTerm:
    all_sizes = [sites.sizes_of(use) for use, _ in uses]
    sizes = all_sizes[0]._replace(positions=sum(own.positions for own in all_sizes))
    first, is_flipped = uses[0]
    if is_flipped:
        sizes = sizes._replace(inputs=sizes.outputs, outputs=sizes.inputs)
    # The patches of a convolution are materialized for its norm, and its sum reads the data again.
    num_reads = 2 if first.site.kind == primitives.CONVOLUTION else 1
    method = "gram" if _is_gram_cheaper(sizes, num_reads) else "direct"
    if first.site.kind == primitives.GATHER:
        method = "rows"
    elif sizes.positions == 1:
        method = "vectors"
    return NormTerm(method, tuple(uses), sizes)


def _is_gram_cheaper(sizes: Sizes, num_reads: int = 1) -> bool:
    inputs, outputs = sizes.inputs, sizes.outputs
    return sizes.positions * (num_reads * inputs + outputs) < inputs * outputs


def differentiate(plan: GhostNormPlan, params: list[Any], batch: Any) -> BackpropResult:
    """Runs a forward and a backward pass over a batch, without the gradients of layers."""
    # The types of the parameters must vary over the same axes as the batch.

    def loss(taps: list[Array], materialized: dict[int, Array], example: Any) -> Any:
        values = [materialized.get(i, x) for i, x in enumerate(params)]
        outputs, data = evaluate(plan.program, [*values, *jax.tree.leaves(example)], taps)
        return outputs[0], (data, outputs)

    # On an explicit mesh, these parameters are replicated. Otherwise, their gradients would be
    # sharded both by examples and like the parameter, and a type cannot name devices twice.
    materialized = {i: meshes.replicate(params[i]) for i in plan.materialized}
    # [*loops, *output] for every site
    taps = [meshes.zeros_like_aval(site.output, site.lengths) for site in plan.program.sites]
    taps = meshes.pvary_like(batch, taps)

    def differentiate_example(example: Any) -> Any:
        # Taps and parameters are not arguments because `vmap` does not support unbatched arguments
        # that are sharded along the mesh axis of the examples (as of JAX 0.10.2).
        fn = jax.value_and_grad(loss, (0, 1), has_aux=True)
        (_, (data, outputs)), (cotangents, gradients) = fn(taps, materialized, example)
        return data, cotangents, gradients, outputs

    # Data and cotangents are [*loops, examples, ...], and the gradients are [examples, ...].
    axes = [len(site.lengths) for site in plan.program.sites]
    differentiate_batch = jax.vmap(differentiate_example, 0, (axes, axes, 0, 0))
    *results, outputs = differentiate_batch(batch)
    # Norms and sums must use the same numbers. Without the barrier, XLA omits the rounding to
    # bfloat16 in one of two fusions, which puts examples up to 0.2% above their threshold (as of
    # JAX 0.10.2).
    data, cotangents, gradients = lax.optimization_barrier(results)
    return BackpropResult(data, cotangents, gradients, jax.tree.unflatten(plan.output, outputs))


def add_direct_gradients(plan: GhostNormPlan, backward: BackpropResult) -> BackpropResult:
    """Adds the gradients that are cheaper than Gram matrices."""
    direct = {}
    for i in plan.direct:
        leaf = plan.types[i]
        gradient = gradients_of_examples(leaf, plan.parts[i], backward)  # f32[examples, *leaf]
        # As in backpropagation, gradients of bfloat16 are in bfloat16, which halves the memory.
        direct[i] = gradient.astype(leaf.dtype) if leaf.dtype == jnp.bfloat16 else gradient
    # The barrier ensures that norms and sums use the same numbers, as in `differentiate`.
    return backward._replace(gradients=backward.gradients | lax.optimization_barrier(direct))
