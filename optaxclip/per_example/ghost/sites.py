"""Brings the data and cotangents of all sites of a parameter into one form.

The form is `[examples, groups, positions, entries]`: a parameter is `groups` matrices of
`inputs x outputs` entries, each of which is used at all `positions`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.rounding_bounds as rounding_bounds
from optaxclip.per_example.ghost.interpreter import MatmulSite, ParamSlice, Program, ReshapeOp


class BackpropResult(NamedTuple):
    """The results of backpropagation for a batch.

    Attributes:
      data: for each site, its data `[*loops, examples, ...]`.
      cotangents: for each site, the cotangents of its output, `[*loops, examples, ...]`.
      gradients: for some parameters, their gradients `[examples, ...]`.
      outputs: the loss's outputs, with a leading axis of examples.
    """

    data: list[Array]
    cotangents: list[Array]
    gradients: dict[int, Array]
    outputs: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ParamUse:
    """The use of one parameter at one site, which has this number in the program."""

    number: int
    site: MatmulSite
    reference: ParamSlice

    @property
    def loops(self) -> tuple[bool, ...]:
        """For each loop around the site, whether it slices the parameter."""
        return self.reference.loops

    def operands(self, backward: BackpropResult) -> tuple[Array, Array]:
        """Data and cotangents."""
        return backward.data[self.number], backward.cotangents[self.number]


def uses_of(program: Program, leaf: int) -> list[ParamUse]:
    """All uses of a parameter."""
    return [
        ParamUse(number, site, reference)
        for number, site in enumerate(program.sites)
        for reference in site.references
        if reference.leaf == leaf
    ]


class Sizes(NamedTuple):
    """The sizes of the common form."""

    groups: int
    positions: int
    inputs: int
    outputs: int


class Axes(NamedTuple):
    """For a matrix product, which axes of data and cotangents are groups, positions and entries.

    In both arrays the axes of loops come first, then the axis of the examples.
    """

    data_groups: tuple[int, ...]
    data_positions: tuple[int, ...]
    data_entries: tuple[int, ...]
    groups: tuple[int, ...]
    positions: tuple[int, ...]
    entries: tuple[int, ...]

    @classmethod
    def create(cls, use: ParamUse) -> "Axes":
        """The axes of a use; axes of entries are in the order of the parameter's axes."""
        site, order = use.site, trace_transposes(use)[1]
        axes = _product_at(use)
        first, num_batch = len(use.loops) + 1, len(axes.data_batch)
        free = _others(site.data.ndim, axes.data_sums + axes.data_batch)
        own = _others(_weights(use).ndim, axes.weight_sums + axes.weight_batch)
        of_data, of_weights = num_batch, num_batch + len(free)
        if site.position == 0:
            of_data, of_weights = num_batch + len(own), num_batch
        rows = zip(axes.weight_sums, axes.data_sums, strict=True)
        sums = [i for _, i in sorted((order[w], i) for w, i in rows)]
        outputs = [i for _, i in sorted((order[w], i) for i, w in enumerate(own))]
        sliced = tuple(i for i, is_sliced in enumerate(use.loops) if is_sliced)
        same = tuple(i for i, is_sliced in enumerate(use.loops) if not is_sliced)
        return cls(
            (*sliced, *(first + i for i in axes.data_batch)),
            (*same, *(first + i for i in free)),
            tuple(first + i for i in sums),
            (*sliced, *(first + i for i in range(num_batch))),
            (*same, *(first + of_data + i for i in range(len(free)))),
            tuple(first + of_weights + i for i in outputs),
        )


def _product_at(use: ParamUse) -> primitives.Product:
    found = primitives.product(use.site.eqn, use.site.position)
    if found is None:
        raise AssertionError(f"{use.site.eqn} is not a product")
    return found


def _weights(use: ParamUse) -> Any:
    """The type of the operand that holds the parameter."""
    return use.site.eqn.invars[use.site.position].aval


def _others(ndim: int, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(ndim) if axis not in axes]


def slice_used(use: ParamUse, x: Array, d: Array) -> tuple[Array, Array]:
    """The parts of data and cotangents that meet the parameter, if it is part of an operand."""
    interval = use.reference.interval
    if interval is None:
        return x, d
    axes, first = _product_at(use), len(use.loops) + 1

    def part(x: Array, axis: int) -> Array:
        end = interval.start + interval.size
        return lax.slice_in_dim(x, interval.start, end, axis=first + axis)

    if interval.axis in axes.weight_sums:
        return part(x, axes.data_sums[axes.weight_sums.index(interval.axis)]), d
    if interval.axis in axes.weight_batch:
        number = axes.weight_batch.index(interval.axis)
        return part(x, axes.data_batch[number]), part(d, number)
    own = _others(_weights(use).ndim, axes.weight_sums + axes.weight_batch)
    # So many axes of the data are neither summed over nor batch axes.
    free = use.site.data.ndim - len(axes.data_sums) - len(axes.data_batch)
    before = len(axes.data_batch) + (free if use.site.position else 0)
    return x, part(d, before + own.index(interval.axis))


def to_matmul_form(use: ParamUse, x: Array, d: Array) -> tuple[Array, Array]:
    """Data `[B, G, T, K]` and cotangents `[B, G, T, N]` of a product or a convolution."""
    if use.site.kind == primitives.CONVOLUTION:
        return pairs_of_convolution(use, x, d)
    x, d = slice_used(use, x, d)
    axes, example = Axes.create(use), len(use.loops)
    x = _arrange_bgte(x, example, axes.data_groups, axes.data_positions, axes.data_entries)
    return x, _arrange_bgte(d, example, axes.groups, axes.positions, axes.entries)


def _arrange_bgte(
    x: Array, example: int, groups: Sequence[int], positions: Sequence[int], entries: Sequence[int]
) -> Array:
    """`x` in the form `[B, G, T, E]`, from the axes that are groups, positions and entries."""
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (groups, positions, entries)]
    x = jnp.transpose(x, (example, *groups, *positions, *entries))
    return x.reshape(x.shape[0], *sizes)


def pairs_of_convolution(
    use: ParamUse, x: Array, d: Array, of_pixels: Callable[[Array], Array] = lambda x: x
) -> tuple[Array, Array]:
    """Data and cotangents, as from `pairs`, for a convolution.

    `count_pixels` is taken of the pixels `[..., channels]` before they are put into patches.
    """
    eqn, lead = use.site.eqn, x.shape[: len(use.loops) + 1]
    groups = primitives.feature_groups(eqn)
    x = primitives.one_pixel_patches(eqn, x.reshape(-1, *x.shape[len(lead) :]))
    x = primitives.patches(eqn, of_pixels(x))
    d = primitives.outputs_of_convolution(eqn, d.reshape(-1, *d.shape[len(lead) :]))
    x = x.reshape(*lead, -1, x.shape[-2], groups, x.shape[-1] // groups)
    x = jnp.moveaxis(x, -2, len(lead))
    x = x.reshape(*x.shape[:-2], -1)
    d = d.reshape(*lead, -1, groups, d.shape[-1] // groups)
    d = jnp.moveaxis(d, -2, len(lead))
    axes = _loop_axes(use.loops)
    return _arrange_bgte(x, *axes), _arrange_bgte(d, *axes)


def _loop_axes(loops: tuple[bool, ...]) -> tuple[int, list[int], list[int], list[int]]:
    """The axis of `B`, and the axes of groups, positions and entries in `[*loops, B, ...]`."""
    example = len(loops)
    sliced = [i for i, is_sliced in enumerate(loops) if is_sliced]
    same = [i for i, is_sliced in enumerate(loops) if not is_sliced]
    return example, [*sliced, example + 1], [*same, example + 2], [example + 3]


def to_gather_form(use: ParamUse, x: Array, d: Array) -> tuple[Array, Array]:
    """The row `[B, G, T]` of a table that each position takes, and cotangents `[B, G, T, N]`.

    If a position takes no row, because its index is out of range, its row is the number of rows.
    """
    count = _weights(use).shape[0]
    drops = primitives.drops_outside(use.site.eqn)
    lead = d.shape[: len(use.loops) + 1]
    # The dtype of the indices may hold fewer numbers than the table has rows, or more than int32.
    last = min(count - 1, int(jnp.iinfo(x.dtype).max))
    ids = jnp.clip(x, 0, last).astype(jnp.int32)
    if drops:
        ids = jnp.where((x >= 0) & (x <= last), ids, count)
    ids = ids.reshape(*lead, 1, -1, 1)
    d = d.reshape(*lead, 1, ids.shape[-2], math.prod(_weights(use).shape[1:]))
    if drops:
        d = jnp.where(ids < count, d, jnp.zeros_like(d))
    axes = _loop_axes(use.loops)
    return _arrange_bgte(ids, *axes)[..., 0], _arrange_bgte(d, *axes)


def sizes_of(use: ParamUse) -> Sizes:
    """The sizes of a use in the common form, for one example."""
    lengths = zip(use.loops, use.site.lengths, strict=True)
    around = [math.prod(n for is_sliced, n in lengths if is_sliced), 1]
    around[1] = math.prod(use.site.lengths) // max(around[0], 1)
    data, output, weights = use.site.data, use.site.output, _weights(use)
    if use.site.kind == primitives.GATHER:
        each = (1, math.prod(data.shape[:-1]), 1, math.prod(weights.shape[1:]))
    elif use.site.kind == primitives.CONVOLUTION:
        groups = primitives.feature_groups(use.site.eqn)
        features = output.shape[use.site.eqn.params["dimension_numbers"].out_spec[1]]
        positions, outputs = output.size // max(features, 1), features // groups
        each = (groups, positions, weights.size // max(features, 1), outputs)
    else:
        each = _sizes_of_product(use)
    return Sizes(each[0] * around[0], each[1] * around[1], *each[2:])


def _sizes_of_product(use: ParamUse) -> tuple[int, int, int, int]:
    axes, weights = _product_at(use), list(_weights(use).shape)
    interval = use.reference.interval
    if interval is not None:
        weights[interval.axis] = interval.size
    groups = math.prod(weights[i] for i in axes.weight_batch)
    inputs = math.prod(weights[i] for i in axes.weight_sums)
    outputs = math.prod(weights) // max(groups * inputs, 1)
    used = axes.data_sums + axes.data_batch
    positions = math.prod(use.site.data.shape[i] for i in _others(use.site.data.ndim, used))
    return groups, positions, inputs, outputs


def trace_transposes(use: ParamUse) -> tuple[tuple[ReshapeOp, ...], tuple[int, ...]]:
    """A reference's moves before its last transposes, and where each axis was before these."""
    moves, order = use.reference.moves, tuple(range(_weights(use).ndim))
    depth = sum(use.loops)
    while moves and primitives.name_of(moves[-1].eqn) == "transpose" and moves[-1].depth == depth:
        permutation = moves[-1].eqn.params["permutation"]
        order = tuple(int(permutation[axis]) for axis in order)
        moves = moves[:-1]
    return moves, order


class Layout(NamedTuple):
    """The layout of a use: uses of the same layout can be joined along their positions.

    It tells the operation, the moves of the entries as text, and which axes of the parameter are
    batch axes or meet the data.
    """

    kind: str
    moves: tuple[str, ...]
    axes: Any


def layout(use: ParamUse) -> tuple[Layout, bool]:
    """The layout of a use, and whether data and cotangents change places in it."""
    kind, (moves, order) = use.site.kind, trace_transposes(use)
    if kind != primitives.DOT_GENERAL:
        moves = use.reference.moves
        around = (sum(use.loops), primitives.layout_of_kernel(use.site.eqn))
        return Layout(kind, moves_key(moves), around), False
    axes = _product_at(use)
    own = _others(_weights(use).ndim, axes.weight_sums + axes.weight_batch)
    batch = tuple(order[i] for i in axes.weight_batch)
    sides = [tuple(sorted(order[i] for i in side)) for side in (axes.weight_sums, own)]
    is_flipped = sides[0] > sides[1]
    around = (sum(use.loops), batch, *sorted(sides))
    return Layout(kind, moves_key(moves), around), is_flipped


def moves_key(moves: Sequence[ReshapeOp]) -> tuple[str, ...]:
    """Moves as text; moves that do the same have the same text."""
    return tuple(
        f"{move.depth} {move.eqn.primitive.name} {sorted(move.eqn.params.items(), key=str)} "
        f"{move.output} {move.eqn.invars[0].aval.shape}"
        for move in moves
    )


def are_disjoint(use: ParamUse, other: ParamUse) -> bool:
    """Whether two uses certainly use different entries of the parameter."""
    both = list(zip(use.reference.moves, other.reference.moves, strict=False))
    for move, another in both:
        if moves_key([move]) == moves_key([another]):
            continue
        intervals = [primitives.slice_intervals(x.eqn, x.output) for x in (move, another)]
        if None in intervals or move.depth != another.depth:
            return False
        # Both slice one array: the parameter, moved in the same way.
        rows = zip(*intervals, strict=True)
        return any(a[1] <= b[0] or b[1] <= a[0] for a, b in rows)
    return False


def order_of_sum(use: ParamUse) -> list[int]:
    """The transposition of a `dot_general` over data and cotangents to the parameter's axes.

    The result of that `dot_general` has the axes of sliced loops, then the batch axes, then the
    other axes of the data and of the cotangents, each in their own order.
    """
    axes, sliced = _product_at(use), sum(use.loops)
    by_data = sorted(zip(axes.data_sums, axes.weight_sums, strict=True))
    own = _others(_weights(use).ndim, axes.weight_sums + axes.weight_batch)
    labels = [*axes.weight_batch, *(w for _, w in by_data), *own]
    places = sorted(range(len(labels)), key=labels.__getitem__)
    return [*range(sliced), *(sliced + place for place in places)]


class BlockSplit(NamedTuple):
    """The pieces in which a sum over an axis is added up, and the additions of a term."""

    axis: int
    pieces: int
    additions: int


def block_split(use: ParamUse) -> BlockSplit:
    """The pieces into which the positions of a use are cut for its sum."""
    positions = sizes_of(use).positions
    if use.site.kind != primitives.DOT_GENERAL:
        return BlockSplit(0, 1, positions)
    axes, sizes = Axes.create(use), (*use.site.lengths, 1, *use.site.data.shape)
    lengths = [sizes[axis] for axis in axes.data_positions]
    found = [(rounding_bounds.pieces(positions, length), -i) for i, length in enumerate(lengths)]
    pieces, axis = max(found, default=(1, 0))
    return BlockSplit(-axis, pieces, positions // pieces + pieces)
