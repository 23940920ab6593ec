"""Divides the uses of a parameter into parts, and chooses how the norm of each is computed."""

import optaxclip.per_example.ghost.bounds as bounds
import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.sites as sites
from optaxclip.per_example.ghost.norms import NormTerm
from optaxclip.per_example.ghost.sites import Layout, ParamUse, Sizes
from optaxclip.per_example.ghost.walk import Program


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
    return bounds.pieces_of_inner(sizes.inputs), bounds.pieces_of_inner(sizes.outputs)
