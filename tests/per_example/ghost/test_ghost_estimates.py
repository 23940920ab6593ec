"""The allowances for rounding in norms are at least the proven bounds, and hardly larger."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from small_losses import planned, squares

import optaxclip.per_example._ghost_clip as clip_lib
import optaxclip.per_example._ghost_rounding_bounds as rounding_bounds
import optaxclip.per_example._ghost_sites as sites
from optaxclip.per_example._ghost_norms import Estimate
from optaxclip.per_example._ghost_rounding_bounds import PRODUCT

SCALES = ((1, 1), (1, 1), (5e-20, 1e10), (1e10, 5e-20), (1e-19, 1e-19))
"""For each example what its data and its cotangents are multiplied by; in the last, products of
entries are below the normal numbers."""
UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-23}  # matrix units truncate sums of the latter
TINY = float(np.finfo(np.float32).tiny)


def g(count, unit=2.0**-24):
    """The bound on the relative error of so many roundings."""
    return count * unit / (1 - count * unit)


def drawn(*shape, by=None):
    x = np.random.default_rng(shape).normal(size=(len(SCALES), *shape))
    if by is not None:
        x *= np.array([scales[by] for scales in SCALES]).reshape(-1, *[1] * len(shape))
    return x.astype(np.float32)


def rows_of(count, positions):
    i = np.random.default_rng(3).integers(0, count, (len(SCALES), positions, 1))
    return i.astype(np.int32)


def products(groups, positions, inputs, outputs):
    """A loss, the shape of its parameter, and data and cotangents of all sites."""

    def loss(params, x, d):
        return jnp.vdot(jnp.einsum("gtk,gkn->gtn", x, params["w"]), d)

    x, d = drawn(groups, positions, inputs, by=0), drawn(groups, positions, outputs, by=1)
    return loss, (groups, inputs, outputs), [x], [d]


def lookups(rows, positions, outputs):
    def loss(params, i, d):
        return jnp.vdot(jnp.take(params["w"], i[:, 0], axis=0, mode="fill", fill_value=0), d)

    # Some indices are out of range.
    return loss, (rows, outputs), [rows_of(rows + 2, positions)], [drawn(positions, outputs)]


def tied(rows, positions, entries):
    def loss(params, x, i, d, own):
        return jnp.vdot(x @ params["w"].T, d) + jnp.vdot(params["w"][i[:, 0]], own)

    x, d = drawn(positions, entries, by=0), drawn(positions, rows, by=1)
    i = rows_of(rows, 4)
    i[:, :2, 0] = rows - 1, rows  # the last row, and none
    # What the table adds is the larger part.
    sizes = 10 * np.prod(SCALES, 1).reshape(-1, 1, 1).astype(np.float32)
    return loss, (rows, entries), [x, i], [d, drawn(4, entries) * sizes]


WAYS = {
    "gram": products(2, 3, 80, 30),
    "direct": products(2, 30, 4, 6),
    "rows": lookups(7, 20, 4),
    "tied": tied(60, 3, 40),
    "chunks": tied(6, 5, 4),
}


def sites_of(data, cotangents):
    return sites.BackpropResult(data, cotangents, {}, None)


def estimate(loss, shape, data, cotangents):
    _, plan = planned(loss, {"w": jnp.zeros(shape, cotangents[0].dtype)}, *data, *cotangents)
    (part,) = plan.parts[0]

    def run(*sites):
        found = part.estimate(sites_of(*sites), jnp.float32)
        return found, found.bound

    found = jax.jit(run)(data, cotangents)
    return part.method, *jax.tree.map(lambda x: np.asarray(x, np.longdouble), found)


def norms(x):
    return np.sqrt(np.sum(np.square(x), -1))


def by_rows(i, x):
    """Sums of the entries of `x [B, T, N]` for each row, `[B, rows, N]`."""
    found = np.zeros((len(x), i.max() + 1, x.shape[-1]), np.longdouble)
    np.add.at(found, (np.arange(len(x))[:, None], i), x)
    return found


def of_squares(x, d, unit):
    """The square of the norm, the root of what it may be off, and `A`, for arrays `[B, G, T, any]`.

    All as sums over matrices and positions, of which `A` has the root of the sum of squares.
    """
    groups, positions = x.shape[1:3]
    of_x, of_d = norms(x), norms(d)
    gram_x, gram_d = (np.einsum("bgti,bgsi->bgts", v, v) for v in (x, d))
    largest_x, largest_d = (np.einsum("bgt,bgs->bgts", v, v) for v in (of_x, of_d))
    in_x, in_d = (g(v.shape[-1] + PRODUCT, unit) for v in (x, d))
    total = np.sqrt(np.sum(np.square(np.sum(of_x * of_d, 2)), 1))
    error = in_x * largest_x * np.abs(gram_d) + in_d * np.abs(gram_x) * largest_d
    error += g((groups + 1) * positions + 1, unit) * np.abs(gram_x * gram_d)
    underflow = np.sqrt(x.shape[-1]) * np.sum(of_d, (1, 2)) + groups * positions
    underflow += np.sqrt(d.shape[-1]) * np.sum(of_x, (1, 2))
    rest = np.sqrt(in_x * in_d), np.sqrt(TINY) * underflow
    return np.sum(gram_x * gram_d, (1, 2, 3)), np.sum(error, (1, 2, 3)), rest, total


def expected(way, data, cotangents, unit):
    """The norm, `lost`, `off` and `total` of `Estimate`, as the proofs have them."""
    data, cotangents = (
        [x if x.dtype == np.int32 else np.asarray(x, np.longdouble) for x in found]
        for found in (data, cotangents)
    )
    if way == "rows":
        i, d = data[0][..., 0], cotangents[0]
        # The last rows are those of indices that are out of range.
        norm, total = by_rows(i, d)[:, :-2], by_rows(i, norms(d)[..., None])[:, :-2, 0]
        norm, total = norms(norms(norm)), norms(total)
        return norm, 0 * norm, g(d.shape[1] + PRODUCT, unit) * total, total
    x, d = data[0], cotangents[0]
    if x.ndim == 3:
        x, d = d[:, None], x[:, None]  # the entries that the rows of a table have too come last
    square, error, (share, underflow), total = of_squares(x, d, unit)
    positions = x.shape[2]
    if len(data) == 2:
        i, own = data[1][..., 0], cotangents[1]
        rows = x.shape[-1]
        own, i = np.where(i[..., None] < rows, own, 0), np.minimum(i, rows - 1)
        of_own, summed = norms(own), by_rows(i, own)
        at = np.take_along_axis(x[:, 0], i[:, None, :], 2)
        inner = np.einsum("btn,bsn->bts", d[:, 0], own)
        square += np.sum(np.square(summed), (1, 2)) + 2 * np.sum(at * inner, (1, 2))
        moduli = np.abs(at) * norms(d)[:, 0, :, None] * of_own[:, None]
        moduli = np.sum(moduli, (1, 2)) + np.sum(np.square(by_rows(i, of_own[..., None])), (1, 2))
        positions += own.shape[1]
        error += 2 * g(positions + d.shape[-1] + PRODUCT, unit) * moduli
        total += np.sum(of_own, 1)
    norm = np.sqrt(np.maximum(square, 0))
    if way in ("direct", "chunks"):
        off = g(positions + PRODUCT, unit) * total
        off += TINY * positions * np.sqrt(x.shape[1] * x.shape[-1] * d.shape[-1])
        return norm, 0 * norm, off, total
    return norm, np.minimum(np.sqrt(error) + share * total + underflow, total), 0 * norm, total


@pytest.mark.parametrize(
    ("way", "dtype"),
    slow_unless(
        lambda way, dtype: way != "direct" and dtype == "float32",
        itertools.product(WAYS, ("float32", "bfloat16")),
    ),
)
def test_ghost_estimates_match_proven_rounding_bounds(way, dtype):
    loss, shape, data, cotangents = WAYS[way]
    data, cotangents = jax.tree.map(
        lambda x: x if x.dtype == np.int32 else x.astype(jnp.dtype(dtype)), (data, cotangents)
    )
    found_way, found, bound = estimate(loss, shape, data, cotangents)
    assert found_way == way
    norm, lost, off, total = expected(way, data, cotangents, UNITS[dtype])
    assert np.all(np.abs(found.norm - norm) <= lost + off)
    total[-1] = 0  # products of norms may underflow too
    for name, proven in {"cancellation_error": lost, "error": off, "total": total}.items():
        least = getattr(found, name)
        assert np.all(least >= proven), (name, least / proven)
        # Where nothing underflows, hardly more than that.
        assert np.all(least[:2] <= 1.1 * proven[:2]), (name, least / proven)
    thresholds = np.minimum(
        np.hypot(found.norm, found.cancellation_error) + found.error, found.total
    )
    np.testing.assert_allclose(bound.astype(float), thresholds.astype(float), rtol=1e-6)


def test_ghost_gradient_error_covers_positions_and_uses():
    def loss(params, x, y, d, e):
        return jnp.vdot(x @ params["w"], d) + jnp.vdot(y @ params["w"], e)

    (x, d), (y, e) = ([drawn(n, 4), drawn(n, 6)] for n in (30, 40))
    _, plan = planned(loss, {"w": jnp.zeros((4, 6))}, x, y, d, e)
    (part,) = plan.parts[0]
    off = np.asarray(
        jax.jit(lambda *sites: part.rounding_error(sites_of(*sites), jnp.float32))([x, y], [d, e])
    )
    x, y, d, e = (norms(np.asarray(v, np.longdouble)) for v in (x, y, d, e))
    proven = g(40 + 1 + PRODUCT) * (np.sum(x * d, 1) + np.sum(y * e, 1))
    assert np.all((off >= proven) & (off <= 1.1 * proven))


def slack_of(way, positions, inputs, outputs, dtype=jnp.float32, uses=1):
    """The share of `A` by which norms exceed their bound, for the rounding of the sum."""
    if way == "gram":
        shapes = [(positions, inputs)] * uses

        def loss(params, *xs):
            # Cotangents of float32.
            options = {"preferred_element_type": jnp.float32}
            return sum(squares(jnp.matmul(x, params["w"], **options)) for x in xs)
    else:
        loss, *_ = tied(inputs, 1, 1)
        shapes = [(positions, outputs), (4, 1), (positions, inputs), (4, outputs)]
    batch = [
        jax.ShapeDtypeStruct((2, *shape), jnp.int32 if shape == (4, 1) else dtype)
        for shape in shapes
    ]
    _, plan = planned(loss, {"w": jax.ShapeDtypeStruct((inputs, outputs), dtype)}, *batch)
    assert plan.parts[0][0].method == way
    return clip_lib._bound_term(plan, (0, 0), Estimate(0, 0, 0, 1))


def test_ghost_norms_allow_for_rounding_of_sum():
    cases = [
        (slack_of("gram", 30, 200, 300), 30),
        # Each use has a sum of its own, and these are added up.
        (slack_of("gram", 15, 200, 300, uses=3), 15 + 2),
        # Positions are cut into 32 pieces.
        (slack_of("gram", 2**13, 2**15, 2**15), 256 + 32),
        (slack_of("tied", 100, 200, 300), 101),
    ]
    for slack, additions in cases:
        proven = g(additions + PRODUCT + 2)
        assert proven <= slack <= 1.2 * proven
    # A factor of float32 meets bfloat16 in two parts, each of which is a term.
    slack, proven = slack_of("gram", 30, 200, 300, dtype=jnp.bfloat16), g(60 + PRODUCT + 2)
    assert proven <= slack - rounding_bounds.OTHER_ERRORS <= 1.2 * proven


def test_rounding_bounds_match_formulas():
    assert rounding_bounds.relative_error(100, 2.0**-10) == 100 / 924
    assert [rounding_bounds.relative_error(n, 2.0**-10) for n in (511, 512)] == [511 / 513, np.inf]
    eps = [rounding_bounds.unit_roundoff(x) for x in (np.float32, np.float64)]
    assert [*eps, rounding_bounds.unit_roundoff(np.float32, True)] == [2.0**-24, 2.0**-53, 2.0**-23]
    assert rounding_bounds.additions(8192, 4) == 2048 + 3 + PRODUCT


def test_long_sums_split_into_expected_blocks():
    lengths = (1, 4096, 4097, 4098, 8192, 2**16, 2**17, 2**18)
    assert [*map(rounding_bounds.pieces_of_inner, lengths)] == [1, 1, 1, 2, 4, 32, 64, 64]
    lengths = (1, 1024, 2048, 4096, 8192, 10_001, 10_002, 2**20)
    assert [rounding_bounds.pieces(n, n) for n in lengths] == [1, 1, 4, 8, 32, 1, 2, 64]


def test_block_split_chooses_axis_with_most_blocks():
    def loss(params, x):
        return squares(jnp.einsum("abck,kn->abcn", x, params["w"]))

    x, w = (jax.ShapeDtypeStruct(n, jnp.float32) for n in ((2, 3, 8192, 5, 4), (4, 6)))
    _, plan = planned(loss, {"w": w}, x)
    (use, _), *_ = plan.parts[0][0].uses
    assert sites.block_split(use) == (1, 64, 3 * 8192 * 5 // 64 + 64)
