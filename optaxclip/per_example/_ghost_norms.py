"""Estimates gradient norms of a parameter from the data and cotangents of its sites."""

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
import optaxclip.per_example._ghost_primitives as primitives
import optaxclip.per_example._ghost_rounding_bounds as rounding_bounds
import optaxclip.per_example._ghost_sites as sites
from optaxclip._backend.elementwise import dispatch_chunk_size
from optaxclip._backend.leaf_shardings import LeafShardings
from optaxclip._base.numerics import safe_sqrt, static_size_or_none
from optaxclip._base.trees import Group, Grouping
from optaxclip._engine.measure import measure
from optaxclip._engine.plan import Plan
from optaxclip.norms import l2
from optaxclip.per_example._example_loss import scan_examples
from optaxclip.per_example._ghost_sites import BackpropResult, ParamUse, Sizes

# The approximate number of bytes in a chunk. On a CPU, it is chosen to fit into the caches.
CHUNK, CHUNK_OF_ACCELERATORS = 2**23, 2**28
# The maximum number of positions for which a one-hot matrix is used to sum rows.
MAX_ONE_HOT_POSITIONS = 128

NormMethod = Literal[
    "vectors",  # The product of the two norms, if there is a single position.
    "gram",  # Gram matrices of data and cotangents.
    "direct",  # Gradients, if they are cheaper than Gram matrices.
    "chunks",  # Gradients of a chunk of examples at a time.
    "rows",  # Sums of the rows of an embedding table.
    "tied",  # Gram matrices and rows, for an embedding table that is also used in products.
]


class Estimate(NamedTuple):
    """Norms `[examples]` with bounds on their errors."""

    norm: Array
    cancellation_error: Array  # The square root of the rounding error of the squared norm.
    error: Array  # A bound on the remaining errors of the norm.
    # Upper bounds on sums over positions, for products and convolutions.
    total: Array  # The sum of |x| |d|, which bounds the norm.
    data_sum: Array | float = 0.0  # The sum of |x|.
    cotangent_sum: Array | float = 0.0  # The sum of |d|.

    @property
    def least(self) -> Array:
        """A lower bound on the norm, `sqrt(norm**2 - cancellation_error**2)` or 0."""
        norm, error = self.norm, self.cancellation_error
        least = jnp.sqrt(jnp.maximum(norm - error, 0) * (norm + error))
        return jnp.where(jnp.isfinite(least), least, 0)

    @property
    def bound(self) -> Array:
        """An upper bound on the true norm."""
        return jnp.minimum(jnp.hypot(self.norm, self.cancellation_error) + self.error, self.total)


@dataclasses.dataclass(frozen=True, eq=False)
class NormTerm:
    """All uses of the same elements of a parameter, and the method that computes their norm."""

    method: NormMethod
    uses: tuple[tuple[ParamUse, bool], ...]  # True if data and cotangents are swapped.
    sizes: Sizes  # The sizes in the common form, with the positions of all uses.

    def estimate(self, backward: BackpropResult, dtype: Any, *, exact: bool = False) -> Estimate:
        """Estimates the norms. If `exact`, computes the gradients, which avoids cancellation."""
        methods = {"vectors": self._estimate_vectors, "rows": self._estimate_rows}
        methods |= {"gram": self._estimate_gram, "tied": self._estimate_gram}
        compute = self._estimate_gradients
        if not exact:
            compute = methods.get(self.method, compute)
        pairs = [use.operands(backward) for use, _ in self.uses]
        axes = [len(use.loops) for use, _ in self.uses]
        # [*loops, examples, ...] -> [examples, *loops, ...]
        rows = zip(pairs, axes, strict=True)
        operands = [[jnp.moveaxis(v, axis, 0) for v in pair] for pair, axis in rows]

        def estimate_chunk(operands: Any) -> Estimate:
            forms = []
            for (use, is_flipped), pair, axis in zip(self.uses, operands, axes, strict=True):
                x, d = (jnp.moveaxis(v, 0, axis) for v in pair)
                if use.site.kind == primitives.GATHER:
                    forms.append((use, *sites.to_gather_form(use, x, d)))
                else:
                    form = sites.to_matmul_form(use, x, d)  # [B, G, T, K], [B, G, T, N]
                    forms.append((use, *(form[::-1] if is_flipped else form)))
            return compute(forms, dtype)

        return map_chunks(estimate_chunk, operands, self.bytes_of(exact, jnp.dtype(dtype).itemsize))

    def max_moduli(self, backward: BackpropResult) -> Array:
        """Returns the largest absolute values of data and cotangents, `[2, examples]`, or NaN."""
        maxima = []
        for use, _ in self.uses:
            for v in use.operands(backward):
                axes = [axis for axis in range(v.ndim) if axis != len(use.loops)]
                # [*loops, examples, ...] -> f32[examples]
                maxima.append(jnp.max(jnp.abs(v), axes, initial=0).astype(jnp.float32))
        return jnp.stack([functools.reduce(jnp.maximum, maxima[k::2]) for k in (0, 1)])

    def rounding_error(self, backward: BackpropResult, dtype: Any) -> Array:
        """Bounds the rounding errors of gradients that are summed over positions, `[examples]`."""
        by_group, unit = jnp.zeros((), dtype), 0.0
        for use, _ in self.uses:
            x, d = use.operands(backward)
            unit = max(unit, rounding_bounds.unit_roundoff(dtype, _are_half(x, d)))
            if use.site.kind == primitives.CONVOLUTION:
                groups = primitives.feature_groups(use.site.eqn)

                def bound_pixels(x: Array, groups: int = groups) -> Array:
                    # [..., channels] -> [..., groups]
                    return bound_norms(x.reshape(*x.shape[:-1], groups, -1), (x.ndim,), dtype)

                # Copy the norms of pixels into patches instead of the pixels themselves.
                x, d = sites.pairs_of_convolution(use, x, d, bound_pixels)
            else:
                x, d = sites.to_matmul_form(use, x, d)
            data_norms, cotangent_norms = (bound_norms(v, (3,), dtype) for v in (x, d))  # [B, G, T]
            by_group += jnp.sum(data_norms * cotangent_norms, -1)  # [B, G]
        additions = max(sites.block_split(use).additions for use, _ in self.uses) + len(self.uses)
        error, total = self._bound_error(by_group, additions, unit)
        return jnp.minimum(error, total)

    def _bound_error(self, by_group: Array, additions: int, unit: float) -> tuple[Array, Array]:
        """Bounds the error and norm of a sum over positions, given sums of `|x| |d|`, `[B, G]`."""
        groups, positions, inputs, outputs = self.sizes
        slack = 1 + rounding_bounds.relative_error(positions + 2, unit)
        total = bound_norms(by_group, (1,), by_group.dtype) * slack  # [B, G] -> [B]
        tiny = float(jnp.finfo(by_group.dtype).tiny) * math.sqrt(groups * inputs * outputs)
        error = rounding_bounds.relative_error(additions + rounding_bounds.PRODUCT, unit) * total
        return error + (positions + 1) * tiny, total

    def bytes_of(self, is_exact: bool, itemsize: int) -> int:
        """Returns the approximate memory for the norm of an example, in bytes."""
        groups, positions, inputs, outputs = self.sizes
        is_convolution = any(use.site.kind == primitives.CONVOLUTION for use, _ in self.uses)
        count = positions * inputs if is_convolution else 0
        if is_exact or self.method in ("direct", "chunks"):
            count += inputs * outputs
        elif self.method == "rows":
            count += positions * (outputs + min(positions, MAX_ONE_HOT_POSITIONS))
        elif self.method in ("gram", "tied"):
            pieces = map(rounding_bounds.pieces_of_inner, (inputs, outputs))
            count += sum(pieces) * positions**2
        return groups * count * itemsize

    def _estimate_vectors(self, forms: list[Any], dtype: Any) -> Estimate:
        """Multiplies the norms of data and cotangents, for a single position."""
        data_norms, cotangent_norms = (bound_norms(v, (2, 3), dtype) for v in _join_forms(forms))
        total = bound_norms(data_norms * cotangent_norms, (1,), dtype)  # [B, G] -> [B]
        sums = [jnp.sum(v, 1) for v in (data_norms, cotangent_norms)]  # [B, G] -> [B]
        zeros = jnp.zeros_like(total)
        return Estimate(total, zeros, zeros, total, *sums)

    def _estimate_gram(self, forms: list[Any], dtype: Any) -> Estimate:
        """Sums the products of the Gram matrices of data and cotangents."""
        tables, products = _split_forms(forms)
        x, d = _join_forms(products)  # [B, G, T, K], [B, G, T, N]
        groups, positions, *sizes = self.sizes
        chex.assert_shape([x, d], (None, groups, None, None))
        pieces = [*map(rounding_bounds.pieces_of_inner, sizes)]
        unit = rounding_bounds.unit_roundoff(dtype, _are_half(x, d))
        g = functools.partial(rounding_bounds.relative_error, unit=unit)
        inner_errors = [g(n) for n in map(rounding_bounds.additions, sizes, pieces)]
        is_sliced = any(any(use.loops) for use, _ in self.uses)
        grams = [  # [B, G, T, T]
            _compute_gram(v, n, dtype, is_sliced) for v, n in zip((x, d), pieces, strict=True)
        ]
        data_norms, cotangent_norms = (  # [B, G, T]
            jnp.sqrt(jnp.diagonal(gram, 0, -2, -1) + size * jnp.finfo(dtype).tiny) * (1 + error)
            for gram, size, error in zip(grams, sizes, inner_errors, strict=True)
        )
        by_group = jnp.sum(data_norms * cotangent_norms, -1)  # [B, G]
        # Bounds on the absolute values of the Gram matrices, [B, G, T, T]
        largest = [v[..., :, None] * v[..., None, :] for v in (data_norms, cotangent_norms)]
        product = grams[0] * grams[1]
        terms = [product, *(jnp.abs(a) * b for a, b in zip(grams, largest[::-1], strict=True))]
        square, data_terms, cotangent_terms, moduli = _sum_rows_first([*terms, jnp.abs(product)])
        additions = (groups + 1) * positions
        square_error = inner_errors[1] * data_terms + inner_errors[0] * cotangent_terms
        square_error += g(additions + 1) * moduli
        if tables:
            row_sums, table_square, table_error = _compute_table_terms(
                x, d, cotangent_norms, _join_forms(tables), unit
            )
            square, square_error = square + table_square, square_error + table_error
            by_group = by_group + row_sums
        total = bound_norms(by_group, (1,), dtype) * (1 + g(additions))
        tiny = math.sqrt(jnp.finfo(dtype).tiny)
        sums = [jnp.sum(v, (1, 2)) for v in (data_norms, cotangent_norms)]  # [B, G, T] -> [B]
        underflow = math.sqrt(sizes[0]) * sums[1] + additions
        underflow = tiny * (underflow + math.sqrt(sizes[1]) * sums[0])
        square_error = (1 + g(additions + 8)) * square_error
        error = safe_sqrt(square_error) + math.sqrt(inner_errors[0] * inner_errors[1]) * total
        error = error + underflow
        norm = safe_sqrt(jnp.maximum(square, 0))  # [B]
        return Estimate(norm, jnp.minimum(error, total), jnp.zeros_like(norm), total, *sums)

    def _estimate_gradients(self, forms: list[Any], dtype: Any) -> Estimate:
        """Computes the norms of per-example gradients."""
        tables, products = _split_forms(forms)
        x, d = _join_forms(products)  # [B, G, T, K], [B, G, T, N]
        pieces = rounding_bounds.pieces(x.shape[2], x.shape[2])
        multiply = functools.partial(einsum, "bgtk,bgtn->bgkn", dtype=dtype)
        gradient = sum_blocks(multiply, (x, 2), (d, 2), pieces)  # [B, G, K, N]
        data_norms, cotangent_norms = (bound_norms(v, (3,), dtype) for v in (x, d))  # [B, G, T]
        by_group = jnp.sum(data_norms * cotangent_norms, -1)  # [B, G]
        unit = rounding_bounds.unit_roundoff(dtype, _are_half(x, d))
        for _, ids, rows in tables:
            batch = jnp.arange(ids.shape[0])[:, None, None]
            indices = batch, jnp.arange(ids.shape[1])[:, None], ids  # [B, G, T]
            gradient = gradient.at[indices].add(rows.astype(dtype), mode="drop")
            by_group += jnp.sum(bound_norms(rows, (3,), dtype), -1)
        norm = bound_norms(gradient, (1, 2, 3), dtype)  # [B]
        additions = self.sizes.positions - x.shape[2] + x.shape[2] // pieces + pieces
        sums = [jnp.sum(v, (1, 2)) for v in (data_norms, cotangent_norms)]
        bounds = self._bound_error(by_group, additions, unit)
        return Estimate(norm, jnp.zeros_like(norm), *bounds, *sums)

    def _estimate_rows(self, forms: list[Any], dtype: Any) -> Estimate:
        """Computes the norms of the summed rows of an embedding table."""
        ids, d = _join_forms(forms)  # i32[B, G, T], [B, G, T, N]
        summed, by_row = _sum_by_row(ids, d, dtype)
        norm = bound_norms(summed, (1, 2, 3), dtype)
        unit = rounding_bounds.unit_roundoff(dtype, d.dtype.itemsize == 2)
        by_group = by_row.reshape(by_row.shape[0], -1)  # [B, G * T]
        zeros = jnp.zeros_like(norm)
        bounds = self._bound_error(by_group, self.sizes.positions, unit)
        return Estimate(norm, zeros, *bounds, zeros, zeros)


def _compute_table_terms(
    x: Array, d: Array, cotangent_norms: Array, table: tuple[Array, Array], unit: float
) -> tuple[Array, Array, Array]:
    """Returns terms of a table for norms, `[B, 1]`, squared norms, `[B]`, and their errors."""
    # `x` and `d` are the data and cotangents of the products that use the same table.
    (ids, rows), dtype = table, cotangent_norms.dtype  # i32[B, 1, S], [B, 1, S, N]
    row_norms = bound_norms(rows, (3,), dtype)  # [B, 1, S]
    summed, by_row = _sum_by_row(ids, rows, dtype)  # [B, 1, S, N], [B, 1, S]
    # The elements of `x` at the rows of the table, [B, 1, T, S].
    row_data = jnp.take_along_axis(x, jnp.minimum(ids, x.shape[-1] - 1)[:, :, None, :], -1)
    row_data = row_data.astype(dtype)
    cross = row_data * einsum("bgsn,bgtn->bgst", d, rows, dtype)
    moduli = jnp.abs(row_data) * cotangent_norms[..., None] * row_norms[:, :, None, :]
    cross, moduli = _sum_rows_first([cross, moduli])  # [B]
    square = jnp.sum(jnp.square(summed), (1, 2, 3)) + 2 * cross
    positions = d.shape[2] + rows.shape[2]
    g = rounding_bounds.relative_error(positions + d.shape[3] + rounding_bounds.PRODUCT + 1, unit)
    error = 2 * g * (jnp.sum(jnp.square(by_row), (1, 2)) + moduli)
    return jnp.sum(row_norms, -1), square, error


def _sum_rows_first(arrays: list[Array]) -> list[Array]:
    """Sums `[B, G, S, T]` to `[B]` in two steps, so that each term is in few additions."""
    # Without the barrier, XLA fuses both steps into a single sum with any order of additions.
    rows = lax.optimization_barrier([jnp.sum(x, -1) for x in arrays])  # [B, G, S]
    return [jnp.sum(x, (1, 2)) for x in rows]


def _compute_gram(x: Array, pieces: int, dtype: Any, is_sliced: bool = False) -> Array:
    """Computes the inner products `[B, G, T, T]` of all pairs of positions of `[B, G, T, K]`."""
    if is_sliced:
        # The data of loops have the layout [G, B, ...] in memory. Otherwise, XLA would transpose
        # them (as of JAX 0.10.2).
        return jnp.swapaxes(_compute_gram(jnp.swapaxes(x, 0, 1), pieces, dtype), 0, 1)
    if pieces == 1:
        return einsum("bgtk,bgsk->bgts", x, x, dtype)
    # Fold the pieces into the example axis, because XLA would transpose both factors if the pieces
    # had a separate axis (as of JAX 0.10.2).
    # [B, G, T, K] -> [pieces, B, G, T, K / pieces]
    x = jnp.moveaxis(x.reshape(*x.shape[:-1], pieces, -1), -2, 0)
    flat = x.reshape(-1, *x.shape[2:])  # [pieces * B, G, T, K / pieces]
    grams = einsum("bgtk,bgsk->bgts", flat, flat, dtype)
    # Without the barrier, XLA computes a single sum over all pieces.
    return jnp.sum(lax.optimization_barrier(grams).reshape(*x.shape[:-1], x.shape[-2]), 0)


def einsum(terms: str, x: Array, y: Array, dtype: Any) -> Array:
    """Computes sums of products without rounding the factors."""
    x, y, options = exact_operands(x, y, dtype)
    return jnp.einsum(terms, x, y, **options)


def exact_operands(x: Array, y: Array, dtype: Any) -> tuple[Array, Array, dict[str, Any]]:
    """Returns factors and options for sums of products that do not round the factors."""
    options: dict[str, Any] = {"preferred_element_type": dtype}
    if not _are_half(x, y):
        x, y = x.astype(dtype), y.astype(dtype)
    if x.dtype != jnp.bfloat16:  # Products of two bfloat16 numbers are exact in float32.
        # By default, GPUs round float32 factors to TF32, and TPUs round all factors to bfloat16.
        options["precision"] = lax.Precision.HIGHEST
    return x, y, options


def sum_blocks(
    fn: Callable[[Array, Array], Array], x: tuple[Array, int], y: tuple[Array, int], number: int
) -> Array:
    """Sums `fn` over pieces of two arrays, which are split along their axes."""
    if number == 1:
        return fn(x[0], y[0])
    blocks = []
    for array, axis in (x, y):
        shape = (*array.shape[:axis], number, array.shape[axis] // number, *array.shape[axis + 1 :])
        # [..., number * size, ...] -> [number, ..., size, ...]
        blocks.append(jnp.moveaxis(array.reshape(shape), axis, 0))
    zeros = jnp.zeros_like(jax.eval_shape(fn, *(block[0] for block in blocks)))
    (zeros,) = meshes.pvary_like(blocks, [zeros])
    total, _ = lax.scan(lambda total, pair: (total + fn(*pair), None), zeros, blocks)
    return total


def _are_half(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and x.dtype.itemsize == 2


def _split_forms(forms: list[Any]) -> tuple[list[Any], list[Any]]:
    tables = [form for form in forms if form[0].site.kind == primitives.GATHER]
    return tables, [form for form in forms if form[0].site.kind != primitives.GATHER]


def _join_forms(forms: list[Any]) -> tuple[Array, Array]:
    """Concatenates data and cotangents of uses along the positions, in their widest dtypes."""
    if len(forms) == 1:
        return forms[0][1:]
    joined = []
    for arrays in ([x for _, x, _ in forms], [d for _, _, d in forms]):
        widest = functools.reduce(jnp.promote_types, (array.dtype for array in arrays))
        joined.append(jnp.concatenate([array.astype(widest) for array in arrays], 2))
    return joined[0], joined[1]


def _sum_by_row(ids: Array, d: Array, dtype: Any) -> tuple[Array, Array]:
    """Sums cotangents `[B, G, T, N]` with equal row indices `[B, G, T]`, and their norms."""
    # Each sum is stored at one position of `[B, G, T]`, and the remaining positions are 0.
    norms = bound_norms(d, (3,), dtype)  # [B, G, T]
    if ids.shape[-1] <= MAX_ONE_HOT_POSITIONS:
        is_same = ids[..., :, None] == ids[..., None, :]  # bool[B, G, T, T]
        first = jnp.argmax(is_same, -1)
        is_first = first == lax.broadcasted_iota(first.dtype, ids.shape, 2)
        one_hot = is_same & is_first[..., None]
        summed = einsum("bgts,bgsn->bgtn", one_hot.astype(d.dtype), d, dtype)
        return summed, jnp.sum(jnp.where(one_hot, norms[..., None, :], 0), -1)

    def sum_example(ids: Array, d: Array, norms: Array) -> tuple[Array, Array]:
        order = jnp.argsort(ids)  # i32[T]
        is_new = jnp.diff(ids[order], prepend=-1) != 0
        row = jnp.zeros_like(ids).at[order].set(jnp.cumsum(is_new, dtype=ids.dtype) - 1)
        zeros = jnp.zeros(d.shape, dtype)
        return zeros.at[row].add(d.astype(dtype)), jnp.zeros_like(norms).at[row].add(norms)

    return jax.vmap(jax.vmap(sum_example))(ids, d, norms)


def bound_norms(x: Array, axes: tuple[int, ...], dtype: Any) -> Array:
    """Returns upper bounds on the norms over `axes`, without overflow or underflow."""
    if dtype == jnp.float64:
        x = x.astype(dtype)
    # Each index into the remaining axes is a group.
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    grouping = Grouping((Group(("norms",), (0,), kept),), (axes,), "scalar")
    plan = Plan(grouping, LeafShardings.unsharded([x]))
    return measure([x], plan, l2, from_above=True).upper_bound


def map_chunks(fn: Callable[[Any], Any], operands: Any, size: int) -> Any:
    """Computes `fn(operands)` in chunks. Each example requires about `size` bytes."""
    examples = jax.tree.leaves(operands)[0].shape[0]
    if static_size_or_none(examples) is None or examples * size <= CHUNK:
        return fn(operands)
    numbers = [-(-examples * size // chunk) for chunk in (CHUNK, CHUNK_OF_ACCELERATORS)]
    small, large = (functools.partial(_map_in_chunks, fn, number) for number in numbers)
    return dispatch_chunk_size(operands, small=small, large=large)


def _map_in_chunks(fn: Callable[[Any], Any], number: int, operands: Any) -> Any:
    examples = jax.tree.leaves(operands)[0].shape[0]
    size = -(-examples // number)
    if size >= examples:
        return fn(operands)
    return scan_examples(lambda chunk: (None, fn(chunk)), operands, examples, size, None)[1]
