"""Clipping of singular values, beside NumPy's decomposition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import clip_by_spectral_norm, thresholds
from optaxclip.transforms.spectral import clip_matrix

MODES = ("soft", "hard")
each_mode = pytest.mark.parametrize("mode", MODES)


def exact(x, threshold, mode):
    """By the singular values, in float64."""
    wide = np.asarray(x).astype(np.result_type(x.dtype, np.float64))
    u, s, v = np.linalg.svd(wide, full_matrices=False)
    threshold = np.asarray(threshold, np.float64)[..., None]
    new = s / np.sqrt(1 + (s / threshold) ** 2) if mode == "soft" else np.minimum(s, threshold)
    return (u * new[..., None, :]) @ v


def error(found, expected):
    """The largest singular value of the difference, of that of what it should be."""
    difference = np.asarray(found).astype(expected.dtype) - expected
    largest = np.linalg.norm(expected, 2, axis=(-2, -1))
    return np.linalg.norm(difference, 2, axis=(-2, -1)) / largest


@functools.partial(jax.jit, static_argnames="mode")
def clipped(tree, threshold, mode):
    tx = clip_by_spectral_norm(threshold, mode)
    updates, state = tx.update(tree, tx.init(tree))
    return updates, state.info


def matrices(shape, conditions, seed=0):
    """Matrices whose largest singular value is 1, with these ratios of largest to smallest."""
    rng, rank = np.random.default_rng(seed), min(shape)
    for condition in conditions:
        u, v = (np.linalg.qr(rng.normal(size=(size, rank)))[0] for size in shape)
        yield ((u * np.logspace(0, -np.log10(condition), rank)) @ v.T).astype(np.float32)


A = np.float32([[3, 0, 0], [0, 4, 3]])
B = np.float32([[1, 2], [0, 2]])
PRINTED = [
    (A, 1.0, "soft", [[0.948683, 0, 0], [0, 0.784465, 0.588348]]),
    (A, 2.0, "soft", [[1.664101, 0, 0], [0, 1.485563, 1.114172]]),
    (A, 1.0, "hard", [[1, 0, 0], [0, 0.8, 0.6]]),
    (A, 2.0, "hard", [[2, 0, 0], [0, 1.6, 1.2]]),
    (B, 1.0, "soft", [[0.543425, 0.58953], [-0.24866, 0.71386]]),
    (B, 1.0, "hard", [[0.630401, 0.608251], [-0.326275, 0.771389]]),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("matrix", "threshold", "mode", "printed"), PRINTED)
def test_clip_by_spectral_norm_matches_printed_matrices(matrix, threshold, mode, printed):
    found = clipped(matrix, jnp.float32(threshold), mode)[0]
    np.testing.assert_allclose(found, printed, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("shape", [(8, 8), (6, 11), (9, 4)])
def test_every_condition_at_every_threshold(mode, shape):
    conditions, threshold_values = (
        [1, 10, 1e2, 1e3, 1e4],
        np.float32([10, 1, 0.3, 0.1, 1e-2, 1e-3, 1e-4]),
    )
    x = np.stack(list(matrices(shape, np.repeat(conditions, len(threshold_values)))))
    threshold_values = np.tile(threshold_values, len(conditions))
    found, info = jax.vmap(functools.partial(clipped, mode=mode))(x, threshold_values)
    errors = error(found, exact(x, threshold_values, mode))
    assert np.max(errors) < 1e-3
    assert np.max(errors[threshold_values >= 1e-2]) < 5e-5
    np.testing.assert_allclose(info.norm[:, 0], 1, rtol=3e-2)
    assert np.all(info.norm[:, 0] < 1 + 1e-5)


@pytest.mark.slow
@each_mode
def test_clip_by_spectral_norm_survives_extreme_magnitudes(mode):
    x, scales = B, np.float32([1e-30, 1e-10, 1, 1e18, 1e37])
    trees = jnp.asarray(x * scales[:, None, None])
    found, info = jax.vmap(functools.partial(clipped, mode=mode))(trees, scales)
    expected = exact(x, 1.0, mode)
    np.testing.assert_allclose(found / scales[:, None, None], [expected] * 5, rtol=2e-5)
    np.testing.assert_allclose(info.norm[:, 0] / scales, 2.92081, rtol=1e-4)
    # Thresholds far from the singular values: nothing is left of the one, nothing happens to the
    # other.
    for threshold, scale in ((0.0, 0.0), (1e-38, 0.0), (1e38, 1.0), (np.inf, 1.0), (-1.0, 0.0)):
        found = clipped(x, jnp.float32(threshold), mode)[0]
        np.testing.assert_allclose(found, scale * x, rtol=1e-6, atol=1e-11)
    assert np.all(np.isnan(clipped(x, jnp.float32(jnp.nan), mode)[0]))


def test_clip_by_spectral_norm_multiplies_along_shorter_side():
    tx = clip_by_spectral_norm(1.0)
    for shape in (4, 100), (100, 4):
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
        program = str(jax.make_jaxpr(tx.update)(leaf, jax.eval_shape(tx.init, leaf)))
        assert "4,4]" in program
        assert "100,100]" not in program


@pytest.mark.slow
@each_mode
def test_a_threshold_that_underflows_beside_the_matrix(mode):
    x = np.random.default_rng(0).normal(size=(24, 16))
    beyond = np.array(
        [[3e38, 3e38], [-3e38, 3e38]]
    )  # its singular values are no numbers of float32
    for large in (1e37 * x, 1e37 * x[:1], 1e37 * x[:, :1], beyond):
        with jax.debug_nans(True):
            found = clipped(jnp.asarray(large, jnp.float32), jnp.float32(1.0), mode)[0]
        np.testing.assert_allclose(found, exact(large, 1.0, mode), rtol=1e-3, atol=1e-4)


def test_spectral_norm_beyond_range_saturates():
    x = jnp.float32([[3e38, 3e38], [-3e38, 3e38]])
    assert clipped(x, jnp.float32(1.0), "soft")[1].norm == np.finfo(np.float32).max


@pytest.mark.slow
def test_hard_leaves_alone_what_has_nothing_above_the_threshold():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 7, 5)).astype(np.float32)
    largest = np.linalg.norm(x, 2, axis=(1, 2))
    found, info = jax.vmap(functools.partial(clipped, mode="hard"))(x, largest * 1.01)
    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(info.num_clipped, 0)
    found, info = jax.vmap(functools.partial(clipped, mode="hard"))(x, largest * 0.9)
    np.testing.assert_array_equal(info.num_clipped, 1)
    assert np.all(np.linalg.norm(found, 2, axis=(1, 2)) < largest * 0.9 * (1 + 1e-5))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("below", [0.0, 1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize("shape", [(5, 5), (64, 40)])
def test_hard_leaves_alone_what_is_at_the_threshold_or_just_below(shape, below):
    x = np.stack([*matrices(shape, [1, 1.0001, 1.001, 10]), np.eye(*shape, dtype="f")])
    # Rounded up, as the threshold must not be below the largest singular value.
    largest = np.linalg.norm(x.astype(np.float64), 2, axis=(1, 2)) / (1 - below)
    threshold_values = np.nextafter(largest.astype(np.float32), np.float32(2))
    found, _ = jax.vmap(functools.partial(clipped, mode="hard"))(x, threshold_values)
    np.testing.assert_array_equal(found, x)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [4, 40])
def test_what_is_at_the_threshold_hides_nothing_above(size):
    # A block whose singular values are 1, beside one of a single singular value above.
    above = np.full((size, size), 1.0, np.float32) / size
    for ratio in (1.0001, 1.01, 3.0):
        x = np.block(
            [[np.eye(size), np.zeros((size, size))], [np.zeros((size, size)), ratio * above]]
        )
        found, _ = clipped(x.astype(np.float32), jnp.float32(1), "hard")
        assert np.linalg.norm(np.float64(found), 2) < 1 + 5e-5
        assert error(found, exact(x, 1.0, "hard")) < 5e-5


def test_spectral_norm_measures_largest_block():
    x = np.zeros((80, 80), np.float32)
    x[:40, :40], x[40:, 40:] = np.eye(40), 3 / 40
    np.testing.assert_allclose(clipped(x, jnp.float32(9), "soft")[1].norm, 3, rtol=3e-2)


@pytest.mark.by_day(1)
@each_mode
def test_clip_by_spectral_norm_accepts_all_shapes(mode):
    rng = np.random.default_rng(0)
    shapes = {"scalar": (), "vector": (6,), "row": (1, 6), "column": (6, 1), "conv": (2, 1, 2, 3)}
    tree = {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    tree |= {"zero": np.zeros((3, 4), "f"), "empty": np.zeros((0, 3), "f")}
    tree["rank one"] = np.float32([[3, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]])
    updates, info = clipped(tree, jnp.float32(0.5), mode)
    norms, factors = (dict(zip(info.names, x, strict=True)) for x in (info.norm, info.factor))
    for name in (*shapes, "rank one"):
        x = tree[name].reshape(4, 3) if name == "conv" else np.atleast_2d(tree[name])
        norm = np.linalg.norm(x, 2)
        new = min(norm, 0.5) if mode == "hard" else norm / np.hypot(1, norm / 0.5)
        np.testing.assert_allclose(norms[name], norm, rtol=1e-5)
        np.testing.assert_allclose(factors[name], new / norm, rtol=1e-5)
        if name in ("scalar", "vector", "row", "column"):
            # A clip by the norm, which is right to rounding.
            np.testing.assert_allclose(np.linalg.norm(np.float64(updates[name])), new, rtol=2.4e-7)
        assert error(np.reshape(updates[name], x.shape), exact(x, 0.5, mode)) < 1e-5
    np.testing.assert_array_equal(updates["zero"], 0)
    assert [norms[name] for name in ("empty", "zero")] == [0, 0]
    assert [factors[name] for name in ("empty", "zero")] == [1, 1]


def test_vectors_at_or_below_the_threshold_come_back():
    x = np.float32([3, 4])
    np.testing.assert_array_equal(clipped(x, jnp.float32(5), "hard")[0], x)


@pytest.mark.slow
@each_mode
def test_clip_by_spectral_norm_clips_stacked_layers_separately(mode):
    x = np.stack(list(matrices((5, 4), [10, 100, 1000])))
    tree = {"layers": x * np.float32([1, 0.1, 4])[:, None, None], "bias": np.ones((3, 2), "f")}
    tx = clip_by_spectral_norm(0.3, mode, stacked=1)
    updates, state = tx.update(tree, tx.init(tree))
    assert np.max(error(updates["layers"], exact(tree["layers"], 0.3, mode))) < 1e-5
    assert list(state.info.names)[3:] == ["layers/0", "layers/1", "layers/2"]
    np.testing.assert_allclose(state.info.norm[3:], [1, 0.1, 4], rtol=1e-2)
    np.testing.assert_array_equal(state.info.num_clipped, [1, 1, 1, 1, 0, 1])


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("float16", "float64", "complex128")]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", *SLOW])
def test_clip_by_spectral_norm_keeps_dtypes(dtype):
    with jax.enable_x64(dtype in ("float64", "complex128")):
        x = next(matrices((5, 4), [100])).astype(np.float64)
        x = jnp.asarray(x + 1j * x[::-1] if "complex" in dtype else x).astype(dtype)
        found = clip_by_spectral_norm(0.1, "hard").update(x, None)[0]
        assert found.dtype == dtype
        digits = {"bfloat16": 1e-2, "float16": 1e-3}.get(dtype, 1e-5)
        assert error(found, exact(x, 0.1, "hard")) < digits


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_clip_by_spectral_norm_applies_nonfinite_policies(bad):
    tree = {"w": np.float32([[3, 4], [bad, 0]]), "v": np.float32([bad, 1]), "ok": np.ones(1, "f")}
    for policy, value in (("nan", np.nan), ("zero", 0), ("mask", None)):
        tx = clip_by_spectral_norm(1.0, nonfinite=policy)
        updates, state = tx.update(tree, tx.init(tree))
        np.testing.assert_allclose(updates["ok"], np.sqrt(0.5), rtol=2e-6)
        np.testing.assert_array_equal(state.info.num_nonfinite, [0, 1, 1])
        if policy == "mask":
            new = 1 / np.sqrt(1 + 1 / 25)
            np.testing.assert_allclose(updates["w"], [[0.6 * new, 0.8 * new], [0, 0]], rtol=1e-5)
            np.testing.assert_allclose(updates["v"], [0, np.sqrt(0.5)], rtol=1e-5)
        else:
            np.testing.assert_array_equal(state.info.norm[1:], [abs(bad)] * 2)
            for name in "wv":
                np.testing.assert_array_equal(updates[name], np.full_like(tree[name], value))


def test_clip_by_spectral_norm_reports_leaf_to_checkify():
    tx = clip_by_spectral_norm(1.0, nonfinite="error")
    error, _ = checkify.checkify(jax.jit(lambda x: tx.update(x, None)[0]))({"w": B * np.nan})
    message = "the gradient norm is NaN or infinite for the leaves w"
    assert f"clip_by_spectral_norm: {message}" in error.get()


def test_clip_by_spectral_norm_derivatives_match_finite_differences():
    mode = "hard"  # with all that "soft" does
    x = np.float32([[1, 2, 0.5], [0, 2, -1]])
    weights = np.random.default_rng(0).normal(size=x.shape)

    def value(x, threshold):
        return jnp.sum(
            clip_by_spectral_norm(threshold, mode).update(x, None)[0] * jnp.float32(weights)
        )

    found, by_threshold = jax.jit(jax.grad(value, (0, 1)))(x, jnp.float32(1.5))
    step = 1e-6

    def plain(x, threshold):
        return np.sum(exact(x, threshold, mode) * weights)

    expected = [
        plain(x + step * d.reshape(2, 3), 1.5) - plain(x - step * d.reshape(2, 3), 1.5)
        for d in np.eye(6)
    ]
    np.testing.assert_allclose(found.ravel(), np.array(expected) / (2 * step), atol=2e-4)
    threshold_values = [plain(x.astype(np.float64), 1.5 + sign * step) for sign in (1, -1)]
    np.testing.assert_allclose(
        by_threshold, (threshold_values[0] - threshold_values[1]) / (2 * step), atol=2e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind"),
    [("hard", "Auto"), pytest.param("soft", "Explicit", marks=pytest.mark.slow)],
)
def test_clip_by_spectral_norm_accepts_sharded_matrices(mode, kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)
    specs = {"w": P("a", "b"), "s": P("a", None, "b"), "v": P("b")}
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 6), "s": (4, 3, 4), "v": (6,)}
    tree = {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    tx = clip_by_spectral_norm(0.7, mode, stacked={"w": 0, "s": 1, "v": 0}, iterations=4)
    expected, state = tx.update(tree, tx.init(tree))
    split = {x: jax.device_put(tree[x], NamedSharding(mesh, specs[x])) for x in tree}
    with jax.set_mesh(mesh):
        updates, new_state = jax.jit(tx.update)(split, tx.init(split))
    for name in tree:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-4, atol=1e-6)
        assert updates[name].sharding.is_equivalent_to(split[name].sharding, tree[name].ndim)
    np.testing.assert_allclose(new_state.info.norm, state.info.norm, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_spectral_nan_on_single_device_affects_whole_matrix(kind):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(getattr(AxisType, kind),))
    tree = {"w": np.ones((8, 2), "f"), "inf": np.ones((8, 2), "f")}
    tree["w"][2], tree["inf"][3] = np.nan, np.inf
    split = jax.device_put(tree, NamedSharding(mesh, P("a")))
    made = {x: clip_by_spectral_norm(1.0, "hard", nonfinite=x) for x in ("nan", "zero")}
    with jax.set_mesh(mesh):
        states = {x: tx.init(split) for x, tx in made.items()}
        found = jax.jit(lambda x, s: {p: made[p].update(x, s[p]) for p in made})(split, states)
    for policy, (updates, state) in found.items():
        np.testing.assert_array_equal(state.info.num_nonfinite, [1, 1])
        np.testing.assert_array_equal(state.info.norm, [np.inf, np.nan])
        for x in updates.values():
            np.testing.assert_array_equal(x, np.full((8, 2), 0 if policy == "zero" else np.nan))


def test_clip_by_spectral_norm_rejects_matrix_shards():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    tx, x = clip_by_spectral_norm(1.0), jnp.ones((4, 4))

    def inside(spec, checked):
        def clip(x):
            return tx.update(x, None)[0]

        in_shards = jax.shard_map(clip, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked)
        return jax.eval_shape(in_shards, x)

    with pytest.raises(
        ValueError,
        match=r"must not be sharded .*, but is sharded along .*; gather it with jax.lax.all_gather",
    ):
        inside(P("a"), True)
    with pytest.raises(ValueError, match="specs or axis_name is required inside pmap"):
        inside(P(), False)
    assert inside(P(), True).shape == x.shape


def test_clip_by_spectral_norm_accepts_rule_per_matrix():
    rng = np.random.default_rng(0)
    steps = [
        {"s": np.float32(rng.normal(size=(2, 4, 3)) * size), "w": np.float32(A / size)}
        for size in np.exp(rng.normal(size=6))
    ]
    rule = thresholds.ema(0.5, 0.9, patience=None, floor=0.0)
    clip = clip_by_spectral_norm(rule, "hard", stacked={"s": 1, "w": 0})
    state, update, infos = clip.init(steps[0]), jax.jit(clip.update), []
    for step in steps:
        updates, state = update(step, state)
        infos.append(state.info)
        pairs = zip([*step["s"], step["w"]], [*updates["s"], updates["w"]], strict=True)
        for threshold, (matrix, found) in zip(state.info.threshold, pairs, strict=True):
            np.testing.assert_allclose(
                found, exact(matrix, threshold, "hard"), atol=2e-3 * threshold
            )
    norms, threshold_values = (
        np.transpose([getattr(x, n) for x in infos]) for n in ("norm", "threshold")
    )
    largest = [[*np.linalg.norm(x["s"], 2, axis=(1, 2)), np.linalg.norm(x["w"], 2)] for x in steps]
    shares = norms / np.transpose(largest)
    assert np.all((shares > 0.85) & (shares < 1 + 1e-5))
    for of_matrix, found in zip(norms, threshold_values, strict=True):
        average = None  # of norms after their clip; the first is compared with itself
        for norm, threshold in zip(of_matrix, found, strict=True):
            np.testing.assert_allclose(
                threshold, 0.9 * (norm if average is None else average), rtol=1e-5
            )
            kept = min(norm, threshold)
            average = kept if average is None else (average + kept) / 2


def test_clip_by_spectral_norm_rejects_sparse_leaves():
    with pytest.raises(
        TypeError, match=r"leaf 'w' .* must be dense, but is a BCOO array; pass leaf\.todense"
    ):
        clip_by_spectral_norm(1.0).update(
            {"w": BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 2))}, None
        )


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_clip_by_spectral_norm_uses_highest_precision(platform):
    traced = jax.jit(clip_by_spectral_norm(1.0).update).trace(jnp.ones((8, 8)), None)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_clipped_matrix_reaches_any_threshold(mode):
    """The iterations take no smaller or larger threshold than 1e-7 and 1e6 largest values."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    run = jax.jit(functools.partial(clip_matrix, mode=mode, iterations=20))
    for threshold, value in ((1e-9, 1e-9), (1e-30, 1e-30), (1e12, None)):
        found = run(x, jnp.float32(threshold))
        if value is None:
            np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)
        else:
            singular = np.linalg.svd(np.float64(found), compute_uv=False)
            np.testing.assert_allclose(singular, value, rtol=1e-3)
