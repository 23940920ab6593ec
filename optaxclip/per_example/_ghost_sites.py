"""The uses of parameters at sites, and the common form of their data and cotangents.

In the common form, a parameter is `groups` matrices of `inputs x outputs` elements, which are used
at all `positions`. Data are `[B, G, T, K]` (examples, groups, positions, inputs), and cotangents
are `[B, G, T, N]` (outputs).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

import optaxclip.per_example._ghost_primitives as primitives
import optaxclip.per_example._ghost_rounding_bounds as rounding_bounds
from optaxclip.per_example._ghost_interpreter import MatmulSite, ParamSlice, ReshapeOp


class BackpropResult(NamedTuple):
    """The results of backpropagation for a batch."""

    data: list[Array]  # [*loops, examples, ...] for all sites.
    cotangents: list[Array]  # [*loops, examples, ...] for the outputs of all sites.
    gradients: dict[int, Array]  # [examples, ...] for some parameters.
    outputs: Any  # The losses and aux, [examples, ...].


@dataclasses.dataclass(frozen=True, eq=False)
class ParamUse:
    """A use of a parameter at the site with this number in the program."""

    number: int
    site: MatmulSite
    reference: ParamSlice

    @property
    def loops(self) -> tuple[bool, ...]:
        """Flags of the surrounding loops, True if a loop slices the parameter."""
        return self.reference.loops

    @property
    def sliced_lengths(self) -> tuple[int, ...]:
        """The lengths of the loops that slice the parameter."""
        rows = zip(self.loops, self.site.lengths, strict=True)
        return tuple(length for is_sliced, length in rows if is_sliced)

    @property
    def weights(self) -> Any:
        """The type of the operand with the parameter."""
        return self.site.eqn.invars[self.site.position].aval

    @property
    def product(self) -> primitives.Product:
        """The axes of the matrix product."""
        product = primitives.product(self.site.eqn, self.site.position)
        assert product is not None, self.site.eqn
        return product

    def operands(self, backward: BackpropResult) -> tuple[Array, Array]:
        """Returns data and cotangents, `[*loops, examples, ...]`."""
        return backward.data[self.number], backward.cotangents[self.number]


class Sizes(NamedTuple):
    """The sizes of the common form for one example."""

    groups: int
    positions: int
    inputs: int
    outputs: int


class Axes(NamedTuple):
    """The axes of data and cotangents in the common form, after the axes of loops and examples."""

    data_groups: tuple[int, ...]
    data_positions: tuple[int, ...]
    data_elements: tuple[int, ...]
    groups: tuple[int, ...]
    positions: tuple[int, ...]
    elements: tuple[int, ...]

    @classmethod
    def create(cls, use: ParamUse) -> "Axes":
        """Returns the axes of a use, with elements in the order of the parameter's axes."""
        site, order = use.site, trace_transposes(use)[1]
        product = use.product
        own, free = product.weight_free, product.data_free
        first, num_batch = len(use.loops) + 1, len(product.data_batch)
        # The output of a `dot_general` is [*batch, *free axes of lhs, *free axes of rhs].
        data_start, weight_start = num_batch, num_batch + len(free)
        if site.position == 0:
            data_start, weight_start = num_batch + len(own), num_batch
        rows = zip(product.weight_sums, product.data_sums, strict=True)
        sums = [i for _, i in sorted((order[w], i) for w, i in rows)]
        outputs = [i for _, i in sorted((order[w], i) for i, w in enumerate(own))]
        sliced = tuple(i for i, is_sliced in enumerate(use.loops) if is_sliced)
        unsliced = tuple(i for i, is_sliced in enumerate(use.loops) if not is_sliced)
        return cls(
            (*sliced, *(first + i for i in product.data_batch)),
            (*unsliced, *(first + i for i in free)),
            tuple(first + i for i in sums),
            (*sliced, *(first + i for i in range(num_batch))),
            (*unsliced, *(first + data_start + i for i in range(len(free)))),
            tuple(first + weight_start + i for i in outputs),
        )


def slice_used(use: ParamUse, x: Array, d: Array) -> tuple[Array, Array]:
    """Slices data and cotangents to the part of the parameter in a concatenated operand."""
    interval = use.reference.interval
    if interval is None:
        return x, d
    product, first = use.product, len(use.loops) + 1
    start, end = interval.start, interval.start + interval.size
    if interval.axis in product.weight_sums:
        axis = product.data_sums[product.weight_sums.index(interval.axis)]
        return lax.slice_in_dim(x, start, end, axis=first + axis), d
    if interval.axis in product.weight_batch:
        number = product.weight_batch.index(interval.axis)
        x = lax.slice_in_dim(x, start, end, axis=first + product.data_batch[number])
        return x, lax.slice_in_dim(d, start, end, axis=first + number)
    # The free axes of the parameter are after those of the data if it is the second operand.
    before = len(product.data_batch) + (len(product.data_free) if use.site.position else 0)
    axis = first + before + product.weight_free.index(interval.axis)
    return x, lax.slice_in_dim(d, start, end, axis=axis)


def to_matmul_form(use: ParamUse, x: Array, d: Array) -> tuple[Array, Array]:
    """Returns data `[B, G, T, K]` and cotangents `[B, G, T, N]` of a product or a convolution."""
    if use.site.kind == primitives.CONVOLUTION:
        return pairs_of_convolution(use, x, d)
    x, d = slice_used(use, x, d)
    axes, example = Axes.create(use), len(use.loops)
    x = _arrange_bgte(x, example, axes.data_groups, axes.data_positions, axes.data_elements)
    return x, _arrange_bgte(d, example, axes.groups, axes.positions, axes.elements)


def _arrange_bgte(
    x: Array, example: int, groups: Sequence[int], positions: Sequence[int], elements: Sequence[int]
) -> Array:
    """Returns `x` as `[B, G, T, E]`, from the axes of these dimensions."""
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (groups, positions, elements)]
    x = jnp.transpose(x, (example, *groups, *positions, *elements))
    return x.reshape(x.shape[0], *sizes)


def pairs_of_convolution(
    use: ParamUse, x: Array, d: Array, map_pixels: Callable[[Array], Array] = lambda x: x
) -> tuple[Array, Array]:
    """Returns data and cotangents like `to_matmul_form`, with patches of mapped pixels."""
    eqn, lead = use.site.eqn, x.shape[: len(use.loops) + 1]  # [*loops, B]
    groups = primitives.feature_groups(eqn)
    # [*loops, B, *input] -> [any, *input], [*loops, B, *output] -> [any, *output]
    x, d = (v.reshape(-1, *v.shape[len(lead) :]) for v in (x, d))
    x = primitives.move_channels_last(eqn, x, is_output=False)
    # Patches of one pixel, [any, n, *input positions, 1, channels].
    x = map_pixels(jnp.expand_dims(x, -2))
    x = primitives.patches(eqn, x)  # [any, n, *output positions, window, channels]
    # [any, n, *output positions, features]
    d = primitives.move_channels_last(eqn, d, is_output=True)
    # [*loops, B, T, window, G, channels] -> [*loops, B, G, T, window * channels]
    x = x.reshape(*lead, -1, x.shape[-2], groups, x.shape[-1] // groups)
    x = jnp.moveaxis(x, -2, len(lead))
    x = x.reshape(*x.shape[:-2], -1)
    # [*loops, B, T, G, features] -> [*loops, B, G, T, features]
    d = d.reshape(*lead, -1, groups, d.shape[-1] // groups)
    d = jnp.moveaxis(d, -2, len(lead))
    return _merge_loops(use, x), _merge_loops(use, d)


def _merge_loops(use: ParamUse, x: Array) -> Array:
    """Merges loops into groups or positions: `[*loops, B, G, T, E]` -> `[B, G, T, E]`."""
    example = len(use.loops)
    sliced = [i for i, is_sliced in enumerate(use.loops) if is_sliced]
    unsliced = [i for i, is_sliced in enumerate(use.loops) if not is_sliced]
    groups, positions = [*sliced, example + 1], [*unsliced, example + 2]
    return _arrange_bgte(x, example, groups, positions, [example + 3])


def to_gather_form(use: ParamUse, x: Array, d: Array) -> tuple[Array, Array]:
    """Returns row indices `[B, G, T]` of an embedding table, and cotangents `[B, G, T, N]`."""
    count = use.weights.shape[0]
    drops = primitives.drops_outside(use.site.eqn)
    lead = d.shape[: len(use.loops) + 1]  # [*loops, B]
    # The dtype of the indices may be too narrow for the rows of the table, or wider than int32.
    last = min(count - 1, int(jnp.iinfo(x.dtype).max))
    ids = jnp.clip(x, 0, last).astype(jnp.int32)
    if drops:  # Indices out of range become the number of rows.
        ids = jnp.where((x >= 0) & (x <= last), ids, count)
    ids = ids.reshape(*lead, 1, -1, 1)  # [*loops, B, 1, T, 1]
    d = d.reshape(*lead, 1, ids.shape[-2], math.prod(use.weights.shape[1:]))  # [*loops, B, 1, T, N]
    if drops:
        d = jnp.where(ids < count, d, jnp.zeros_like(d))
    return _merge_loops(use, ids)[..., 0], _merge_loops(use, d)


def sizes_of(use: ParamUse) -> Sizes:
    """Returns the sizes of a use in the common form, for one example."""
    num_sliced = math.prod(use.sliced_lengths)
    num_unsliced = math.prod(use.site.lengths) // max(num_sliced, 1)
    data, output, weights = use.site.data, use.site.output, use.weights
    if use.site.kind == primitives.GATHER:
        sizes = Sizes(1, math.prod(data.shape[:-1]), 1, math.prod(weights.shape[1:]))
    elif use.site.kind == primitives.CONVOLUTION:
        groups = primitives.feature_groups(use.site.eqn)
        features = output.shape[use.site.eqn.params["dimension_numbers"].out_spec[1]]
        positions, inputs = output.size // max(features, 1), weights.size // max(features, 1)
        sizes = Sizes(groups, positions, inputs, features // groups)
    else:
        product, shape, interval = use.product, list(weights.shape), use.reference.interval
        if interval is not None:
            shape[interval.axis] = interval.size
        groups = math.prod(shape[i] for i in product.weight_batch)
        inputs = math.prod(shape[i] for i in product.weight_sums)
        positions = math.prod(data.shape[i] for i in product.data_free)
        sizes = Sizes(groups, positions, inputs, math.prod(shape) // max(groups * inputs, 1))
    # Loops that slice the parameter add groups, and loops that use all of it add positions.
    groups, positions, inputs, outputs = sizes
    return Sizes(groups * num_sliced, positions * num_unsliced, inputs, outputs)


def trace_transposes(use: ParamUse) -> tuple[tuple[ReshapeOp, ...], tuple[int, ...]]:
    """Returns the moves before the final transposes, and the original positions of the axes."""
    moves, order = use.reference.moves, tuple(range(use.weights.ndim))
    depth = sum(use.loops)
    while moves and moves[-1].depth == depth:
        permutation = primitives.permutation(moves[-1].eqn)
        if permutation is None:
            break
        order = tuple(int(permutation[axis]) for axis in order)
        moves = moves[:-1]
    return moves, order


class Layout(NamedTuple):
    """The layout of a use. Uses with equal layouts can be joined along their positions."""

    kind: str  # The name of the primitive.
    moves: tuple[str, ...]  # The moves of the elements as text.
    axes: Any  # The number of sliced loops, and the batch axes and contracted axes.


def layout(use: ParamUse) -> tuple[Layout, bool]:
    """Returns the layout of a use, and `True` if data and cotangents are swapped in it."""
    kind, (moves, order) = use.site.kind, trace_transposes(use)
    if kind != primitives.DOT_GENERAL:
        moves, kernel, eqn = use.reference.moves, (), use.site.eqn
        if kind == primitives.CONVOLUTION:
            numbers = eqn.params["dimension_numbers"]
            kernel = (tuple(numbers.rhs_spec), primitives.feature_groups(eqn))
        axes = (sum(use.loops), kernel)
        return Layout(kind, moves_key(moves), axes), False
    product = use.product
    batch = tuple(order[i] for i in product.weight_batch)
    # The product with the transposed parameter has the same layout with swapped sides.
    inputs, outputs = (
        tuple(sorted(order[i] for i in side)) for side in (product.weight_sums, product.weight_free)
    )
    axes = (sum(use.loops), batch, *sorted([inputs, outputs]))
    return Layout(kind, moves_key(moves), axes), inputs > outputs


def moves_key(moves: Sequence[ReshapeOp]) -> tuple[str, ...]:
    """Returns moves as text, which is equal for equal moves."""
    return tuple(
        f"{move.depth} {move.eqn.primitive.name} {sorted(move.eqn.params.items(), key=str)} "
        f"{move.output} {move.eqn.invars[0].aval.shape}"
        for move in moves
    )


def are_disjoint(use: ParamUse, other: ParamUse) -> bool:
    """Returns `True` if two uses are known to use different elements of the parameter."""
    pairs = list(zip(use.reference.moves, other.reference.moves, strict=False))
    for move, other_move in pairs:
        if moves_key([move]) == moves_key([other_move]):
            continue
        intervals = [primitives.slice_intervals(x.eqn, x.output) for x in (move, other_move)]
        if None in intervals or move.depth != other_move.depth:
            return False
        # Both are slices of the same array, because all previous moves are equal.
        rows = zip(*intervals, strict=True)
        return any(a[1] <= b[0] or b[1] <= a[0] for a, b in rows)
    return False


def order_of_sum(use: ParamUse) -> list[int]:
    """Returns the permutation from the output of a product to the axes of the parameter."""
    # The output has the axes of sliced loops, batch axes, and then the remaining axes of data and
    # cotangents, in their order.
    product, num_sliced = use.product, sum(use.loops)
    by_data = sorted(zip(product.data_sums, product.weight_sums, strict=True))
    labels = [*product.weight_batch, *(w for _, w in by_data), *product.weight_free]
    positions = sorted(range(len(labels)), key=labels.__getitem__)
    return [*range(num_sliced), *(num_sliced + position for position in positions)]


class BlockSplit(NamedTuple):
    """The pieces of a sum along an axis, and the number of additions per term."""

    axis: int
    pieces: int
    additions: int


def block_split(use: ParamUse) -> BlockSplit:
    """Returns the pieces into which the positions of a use are split for its sum."""
    positions = sizes_of(use).positions
    if use.site.kind != primitives.DOT_GENERAL:
        return BlockSplit(0, 1, positions)
    axes, sizes = Axes.create(use), (*use.site.lengths, 1, *use.site.data.shape)
    lengths = [sizes[axis] for axis in axes.data_positions]
    # The first axis is used among axes with the same number of pieces.
    options = [(rounding_bounds.pieces(positions, length), -i) for i, length in enumerate(lengths)]
    pieces, axis = max(options, default=(1, 0))
    return BlockSplit(-axis, pieces, positions // pieces + pieces)
