"""The norm of a parameter's gradient for each example, without the gradient.

in   data and cotangents of the sites of one parameter
out  an `Estimate` for each example
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.rounding_bounds as rounding_bounds
import optaxclip.per_example.ghost.sites as sites
from optaxclip._backend.elementwise import dispatch_chunk_size
from optaxclip._backend.leaf_shardings import LeafShardings
from optaxclip._base.numerics import safe_sqrt, static_size_or_none
from optaxclip._base.trees import Group, Grouping
from optaxclip._engine.measure import measure
from optaxclip._engine.plan import Plan
from optaxclip._loss_arguments import (
    MicrobatchSplit,
    concatenate_examples,
    remainder,
    restore_batch_order,
)
from optaxclip.norms import l2
from optaxclip.per_example.ghost.sites import BackpropResult, ParamUse, Sizes

CHUNK, CHUNK_OF_ACCELERATORS = 2**23, 2**28
"""About how many bytes are materialized at once; on a CPU, as many as its caches hold."""

MAX_ONE_HOT_POSITIONS = 128
"""Rows are added up by a product with zeros and ones for so many positions; for more, in order."""

NormMethod = Literal["vectors", "gram", "direct", "chunks", "rows", "tied"]


class Estimate(NamedTuple):
    """Norms `[examples]`, and how far off they may be.

    Attributes:
      norm: the computed norm.
      lost: the root of what rounding may have taken from the square of `norm`.
      off: a bound on the other errors of `norm`.
      total: an upper bound on the sum over positions of `|x| |d|`, which the norm does not exceed.
      of_data: an upper bound on the sum over positions of `|x|`, for products and convolutions.
      of_cotangents: likewise, of `|d|`.
    """

    norm: Array
    cancellation_error: Array
    off: Array
    total: Array
    of_data: Array | float = 0.0
    of_cotangents: Array | float = 0.0

    @property
    def bound(self) -> Array:
        """An upper bound of the true norm."""
        return jnp.minimum(jnp.hypot(self.norm, self.cancellation_error) + self.off, self.total)


@dataclasses.dataclass(frozen=True, eq=False)
class NormTerm:
    """Uses of the same entries of a parameter, and how their norm is computed.

    Attributes:
      way: "vectors": there is one position; "gram": from Gram matrices; "direct": from the
        gradients, which cost less than Gram matrices; "chunks": from gradients, a chunk of examples
        at a time; "rows": from rows of a table; "tied": as "rows", for a table that is also a
        factor of products.
      uses: the uses, each with a flag: whether data and cotangents change places.
      sizes: the sizes in the common form, with the positions of all uses.
      pieces: how many pieces the inner products of data, and of cotangents, are summed in.
    """

    way: NormMethod
    uses: tuple[tuple[ParamUse, bool], ...]
    sizes: Sizes
    pieces: tuple[int, int] = (1, 1)

    def estimate(self, backward: BackpropResult, dtype: Any, *, exact: bool = False) -> Estimate:
        """The norms; if `exact_sums` from the gradients themselves, which loses no digits."""
        fn = self._direct if exact else self._compute_factored
        pairs = [use.operands(backward) for use, _ in self.uses]
        axes = [len(use.loops) for use, _ in self.uses]
        operands = [
            [jnp.moveaxis(v, axis, 0) for v in pair] for pair, axis in zip(pairs, axes, strict=True)
        ]

        def estimate_chunk(operands: Any) -> Estimate:
            forms = []
            for (use, is_flipped), pair, axis in zip(self.uses, operands, axes, strict=True):
                x, d = (jnp.moveaxis(v, 0, axis) for v in pair)
                if use.site.kind == primitives.GATHER:
                    forms.append((use, *sites.to_gather_form(use, x, d)))
                else:
                    both = sites.to_matmul_form(use, x, d)
                    forms.append((use, *(both[::-1] if is_flipped else both)))
            return fn(forms, dtype)

        return map_chunks(estimate_chunk, operands, self.bytes_of(exact, jnp.dtype(dtype).itemsize))

    def max_moduli(self, backward: BackpropResult) -> Array:
        """The largest moduli of data, and of cotangents, `[2, examples]`; NaN if there is one."""
        found = []
        for use, _ in self.uses:
            for v in use.operands(backward):
                others = [axis for axis in range(v.ndim) if axis != len(use.loops)]
                found.append(jnp.max(jnp.abs(v), others, initial=0).astype(jnp.float32))
        return jnp.stack([functools.reduce(jnp.maximum, found[k::2]) for k in (0, 1)])

    def rounding_error(self, backward: BackpropResult, dtype: Any) -> Array:
        """How far off the gradients may be after their sum over all positions."""
        each, unit = jnp.zeros((), dtype), 0.0
        for use, _ in self.uses:
            x, d = use.operands(backward)
            unit = max(unit, rounding_bounds.unit_roundoff(dtype, _are_half(x, d)))
            if use.site.kind == primitives.CONVOLUTION:
                groups = primitives.feature_groups(use.site.eqn)

                def count_pixels(x: Array, groups: int = groups) -> Array:
                    return bound_norms(x.reshape(*x.shape[:-1], groups, -1), (x.ndim,), dtype)

                x, d = sites.pairs_of_convolution(use, x, d, count_pixels)
            else:
                x, d = sites.to_matmul_form(use, x, d)
            of_x, of_d = (bound_norms(v, (3,), dtype) for v in (x, d))
            each += jnp.sum(of_x * of_d, -1)
        additions = max(sites.block_split(use).additions for use, _ in self.uses) + len(self.uses)
        off, total = self._off(each, additions, unit)
        return jnp.minimum(off, total)

    def _off(self, each: Array, additions: int, unit: float) -> tuple[Array, Array]:
        """The largest error of a sum over all positions, and `A` of the bounds.

        `each` is the sum over positions of `|x| |d|` for each matrix, `[B, groups]`.
        """
        groups, positions, inputs, outputs = self.sizes
        slack = 1 + rounding_bounds.relative_error(positions + 2, unit)
        total = bound_norms(each, (1,), each.dtype) * slack
        tiny = float(jnp.finfo(each.dtype).tiny) * math.sqrt(groups * inputs * outputs)
        off = rounding_bounds.relative_error(additions + rounding_bounds.PRODUCT, unit) * total
        return off + (positions + 1) * tiny, total

    def bytes_of(self, is_direct: bool, itemsize: int) -> int:
        """About how many bytes an example takes for its norm."""
        groups, positions, inputs, outputs = self.sizes
        is_convolution = any(use.site.kind == primitives.CONVOLUTION for use, _ in self.uses)
        each = positions * inputs if is_convolution else 0
        if is_direct or self.way in ("direct", "chunks"):
            each += inputs * outputs
        elif self.way == "rows":
            each += positions * (outputs + min(positions, MAX_ONE_HOT_POSITIONS))
        elif self.way in ("gram", "tied"):
            each += sum(self.pieces) * positions**2
        return groups * each * itemsize

    def _compute_factored(self, forms: list[Any], dtype: Any) -> Estimate:
        ways = {"vectors": self._vectors, "rows": self._rows}
        ways |= {"gram": self._compute_from_gram, "tied": self._compute_from_gram}
        return ways.get(self.way, self._direct)(forms, dtype)

    def _vectors(self, forms: list[Any], dtype: Any) -> Estimate:
        of_x, of_d = (bound_norms(v, (2, 3), dtype) for v in _join_forms(forms))
        total = bound_norms(of_x * of_d, (1,), dtype)
        nothing = jnp.zeros_like(total)
        return Estimate(total, nothing, nothing, total, jnp.sum(of_x, 1), jnp.sum(of_d, 1))

    def _compute_from_gram(self, forms: list[Any], dtype: Any) -> Estimate:
        """The norms from Gram matrices."""
        tables, pairs = _apart(forms)
        x, d = _join_forms(pairs)
        groups, positions, *sizes = self.sizes
        chex.assert_shape([x, d], (None, groups, None, None))
        unit = rounding_bounds.unit_roundoff(dtype, _are_half(x, d))
        g = functools.partial(rounding_bounds.relative_error, unit=unit)
        of_inner = [
            g(rounding_bounds.additions(size, n))
            for size, n in zip(sizes, self.pieces, strict=True)
        ]
        is_sliced = any(any(use.loops) for use, _ in self.uses)
        grams = [_gram(v, n, dtype, is_sliced) for v, n in zip((x, d), self.pieces, strict=True)]
        of_x, of_d = (
            jnp.sqrt(jnp.diagonal(gram, 0, -2, -1) + size * jnp.finfo(dtype).tiny) * (1 + own)
            for gram, size, own in zip(grams, sizes, of_inner, strict=True)
        )
        of_both = jnp.sum(of_x * of_d, -1)
        largest = [of[..., :, None] * of[..., None, :] for of in (of_x, of_d)]
        product = grams[0] * grams[1]
        sums = [product, *(jnp.abs(a) * b for a, b in zip(grams, largest[::-1], strict=True))]
        square, with_x, with_d, moduli = _sum_rows_first([*sums, jnp.abs(product)])
        additions = (groups + 1) * positions
        error = of_inner[1] * with_x + of_inner[0] * with_d + g(additions + 1) * moduli
        if tables:
            own, square_of_table, error_of_table = _add_table_terms(
                x, d, of_d, _join_forms(tables), unit
            )
            square, error, of_both = square + square_of_table, error + error_of_table, of_both + own
        total = bound_norms(of_both, (1,), dtype) * (1 + g(additions))
        tiny, sums = math.sqrt(jnp.finfo(dtype).tiny), [jnp.sum(of, (1, 2)) for of in (of_x, of_d)]
        underflow = math.sqrt(sizes[0]) * sums[1] + additions
        underflow = tiny * (underflow + math.sqrt(sizes[1]) * sums[0])
        error = (1 + g(additions + 8)) * error
        lost = safe_sqrt(error) + math.sqrt(of_inner[0] * of_inner[1]) * total + underflow
        norm = safe_sqrt(jnp.maximum(square, 0))
        return Estimate(norm, jnp.minimum(lost, total), jnp.zeros_like(norm), total, *sums)

    def _direct(self, forms: list[Any], dtype: Any) -> Estimate:
        tables, pairs = _apart(forms)
        x, d = _join_forms(pairs)
        pieces = rounding_bounds.pieces(x.shape[2], x.shape[2])

        def product(x: Array, d: Array) -> Array:
            return einsum("bgtk,bgtn->bgkn", x, d, dtype)

        gradient = sum_blocks(product, (x, 2), (d, 2), pieces)
        of_x, of_d = bound_norms(x, (3,), dtype), bound_norms(d, (3,), dtype)
        each = jnp.sum(of_x * of_d, -1)
        unit = rounding_bounds.unit_roundoff(dtype, _are_half(x, d))
        for _, ids, own in tables:
            at = jnp.arange(ids.shape[0])[:, None, None], jnp.arange(ids.shape[1])[:, None], ids
            gradient = gradient.at[at].add(own.astype(dtype), mode="drop")
            each += jnp.sum(bound_norms(own, (3,), dtype), -1)
        norm = bound_norms(gradient, (1, 2, 3), dtype)
        additions = self.sizes.positions - x.shape[2] + x.shape[2] // pieces + pieces
        sums = [jnp.sum(of, (1, 2)) for of in (of_x, of_d)]
        return Estimate(norm, jnp.zeros_like(norm), *self._off(each, additions, unit), *sums)

    def _rows(self, forms: list[Any], dtype: Any) -> Estimate:
        ids, d = _join_forms(forms)
        summed, by_row = _sum_by_row(ids, d, dtype)
        norm = bound_norms(summed, (1, 2, 3), dtype)
        unit = rounding_bounds.unit_roundoff(dtype, d.dtype.itemsize == 2)
        each = by_row.reshape(by_row.shape[0], -1)
        nothing = jnp.zeros_like(norm)
        estimate = self._off(each, self.sizes.positions, unit)
        return Estimate(norm, nothing, *estimate, nothing, nothing)


def _add_table_terms(
    activation: Array, cotangent: Array, of_d: Array, table: tuple[Array, Array], unit: float
) -> tuple[Array, Array, Array]:
    """What the rows of a table add, if the table is also a factor of products with data `x`.

    These are terms of the sums of norms, `[B, 1]`, of the squared norms, `[B]`, and of the squares'
    errors.
    """
    (ids, own), dtype = table, of_d.dtype
    of_own = bound_norms(own, (3,), dtype)
    summed, by_row = _sum_by_row(ids, own, dtype)
    # The products' gradient at the rows of the table: `[B, 1, S, T]`.
    at = jnp.take_along_axis(
        activation, jnp.minimum(ids, activation.shape[-1] - 1)[:, :, None, :], -1
    )
    at = at.astype(dtype)
    cross = at * einsum("bgsn,bgtn->bgst", cotangent, own, dtype)
    moduli = jnp.abs(at) * of_d[..., None] * of_own[:, :, None, :]
    cross, moduli = _sum_rows_first([cross, moduli])
    square = jnp.sum(jnp.square(summed), (1, 2, 3)) + 2 * cross
    positions = cotangent.shape[2] + own.shape[2]
    g = rounding_bounds.relative_error(
        positions + cotangent.shape[3] + rounding_bounds.PRODUCT + 1, unit
    )
    error = 2 * g * (jnp.sum(jnp.square(by_row), (1, 2)) + moduli)
    return jnp.sum(of_own, -1), square, error


def _sum_rows_first(arrays: list[Array]) -> list[Array]:
    """The sums of `[B, G, S, T]` over all but `B`, in two steps that take few additions."""
    # The barrier keeps XLA from making one sum, whose additions could take any order.
    rows = lax.optimization_barrier([jnp.sum(x, -1) for x in arrays])
    return [jnp.sum(x, (1, 2)) for x in rows]


def _gram(x: Array, pieces: int, dtype: Any, is_sliced: bool = False) -> Array:
    """The inner products `[B, G, T, T]` of all positions."""
    if is_sliced:
        # The data of loops lie so in memory: XLA (JAX 0.10.2) would transpose them.
        return jnp.swapaxes(_gram(jnp.swapaxes(x, 0, 1), pieces, dtype), 0, 1)
    if pieces == 1:
        return einsum("bgtk,bgsk->bgts", x, x, dtype)
    # Pieces are treated as examples, because XLA would transpose both factors for another axis.
    x = jnp.moveaxis(x.reshape(*x.shape[:-1], pieces, -1), -2, 0)
    flat = x.reshape(-1, *x.shape[2:])
    found = einsum("bgtk,bgsk->bgts", flat, flat, dtype)
    # The barrier keeps XLA from making one sum of all pieces.
    return jnp.sum(lax.optimization_barrier(found).reshape(*x.shape[:-1], x.shape[-2]), 0)


def einsum(terms: str, x: Array, y: Array, dtype: Any) -> Array:
    """Sums of products, without rounding of the factors."""
    x, y, options = exact_operands(x, y, dtype)
    return jnp.einsum(terms, x, y, **options)


def exact_operands(x: Array, y: Array, dtype: Any) -> tuple[Array, Array, dict[str, Any]]:
    """Two factors, and options with which sums of their products do not round the factors.

    By default GPUs round factors in float32 to 11 bits (TF32), and TPUs round all factors to 8 bits
    (bfloat16). Products of two numbers in bfloat16 are exact in float32 without such options.
    """
    options: dict[str, Any] = {"preferred_element_type": dtype}
    if not _are_half(x, y):
        x, y = x.astype(dtype), y.astype(dtype)
    if x.dtype != jnp.bfloat16:
        options["precision"] = lax.Precision.HIGHEST
    return x, y, options


def sum_blocks(
    fn: Callable[[Array, Array], Array], x: tuple[Array, int], y: tuple[Array, int], number: int
) -> Array:
    """The sum of `fn` over pieces of two arrays, each cut along its axis, one after another."""
    if number == 1:
        return fn(x[0], y[0])

    def cut(x: Array, axis: int) -> Array:
        shape = (*x.shape[:axis], number, x.shape[axis] // number, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    both = (cut(*x), cut(*y))
    zeros = jnp.zeros_like(jax.eval_shape(fn, *jax.tree.map(lambda x: x[0], both)))
    (zeros,) = meshes.pvary_like(both, [zeros])
    total, _ = lax.scan(lambda total, pair: (total + fn(*pair), None), zeros, both)
    return total


def _are_half(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and x.dtype.itemsize == 2


def _apart(forms: list[Any]) -> tuple[list[Any], list[Any]]:
    """The uses that are rows of tables, and the uses that are products."""
    tables = [form for form in forms if form[0].site.kind == primitives.GATHER]
    return tables, [form for form in forms if form[0].site.kind != primitives.GATHER]


def _join_forms(forms: list[Any]) -> tuple[Array, Array]:
    """Data and cotangents of uses of one layout, joined along their positions."""
    if len(forms) == 1:
        return forms[0][1:]
    return _concatenate_positions([x for _, x, _ in forms]), _concatenate_positions(
        [d for _, _, d in forms]
    )


def _concatenate_positions(arrays: list[Array]) -> Array:
    """The arrays, joined along the positions, in the widest dtype."""
    widest = functools.reduce(jnp.promote_types, (x.dtype for x in arrays))
    return jnp.concatenate([x.astype(widest) for x in arrays], 2)


def _sum_by_row(ids: Array, d: Array, dtype: Any) -> tuple[Array, Array]:
    """Sums of the cotangents of each row, and of their norms, at one of the row's positions."""
    norms = bound_norms(d, (3,), dtype)
    if ids.shape[-1] <= MAX_ONE_HOT_POSITIONS:
        is_same = ids[..., :, None] == ids[..., None, :]
        first = jnp.argmax(is_same, -1)
        is_first = first == lax.broadcasted_iota(first.dtype, ids.shape, 2)
        of_first = is_same & is_first[..., None]
        summed = einsum("bgts,bgsn->bgtn", of_first.astype(d.dtype), d, dtype)
        return summed, jnp.sum(jnp.where(of_first, norms[..., None, :], 0), -1)

    def sum_example(ids: Array, d: Array, norms: Array) -> tuple[Array, Array]:
        order = jnp.argsort(ids)
        is_new = jnp.diff(ids[order], prepend=-1) != 0
        place = jnp.zeros_like(ids).at[order].set(jnp.cumsum(is_new, dtype=ids.dtype) - 1)
        zeros = jnp.zeros(d.shape, dtype)
        return zeros.at[place].add(d.astype(dtype)), jnp.zeros_like(norms).at[place].add(norms)

    return jax.vmap(jax.vmap(sum_example))(ids, d, norms)


def bound_norms(x: Array, axes: tuple[int, ...], dtype: Any) -> Array:
    """Upper bounds of the norms over some axes, right for the whole range of the dtype."""
    if dtype == jnp.float64:
        x = x.astype(dtype)
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    grouping = Grouping((Group(("norms",), (0,), kept),), (axes,), "scalar")
    return measure(
        [x], Plan(grouping, LeafShardings.unsharded([x])), l2, from_above=True
    ).upper_bound


def map_chunks(fn: Callable[[Any], Any], operands: Any, size: int) -> Any:
    """`fn(operands)` of arrays `[examples, ...]`, for some of the examples at once.

    An example takes about `size` bytes.
    """
    examples = jax.tree.leaves(operands)[0].shape[0]
    if static_size_or_none(examples) is None or examples * size <= CHUNK:
        return fn(operands)
    small, large = (
        functools.partial(_map_in_chunks, fn, -(-examples * size // chunk))
        for chunk in (CHUNK, CHUNK_OF_ACCELERATORS)
    )
    return dispatch_chunk_size(operands, small=small, large=large)


def _map_in_chunks(fn: Callable[[Any], Any], number: int, operands: Any) -> Any:
    """`fn(operands)`, computed in about this number of chunks of equal size."""
    examples = jax.tree.leaves(operands)[0].shape[0]
    size = -(-examples // number)
    if size >= examples:
        return fn(operands)
    count, rest = divmod(examples, size)
    cut = MicrobatchSplit.split(operands, size, count)
    _, stacked = lax.scan(lambda _, i: (None, fn(cut.microbatch(i))), None, jnp.arange(count))
    found = jax.tree.map(restore_batch_order, stacked)
    if rest:
        last = jax.tree.map(lambda x: remainder(x, rest), operands)
        found = jax.tree.map(concatenate_examples, found, fn(last))
    return found
