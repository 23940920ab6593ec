"""The numerical promises, one by one, with float64 NumPy for truth.

`pytest -s -k figures tests/engine/test_promises.py` prints what was measured.
"""

import functools
import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from compiling import AS_USERS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

import optaxclip
from optaxclip import norms, scopes

pytestmark = pytest.mark.usefixtures("optimized")
BF16, F16, F32, F64 = jnp.bfloat16, np.float16, np.float32, np.float64
NORMS = {name: name for name in ("l1", "l2", "linf", "rms", "mean_abs", "average_l2")}
NORMS |= {"lp(1.5)": norms.lp(1.5), "lp(3)": norms.lp(3)}
SCOPES = {
    "tree": scopes.tree(),
    "leaf": scopes.leaf(),
    "unit": scopes.unit(),
    "axes": scopes.axes(-1),
    "group": scopes.group(lambda path, leaf: path),
}


@pytest.fixture
def figure(record_property):
    """Records a measured figure, in the report and for `pytest -s`."""

    def record(name, value):
        record_property(name, float(value))
        print(f"\n  {name}: {value:.2g}", end="")

    return record


def wide(x):
    """`x` in NumPy's float64, or in its longest float for float64."""
    x = np.asarray(x)
    if np.iscomplexobj(x):
        return x.astype(np.complex128)
    return x.astype(np.longdouble if x.dtype in (F64, np.longdouble) else F64)


def true_norm(leaves, norm="l2", axes=None):
    """The norm of all entries, or over these axes of leaves that stack trees."""
    if axes is None:
        leaves, axes = [np.ravel(wide(leaf)) for leaf in leaves], -1
    sizes = [np.abs(wide(leaf)) for leaf in leaves]
    count = sum(size[..., None].size for size in sizes) / sizes[0].max(axes).size
    powers = {"l1": 1, "l2": 2, "rms": 2, "mean_abs": 1, "lp(1.5)": 1.5, "lp(3)": 3}
    powers["average_l2"] = 2
    if norm == "linf":
        return functools.reduce(np.maximum, [size.max(axes) for size in sizes])
    total = sum((size ** powers[norm]).sum(axes) for size in sizes)
    found = (total / (count if norm in ("rms", "mean_abs") else 1)) ** (1 / powers[norm])
    return found / count if norm == "average_l2" else found


def clip_each(trees, thresholds, *, scope="tree", norm="l2", strict=False):
    """Clips many stacked trees; what is left to its default is not compiled again where given."""
    return compiled_clip_each(trees, thresholds, scope, norm, strict)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), compiler_options=AS_USERS)
def compiled_clip_each(trees, thresholds, scope, norm, strict):
    """One after another, so that `lax.cond` stays a branch."""

    def clip(tree_and_threshold):
        tree, threshold = tree_and_threshold
        return optaxclip.clip_tree(
            tree, threshold, scope=SCOPES[scope], norm=NORMS[norm], strict=strict
        )

    return lax.map(clip, (trees, thresholds))


def draw_trees(shapes, dtype=F32, decades=(-28, 36), norm="l2", *, constant=False, count=1000):
    """Stacked random trees of all sizes, fewer if large, their norms, and thresholds below them."""
    rng = np.random.default_rng(0)
    count = min(count, 1_000_000 // sum(map(math.prod, shapes)))
    scale = 10 ** rng.uniform(*decades, count)
    largest = float(jnp.finfo(dtype).max)
    trees = []
    for shape in shapes:
        entries = np.ones(shape) if constant else rng.standard_normal((count, *shape))
        entries = entries * scale.reshape(-1, *[1] * len(shape))
        trees.append(np.clip(entries, -largest, largest).astype(dtype))
    flat = [tree.reshape(count, -1) for tree in trees]
    true = true_norm(flat, norm, axes=1)
    thresholds = true * (1 - 10 ** rng.uniform(-6, 0, count)) * (1 - 1e-6)
    return trees, true, thresholds.astype(F64 if dtype == F64 else F32)


def norms_of(stacked, norm="l2"):
    """The true norms of stacked trees."""
    return true_norm([np.asarray(x).reshape(len(x), -1) for x in stacked], norm, axes=1)


# Norms accumulate in float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    [
        pytest.param(BF16, 60, 20_000, id="60 bfloat16 leaves of 20,000"),
        pytest.param(F16, 30, 50_000, id="30 float16 leaves of 50,000"),
        pytest.param(F32, 1, 10_000_000, id="10 million float32"),
        pytest.param(BF16, 200, 1000, id="200 bfloat16 leaves"),
    ],
)
def test_strict_global_norm_stays_below_threshold(dtype, count, size, figure):
    rng = np.random.default_rng(0)
    grads = [jnp.asarray(rng.standard_normal(size).astype(dtype)) for _ in range(count)]
    tx = optaxclip.clip_by_global_norm(1.0, strict=True)
    update = jax.jit(tx.update, compiler_options=AS_USERS)
    clipped, state = update(grads, tx.init(grads))

    assert state.info.norm.dtype == F32
    true, after = true_norm(grads), true_norm(clipped)
    figure("relative error of the norm", abs(float(state.info.norm) / true - 1))
    figure("norm of the result, threshold 1, strict", after)
    np.testing.assert_allclose(float(state.info.norm), true, rtol=1e-6)
    assert 0.99 < after <= 1


# With `strict` the result's norm is at most the threshold

TREES = {
    **{f"{size} entries": [(size,)] for size in (1, 2, 5, 64, 65, 3000, 10_000)},
    "1 + 3": [(), (3,)],
    "8 x 8 + 8": [(8, 8), (8,)],
    "20 x 30 + 30 + 1": [(20, 30), (30,), ()],
    "3 x 3 x 16 x 60": [(3, 3, 16, 60)],
}
NARROW = ("65 entries", "20 x 30 + 30 + 1")


def mostly_slow(columns, rows):
    """All pairs; those whose column a row does not name are slow."""
    return slow_unless(lambda column, row: column in rows[row], product(columns, rows))


DECADES = {F32: (-28, 36), BF16: (-28, 36), F16: (-2, 4)}


@pytest.mark.gpu
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("tree", "dtype"),
    mostly_slow([*TREES], {F32: TREES, BF16: NARROW, F16: NARROW}),
)
def test_threshold_figures(tree, dtype, figure):
    decades = DECADES[dtype]
    trees, true, thresholds = draw_trees(TREES[tree], dtype, decades)
    clipped, info = clip_each(trees, thresholds, strict=True)
    ratio = norms_of(clipped) / wide(thresholds)
    # Thresholds that are not so far below the entries that these underflow.
    lowest = ratio[(thresholds > 1e-3 * true) & (thresholds > 10.0 ** decades[0])].min()
    figure(f"trees above the threshold, of {ratio.size}", np.sum(ratio > 1))
    figure("1 - lowest norm to threshold", 1 - lowest)
    np.testing.assert_allclose(info.norm, true, rtol=1e-6)
    assert np.sum(ratio > 1) == 0
    assert lowest > (1 - 2e-6 if dtype == F32 else 1 - 2 * float(jnp.finfo(dtype).eps))


CONSTANT = [(shapes, "l2") for shapes in TREES.values()] + [([(1000,)], "l1")]


@pytest.mark.gpu
@pytest.mark.by_day(2)
@pytest.mark.parametrize(("shapes", "norm"), CONSTANT, ids=str)
def test_threshold_for_constant_entries(shapes, norm):
    """In which the rounding errors of a sum do not average out."""
    trees, true, thresholds = draw_trees(
        shapes, F32, DECADES[F32] if norm == "l2" else (-25, 33), norm, constant=True
    )
    clipped, info = clip_each(trees, thresholds, norm=norm, strict=True)
    np.testing.assert_allclose(info.norm, true, rtol=1e-6)
    ratio = norms_of(clipped, norm) / wide(thresholds)
    assert np.sum(ratio > 1) == 0
    assert ratio[thresholds > 1e-3 * true].min() > 1 - 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "dtype"),
    mostly_slow(["1 entries", "64 entries", "20 x 30 + 30 + 1"], {BF16: NARROW, F16: NARROW}),
)
def test_threshold_without_strict_is_kept_up_to_rounding(tree, dtype):
    shapes = TREES[tree]
    trees, _, thresholds = draw_trees(shapes, dtype, (0, 3))
    clipped, _ = clip_each(trees, thresholds)
    rounding = float(jnp.finfo(dtype).eps) / 2
    least = math.sqrt(sum(map(math.prod, shapes))) * float(jnp.finfo(dtype).smallest_subnormal)
    assert np.all(norms_of(clipped) <= thresholds * (1 + rounding) + least)


SIZES = [1, 5, 64, 65, 1000, 10_000]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("size", "norm"), mostly_slow(SIZES, {n: SIZES if n == "l2" else [1000] for n in NORMS})
)
def test_threshold_and_clipping_twice_for_every_norm(size, norm):
    trees, _, thresholds = draw_trees([(size,)], norm=norm, decades=(-25, 33))
    once, _ = clip_each(trees, thresholds, norm=norm, strict=True)
    twice, _ = clip_each(once, thresholds, norm=norm, strict=True)
    ratio = norms_of(once, norm) / wide(thresholds)
    assert np.sum(ratio > 1) == 0
    assert ratio.min() > 1 - (1e-5 if "lp" in norm else 2e-6)
    np.testing.assert_array_equal(twice[0], once[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", slow_unless(lambda size: size in (2, 65, 10_000), [1, 2, 5, 64, 65, 1000, 10_000])
)
def test_threshold_near_the_smallest_numbers(size):
    trees, _, thresholds = draw_trees([(size,)], decades=(-34, -28))
    thresholds = np.maximum(thresholds, F32(1e-35))
    clipped, _ = clip_each(trees, thresholds, strict=True)
    ratio = norms_of(clipped) / np.minimum(wide(thresholds), norms_of(trees))
    assert np.sum(ratio > 1) == 0
    assert ratio.min() > 0.9


@pytest.mark.gpu
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("scope", "shape"),
    mostly_slow(
        ["leaf", "unit", "axes", "group"],
        {(4, 3): (), (64, 2): ["unit", "axes"], (100, 100): SCOPES},
    ),
    ids=str,
)
def test_threshold_and_clipping_twice_for_every_scope(scope, shape):
    trees, _, _ = draw_trees([shape, shape], decades=(-25, 33))
    axes = {"unit": 1, "axes": 2}.get(scope, (1, 2))

    def by_group(stacked):
        return np.hstack([np.linalg.norm(wide(x), axis=axes).reshape(len(x), -1) for x in stacked])

    thresholds = (0.9 * np.median(by_group(trees), 1)).astype(F32)
    once, _ = clip_each(trees, thresholds, scope=scope, strict=True)
    twice, _ = clip_each(once, thresholds, scope=scope, strict=True)
    assert np.mean(by_group(trees) > wide(thresholds)[:, None]) > 0.4
    assert np.sum(by_group(once) > wide(thresholds)[:, None]) == 0
    np.testing.assert_array_equal(np.asarray(twice), np.asarray(once))


@pytest.mark.by_day(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [1, 5, 65, 10_000])
def test_threshold_in_float64(size):
    trees, true, thresholds = draw_trees([(size,)], F64, decades=(-250, 250))
    clipped, info = clip_each(trees, thresholds, strict=True)
    assert clipped[0].dtype == info.norm.dtype == F64
    np.testing.assert_allclose(info.norm, true.astype(F64), rtol=1e-15)
    ratio = norms_of(clipped) / thresholds
    assert np.max(ratio) <= 1
    assert np.min(ratio[thresholds > 1e-3 * true]) > 1 - 1e-14


# At or below the threshold, bit for bit


def bits(dtype):
    """Any finite numbers, subnormal ones and negative zeros too."""
    size = 8 * jnp.dtype(dtype).itemsize
    words = hnp.arrays(f"uint{size}", 7, elements=st.integers(0, 2**size - 1))
    # NumPy's own test of bfloat16 would warn of some.
    finite = np.errstate(invalid="ignore")(lambda x: np.where(np.isfinite(x), x, dtype(0)))
    return words.map(lambda word: finite(word.view(dtype)))


@pytest.mark.by_day(1)
@pytest.mark.filterwarnings("ignore:thresholds is 0")
@pytest.mark.parametrize("scope", ["tree", "unit"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
def test_below_the_threshold_nothing_changes(dtype, scope):
    @settings(max_examples=100, deadline=None)
    @given(bits(dtype))
    def check(x):
        threshold = true_norm([x]) * (1 + 1e-6)
        threshold = F32(threshold if threshold < 3.4e38 else math.inf)
        (clipped,), info = optaxclip.clip_tree([x], threshold, scope=SCOPES[scope])
        assert np.asarray(clipped).tobytes() == x.tobytes()
        # And where norm == threshold, to the last bit.
        (clipped,), _ = optaxclip.clip_tree([x], info.norm.reshape(()), scope=SCOPES[scope])
        assert np.asarray(clipped).tobytes() == x.tobytes()

    check()


# Squares that overflow or underflow

EXTREMES = [(F32, 1e-36), (F32, 3e38), (BF16, 1e-36), (BF16, 3e38), (F16, 6e-8), (F16, 6e4)]
EXTREMES += [(F64, 1e-300), (F64, 1.7e308), (np.complex64, 1e-36), (np.complex64, 2e38)]
# Norms see but real and complex entries of two widths. Large leaves are summed in another way.
RESCUED = [("l2", *extreme, repeats) for extreme in EXTREMES for repeats in (1, 2000)]
RESCUED += [
    (norm, dtype, size, 1)
    for norm in NORMS
    for dtype, size in EXTREMES
    if norm != "l2" and dtype in (F32, F64, np.complex64)
]
RESCUED += [("l1", *extreme, 2000) for extreme in EXTREMES if extreme[0] == F32]
# The means are those norms over a count.
QUICK = {True: [(norm, 1) for norm in ("l1", "l2", "linf", "lp(1.5)", "lp(3)")] + [("l2", 2000)]}
QUICK[False] = [("l2", 1)]


@functools.partial(jax.jit, static_argnames="norm", compiler_options=AS_USERS)
def normalize_and_keep(tree, norm):
    options = {"scope": SCOPES["tree"], "norm": NORMS[norm], "strict": True}
    normalized = optaxclip.clip_tree(tree, 1.0, response="normalize", **options)
    return normalized, optaxclip.clip_tree(tree, math.inf, **options)


@pytest.mark.gpu
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("norm", "dtype", "size", "repeats"),
    slow_unless(
        lambda norm, dtype, _, repeats: (norm, repeats) in QUICK[dtype == F32],
        RESCUED,
    ),
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_normalize_survives_extreme_magnitudes(norm, dtype, size, repeats):
    x = np.array([1, -1, 0.5, 0, 1, 1] * repeats) * (1 + 1j if dtype == np.complex64 else 1)
    tree = [(x * size).astype(dtype), (x[:2] * size).astype(dtype)]
    (normalized, info), (unchanged, _) = normalize_and_keep(tree, norm)
    # A norm that the dtype cannot hold is reported as the largest number that it can.
    true = min(true_norm(tree, norm), float(jnp.finfo(info.norm.dtype).max))
    np.testing.assert_allclose(info.norm, F64(true), rtol=1e-6)
    assert 1 - 16 * float(jnp.finfo(dtype).eps) < true_norm(normalized, norm) <= 1
    for new, old in zip(unchanged, tree, strict=True):
        assert np.asarray(new).tobytes() == old.tobytes()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", ["tree", "leaf", "group", "unit"])
def test_clip_on_cpu_needs_no_branches(scope):
    """On CPU; `tests/accelerators` has the others."""
    tree = [jnp.ones(9000), jnp.ones(100, BF16), jnp.ones(7000)]

    def clip(tree):
        return optaxclip.clip_tree(tree, 1.0, scope=SCOPES[scope])

    text = jax.jit(clip).lower(tree).compile().as_text()
    assert "conditional(" not in text
    assert "while(" not in text[text.index("\nENTRY") :]
