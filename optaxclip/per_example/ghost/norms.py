"""Norms of a parameter's gradients, without the gradients.

in   data and cotangents of the sites of one parameter
out  an `Estimate` for each example
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.devices as devices
import optaxclip.per_example.ghost.bounds as bounds
import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.sites as sites
from optaxclip._base.grouping import Group, Grouping
from optaxclip._batches.cutting import Cut, appended, in_order_of_batch, last_examples
from optaxclip._border.placement import Placement
from optaxclip._engine.groups import Groups
from optaxclip._engine.measure import measure
from optaxclip.norms import l2
from optaxclip.per_example.ghost.sites import Sizes, Use

CHUNK = 8 * 2**20
"""About how many bytes are materialized at once for norms."""

Way = Literal["vectors", "gram", "direct", "rows", "tied"]


class Estimate(NamedTuple):
    """Norms of examples, each `[examples]`, and how far off they may be.

    Attributes:
      norm: the computed norm.
      lost: the root of what rounding may have taken from its square.
      off: a bound on what else it may be off by.
      total: an upper bound on the sum over positions of `|x| |d|`; the norm is at most this.
    """

    norm: Array
    lost: Array
    off: Array
    total: Array

    @property
    def bound(self) -> Array:
        """An upper bound of the true norm."""
        return jnp.minimum(jnp.hypot(self.norm, self.lost) + self.off, self.total)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Uses of the same entries of a parameter, and how their norm is computed.

    Attributes:
      way: "vectors" where there is one position, "gram" from Gram matrices, "direct" from the
        gradients, a chunk of examples at a time, "rows" for rows of a table, "tied" for those of a
        table that is also a factor of products.
      uses: the uses, with whether data and cotangents change places.
      sizes: the sizes, with the positions of all uses.
      pieces: in how many pieces the inner products of Gram matrices are summed.
    """

    way: Way
    uses: tuple[tuple[Use, bool], ...]
    sizes: Sizes
    pieces: int = 1

    def estimate(self, data: Sequence[Any], cotangents: Sequence[Any], dtype: Any) -> Estimate:
        """The norms, in the way that is cheap.

        Args:
          data: of all sites of the program.
          cotangents: likewise.
          dtype: float32 or float64.
        """
        return self._in_chunks(self._cheap, data, cotangents, dtype)

    def materialized(self, data: Sequence[Any], cotangents: Sequence[Any], dtype: Any) -> Estimate:
        """The norms of the gradients themselves, which lose no digits."""
        return self._in_chunks(self._direct, data, cotangents, dtype)

    def _in_chunks(
        self,
        fn: Callable[..., Estimate],
        data: Sequence[Any],
        cotangents: Sequence[Any],
        dtype: Any,
    ) -> Estimate:
        operands = []
        for use, _ in self.uses:
            axis = len(use.loops)
            operands.append((jnp.moveaxis(data[use.number], axis, 0),))
            operands[-1] += (jnp.moveaxis(cotangents[use.number], axis, 0),)

        def of_chunk(operands: Any) -> Estimate:
            forms = []
            for (use, is_flipped), pair in zip(self.uses, operands, strict=True):
                x, d = (jnp.moveaxis(v, 0, len(use.loops)) for v in pair)
                if use.site.kind == primitives.ROWS:
                    forms.append((use, *sites.rows(use, x, d)))
                else:
                    both = sites.pairs(use, x, d)
                    forms.append((use, *(both[::-1] if is_flipped else both)))
            return fn(forms, dtype)

        bytes_each = self.bytes_of(fn == self._direct, jnp.dtype(dtype).itemsize)
        return in_chunks(of_chunk, operands, max(1, CHUNK // max(bytes_each, 1)))

    def bytes_of(self, is_direct: bool, itemsize: int) -> int:
        """About how many bytes an example takes for its norm."""
        groups, positions, inputs, outputs = self.sizes
        is_convolution = any(use.site.kind == primitives.CONVOLUTION for use, _ in self.uses)
        each = positions * inputs if is_convolution else 0
        if is_direct or self.way == "direct":
            each += inputs * outputs if self.way != "rows" else positions * outputs
        elif self.way in ("gram", "tied"):
            each += 2 * self.pieces * positions**2
        return groups * each * itemsize

    def _cheap(self, forms: list[Any], dtype: Any) -> Estimate:
        ways = {
            "vectors": self._vectors,
            "gram": self._gram,
            "direct": self._direct,
            "rows": self._rows,
            "tied": self._tied,
        }
        return ways[self.way](forms, dtype)

    def _unit(self, forms: list[Any], dtype: Any) -> float:
        is_half = any(_are_half(x, d) for _, x, d in forms)
        return bounds.unit_roundoff(dtype, is_half)

    def _vectors(self, forms: list[Any], dtype: Any) -> Estimate:
        x, d = _joined(forms)
        each = norms_above(x, (2, 3), dtype) * norms_above(d, (2, 3), dtype)
        total = norms_above(each, (1,), dtype)
        nothing = jnp.zeros_like(total)
        return Estimate(total, nothing, nothing, total)

    def _gram(self, forms: list[Any], dtype: Any) -> Estimate:
        return self._of_squares(*_joined(forms), dtype)

    def _of_squares(self, x: Array, d: Array, dtype: Any, more: Any = None) -> Estimate:
        """The norms from Gram matrices.

        Args:
          x: `[B, G, T, K]`.
          d: `[B, G, T, N]`.
          dtype: of the sums.
          more: what a table adds: the squares, the sums over its positions of the norms of
            cotangents, and the number of its positions.
        """
        groups, positions, inputs, outputs = self.sizes
        chex.assert_shape([x, d], (None, groups, None, None))
        products = _gram(x, self.pieces, dtype) * _gram(d, self.pieces, dtype)
        # Two sums, which XLA would make one, whose additions could take any order.
        by_row = lax.optimization_barrier(jnp.sum(products, -1))
        square = jnp.sum(by_row, (1, 2))
        of_x, of_d = norms_above(x, (3,), dtype), norms_above(d, (3,), dtype)
        each = jnp.sum(of_x * of_d, -1)
        unit = bounds.unit_roundoff(dtype, _are_half(x, d))
        square, each, own = more(square, each) if more else (square, each, 0)
        total = norms_above(each, (1,), dtype) * (1 + bounds.relative_error(positions + 2, unit))
        gamma = bounds.gamma(positions + own, inputs, outputs, self.pieces, unit)
        tiny = float(jnp.finfo(dtype).tiny)
        underflow = math.sqrt(inputs * tiny) * jnp.sum(of_d, (1, 2))
        underflow += math.sqrt(outputs * tiny) * jnp.sum(of_x, (1, 2))
        lost = math.sqrt(gamma + groups * unit) * total + underflow
        norm = jnp.sqrt(jnp.maximum(square, 0))
        return Estimate(norm, jnp.minimum(lost, total), jnp.zeros_like(norm), total)

    def _direct(self, forms: list[Any], dtype: Any) -> Estimate:
        if self.way == "rows":
            return self._rows(forms, dtype)
        tables, pairs = _apart(forms)
        x, d = _joined(pairs)
        positions, inputs, outputs = self.sizes[1:]
        pieces = bounds.pieces(x.shape[2], x.shape[2])

        def product(x: Array, d: Array) -> Array:
            return contract("bgtk,bgtn->bgkn", x, d, dtype)

        gradient = in_pieces(product, (x, 2), (d, 2), pieces)
        of_x, of_d = norms_above(x, (3,), dtype), norms_above(d, (3,), dtype)
        each = jnp.sum(of_x * of_d, -1)
        unit = bounds.unit_roundoff(dtype, _are_half(x, d))
        for ids, own in tables:
            at = jnp.arange(ids.shape[0])[:, None, None], jnp.arange(ids.shape[1])[:, None], ids
            gradient = gradient.at[at].add(own.astype(dtype), mode="drop")
            each += jnp.sum(norms_above(own, (3,), dtype), -1)
        total = norms_above(each, (1,), dtype) * (1 + bounds.relative_error(positions + 2, unit))
        norm = norms_above(gradient, (1, 2, 3), dtype)
        added = positions - x.shape[2] + x.shape[2] // pieces + pieces
        off = bounds.relative_error(added + bounds.PRODUCT, unit) * total
        off += positions * float(jnp.finfo(dtype).tiny) * math.sqrt(inputs * outputs)
        return Estimate(norm, jnp.zeros_like(norm), off, total)

    def _rows(self, forms: list[Any], dtype: Any) -> Estimate:
        ids, d = _joined(forms)
        summed, by_row = _summed_by_row(ids, d, dtype)
        norm = norms_above(summed, (1, 2, 3), dtype)
        total = norms_above(by_row, (1, 2), dtype)
        unit = bounds.unit_roundoff(dtype)
        total *= 1 + bounds.relative_error(self.sizes.positions, unit)
        off = bounds.relative_error(self.sizes.positions, unit) * total
        return Estimate(norm, jnp.zeros_like(norm), off, total)

    def _tied(self, forms: list[Any], dtype: Any) -> Estimate:
        tables, pairs = _apart(forms)
        x, d = _joined(pairs)
        ((ids, own),) = tables

        def with_table(square: Array, each: Array) -> tuple[Array, Array, int]:
            summed, _ = _summed_by_row(ids, own, dtype)
            of_table = jnp.sum(jnp.square(summed), (1, 2, 3))
            # The products' gradient at the rows of the table: `[B, 1, S, T]`.
            at = jnp.take_along_axis(x, jnp.minimum(ids, x.shape[-1] - 1)[:, :, None, :], -1)
            between = contract("bgsn,bgtn->bgst", d, own, dtype)
            by_row = lax.optimization_barrier(jnp.sum(at.astype(dtype) * between, -1))
            cross = jnp.sum(by_row, (1, 2))
            each = each + jnp.sum(norms_above(own, (3,), dtype), -1)
            return square + of_table + 2 * cross, each, 4

        return self._of_squares(x, d, dtype, with_table)


def _gram(x: Array, pieces: int, dtype: Any) -> Array:
    """The inner products `[B, G, T, T]` of all positions."""
    if pieces == 1:
        return contract("bgtk,bgsk->bgts", x, x, dtype)
    x = x.reshape(*x.shape[:-1], pieces, -1)
    # Without the barrier XLA would make one sum of all pieces.
    return jnp.sum(lax.optimization_barrier(contract("bgtmk,bgsmk->mbgts", x, x, dtype)), 0)


def contract(terms: str, x: Array, y: Array, dtype: Any) -> Array:
    """Sums of products, without rounding of the factors.

    Products of two numbers of 16 bits are exact in float32; all others ask for full precision,
    because by default GPUs and TPUs round the factors.
    """
    precision = None
    if not _are_half(x, y):
        x, y, precision = x.astype(dtype), y.astype(dtype), lax.Precision.HIGHEST
    return jnp.einsum(terms, x, y, precision=precision, preferred_element_type=dtype)


def in_pieces(
    fn: Callable[[Array, Array], Array], x: tuple[Array, int], y: tuple[Array, int], number: int
) -> Array:
    """The sum of `fn` of pieces of two arrays, one after another.

    Args:
      fn: the function.
      x: the first array, and the axis along which it is cut.
      y: the second one, likewise.
      number: the number of pieces.
    """
    if number == 1:
        return fn(x[0], y[0])

    def cut(x: Array, axis: int) -> Array:
        shape = (*x.shape[:axis], number, x.shape[axis] // number, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    both = (cut(*x), cut(*y))
    zeros = jnp.zeros_like(jax.eval_shape(fn, *jax.tree.map(lambda x: x[0], both)))
    (zeros,) = devices.varying_like(both, [zeros])
    total, _ = lax.scan(lambda total, pair: (total + fn(*pair), None), zeros, both)
    return total


def _are_half(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and x.dtype.itemsize == 2


def _apart(forms: list[Any]) -> tuple[list[tuple[Array, Array]], list[Any]]:
    """Rows of tables, and the uses that are products."""
    is_rows = [use.site.kind == primitives.ROWS for use, _, _ in forms]
    tables = [(x, d) for (_, x, d), flag in zip(forms, is_rows, strict=True) if flag]
    return tables, [form for form, flag in zip(forms, is_rows, strict=True) if not flag]


def _joined(forms: list[Any]) -> tuple[Array, Array]:
    """Data and cotangents of uses of one layout, with all their positions."""
    if len(forms) == 1:
        return forms[0][1:]
    return _concatenated([x for _, x, _ in forms]), _concatenated([d for _, _, d in forms])


def _concatenated(arrays: list[Array]) -> Array:
    """Along the positions, in the widest dtype."""
    widest = functools.reduce(jnp.promote_types, (x.dtype for x in arrays))
    return jnp.concatenate([x.astype(widest) for x in arrays], 2)


def _summed_by_row(ids: Array, d: Array, dtype: Any) -> tuple[Array, Array]:
    """Cotangents of one row added up: in some place `[B, G, T, N]`, and likewise their norms."""

    def one(ids: Array, d: Array, norms: Array) -> tuple[Array, Array]:
        order = jnp.argsort(ids)
        is_new = jnp.diff(ids[order], prepend=-1) != 0
        place = jnp.zeros_like(ids).at[order].set(jnp.cumsum(is_new) - 1)
        zeros = jnp.zeros(d.shape, dtype)
        return zeros.at[place].add(d.astype(dtype)), jnp.zeros_like(norms).at[place].add(norms)

    return jax.vmap(jax.vmap(one))(ids, d, norms_above(d, (3,), dtype))


def norms_above(x: Array, axes: tuple[int, ...], dtype: Any) -> Array:
    """Upper bounds of the norms over some axes, over the whole range of the dtype."""
    if dtype == jnp.float64:
        x = x.astype(dtype)
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    grouping = Grouping((Group(("norms",), (0,), kept),), (axes,), "scalar")
    placement = Placement((frozenset(),), ((),), in_one_piece=devices.lies_in_one_piece([x]))
    return measure([x], Groups(grouping, placement), l2, from_above=True).bound


def in_chunks(fn: Callable[[Any], Estimate], operands: Any, size: int) -> Estimate:
    """`fn` of `[examples, ...]`, of at most `size` examples at once."""
    examples = jax.tree.leaves(operands)[0].shape[0]
    if size >= examples:
        return fn(operands)
    count, rest = divmod(examples, size)
    cut = Cut.of(operands, size, count)
    _, stacked = lax.scan(lambda _, i: (None, fn(cut.microbatch(i))), None, jnp.arange(count))
    found = jax.tree.map(in_order_of_batch, stacked)
    if rest:
        last = jax.tree.map(lambda x: last_examples(x, rest), operands)
        found = jax.tree.map(appended, found, fn(last))
    return found
