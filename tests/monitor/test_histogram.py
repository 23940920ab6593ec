"""Histograms have the counts of NumPy in float64, and say what other number formats lose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P

import optaxclip._backend.exponent_counts as exponent_counts
from optaxclip import monitor, scopes
from optaxclip._base.float_formats import OVERFLOW_EDGES, overflow_threshold

SATURATING = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
FORMATS = [
    name
    for name in dir(jnp)
    if name.startswith(("float", "bfloat")) and isinstance(getattr(jnp, name), type(jnp.float32))
]
FORMATS = [jnp.dtype(name) for name in FORMATS if name not in ("float_", "float8_e8m0fnu")]


def entries_of(dtype, seed=0):
    """Entries of all sizes that a format has, with the ends of other formats and all powers."""
    rng, info = np.random.default_rng(seed), jnp.finfo(dtype)
    low, high = np.log2(float(info.smallest_subnormal)) - 1, np.log2(float(info.max))
    ends = np.array([x.value for x in OVERFLOW_EDGES])
    with np.errstate(all="ignore"):
        sizes = np.concatenate(
            [
                2.0 ** rng.uniform(low, high, 4000),
                2.0 ** np.arange(np.ceil(low), high),
                *(np.nextafter(ends, to) for to in (0, np.inf)),
                *(np.nextafter(ends.astype(np.float32), np.float32(to)) for to in (0, np.inf)),
                ends,
                [0, -0.0, np.inf, -np.inf, np.nan],
            ]
        )
        return (sizes * rng.choice([-1, 1], len(sizes))).astype(dtype)


def moduli(x):
    with np.errstate(invalid="ignore"):
        return np.abs(x.astype(np.float64))


def assert_counts(found, sizes):
    finite = sizes[np.isfinite(sizes) & (sizes > 0)]
    bins = np.searchsorted(found.edges, finite, side="left") - 1
    np.testing.assert_array_equal(found.counts, np.bincount(bins, minlength=len(found.counts)))
    assert found.num_zero == np.sum(sizes == 0)
    assert found.num_nonfinite == np.sum(~np.isfinite(sizes))
    assert found.num_nan == np.sum(np.isnan(sizes))


def histograms_of(tree, **options):
    tx = monitor.histogram(**options)
    return monitor.histograms(jax.jit(lambda x: tx.update(x, tx.init(x))[1])(tree))


NARROW = [dtype for dtype in FORMATS if dtype != np.float64 and dtype.name not in SATURATING[1:]]


@pytest.mark.gpu
def test_histogram_fractions_match_casts():
    tree = {dtype.name: entries_of(dtype) for dtype in NARROW}
    found = histograms_of(jax.tree.map(jnp.asarray, tree))
    for name, x in tree.items():
        sizes = moduli(x)
        assert_counts(found[name], sizes)
        finite = sizes[np.isfinite(sizes) & (sizes > 0)]
        for dtype in FORMATS:
            with np.errstate(over="ignore"):
                cast = finite.astype(dtype).astype(np.float64)
            assert found[name].underflow_fraction(dtype) == np.mean(cast == 0), (name, dtype)
            lost = ~np.isfinite(cast)
            if dtype.name in SATURATING:
                lost = finite >= overflow_threshold(dtype)
            assert found[name].overflow_fraction(dtype) == np.mean(lost), (name, dtype)


def test_histogram_counts_at_given_interval():
    tx = monitor.histogram(3, scope=scopes.tree())

    def step(state, x):
        return tx.update(x, state)[1], state

    xs = jnp.asarray(np.repeat(2.0 ** np.arange(8)[:, None], 5, axis=1), jnp.float32)
    _, states = jax.jit(lambda xs: jax.lax.scan(step, tx.init(xs[0]), xs))(xs)
    for i, (last, size) in enumerate([(-1, None), *3 * [(0, 1)], *3 * [(3, 8)], (6, 64)]):
        found = monitor.histograms(jax.tree.map(lambda x, i=i: x[i], states))["tree"]
        assert found.step == last
        upper = [] if size is None else [size] * 5
        np.testing.assert_array_equal(np.repeat(found.edges[1:], found.counts), upper)


@pytest.mark.gpu
def test_histogram_counts_complex_elements_by_modulus():
    rng = np.random.default_rng(1)
    parts = 2.0 ** rng.uniform(-150, 128, (2, 4000)) * rng.choice([-1, 0, 1], (2, 4000))
    with np.errstate(over="ignore"):
        x = (parts[0] + 1j * parts[1]).astype(np.complex64)
    x[:4] = 3e38 + 3e38j, 1e-45 + 1e-45j, complex(np.inf, 1), complex(0, np.nan)
    sizes = np.abs(x.astype(np.complex128)).astype(np.float64)
    largest = float(jnp.finfo(jnp.float32).max)
    sizes = np.where(np.isfinite(sizes), np.minimum(sizes, largest), sizes)
    assert_counts(histograms_of({"x": jnp.asarray(x)})["x"], np.float64(np.float32(sizes)))


def test_histogram_counts_float64_leaves():
    with jax.enable_x64(True):
        tree = {x: entries_of(x) for x in ("float64", "float32", "float16")}
        parts = 2.0 ** np.random.default_rng(2).uniform(-1074, 1023, (2, 4000))
        found = histograms_of(jax.tree.map(jnp.asarray, tree | {"x": parts[0] + 1j * parts[1]}))
        for name, x in tree.items():
            assert_counts(found[name], moduli(x))
            sizes = moduli(x)[np.isfinite(moduli(x)) & (x != 0)]
            assert found[name].overflow_fraction(jnp.float32) == np.mean(
                sizes >= 2.0**128 - 2.0**103
            )
            assert found[name].underflow_fraction(jnp.float32) == np.mean(sizes <= 2.0**-150)
        assert_counts(found["x"], np.hypot(*parts))
        tx = monitor.histogram()
        state = tx.init({"x": jnp.ones(2, jnp.float32)})
        with pytest.raises(ValueError, match="float64 leaves"):
            tx.update({"x": jnp.ones(2, jnp.float64)}, state)


def test_histogram_counts_dense_values_of_sparse_leaves():
    indices = jnp.array([[1], [4], [1], [9]])  # the last is padding
    x = sparse.BCOO((jnp.array([3.0, -0.5, 2.0, 7.0]), indices), shape=(6,))
    assert_counts(histograms_of({"x": x})["x"], moduli(np.array([0, 5, 0, 0, -0.5, 0])))


@pytest.mark.gpu
def test_histogram_adds_counts_beyond_32_bits(monkeypatch):
    """Each leaf is taken for one of three thousand million entries, of which all but two are 0."""
    zeros = 3_000_000_000

    def many(leaf, axes, size, **options):
        counts = np.zeros(exponent_counts.num_counts(wide=False), np.uint64)
        counts[[0, 1, -1]] = zeros, 70_000, 2
        return jnp.asarray(np.stack([counts & 0xFFFF, counts >> 16]), jnp.uint32)

    monkeypatch.setattr(exponent_counts, "counts_by_size", many)
    tx, tree = monitor.histogram(scope=scopes.tree()), {name: jnp.ones(4) for name in "abc"}

    def count(tree):
        return tx.update(tree, tx.init(tree))[1]

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"a": P("x"), "b": P("x"), "c": P()}
    tree |= {name: jnp.ones(32) for name in "ab"}
    mapped = jax.shard_map(count, mesh=mesh, in_specs=(specs,), out_specs=P())
    found = monitor.histograms(jax.jit(mapped)(tree))["tree"]
    parts = 8 + 8 + 1
    assert (found.num_zero, found.num_nan) == (parts * zeros, parts * 2)
    assert found.counts.sum() == parts * 70_000


def test_histogram_counts_large_leaves_in_64_bits():
    tx = monitor.histogram()

    def count(x):
        return tx.update(x, tx.init(x))[1]

    for size, is_wide in ((5_000_000_000, True), (2_000_000_000, False)):
        leaf = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
        assert jax.eval_shape(count, leaf).counts.shape == (1, 2, 291)
        assert ("u64[" in str(jax.make_jaxpr(count)(leaf))) == is_wide


def test_histogram_counts_large_leaves_in_chunks(monkeypatch):
    monkeypatch.setattr(exponent_counts, "CHUNK_SIZE", 300)
    x = entries_of(np.float32, seed=4)[:3000].reshape(3, 25, 40)
    tree = {"whole": x, "rows": x.reshape(3, -1), "each": x[0, 0].repeat(10)}
    found = histograms_of(tree, scope=scopes.leaf(stacked={"whole": 0, "rows": 1, "each": 1}))
    assert_counts(found["whole"], moduli(x))
    for i in range(3):
        assert_counts(found[f"rows/{i}"], moduli(x[i]))
    each = [histogram for name, histogram in found.items() if name.startswith("each/")]
    for entry, histogram in zip(moduli(tree["each"]), each, strict=True):
        assert_counts(histogram, entry[None])


def test_histogram_under_vmap_counts_only_selected_seeds():
    tx, seeds = monitor.histogram(2), {"w": jnp.ones((3, 4))}
    states = jax.vmap(tx.init)(seeds)
    update = jax.vmap(lambda grads, state: tx.update(grads, state)[1])
    outside = str(jax.make_jaxpr(update)(seeds, states)).split("while")[-1]
    assert "cond_jaxpr" in outside
    states = states._replace(steps=jnp.array([1, 2, 3], jnp.int32))
    states = states._replace(last_counted_step=jnp.array([0, 0, 2], jnp.int32))
    states = jax.jit(update)(seeds, states)
    np.testing.assert_array_equal(states.last_counted_step, [0, 2, 2])
    np.testing.assert_array_equal(np.sum(states.counts, (1, 2, 3)), [0, 4, 0])


@pytest.mark.gpu
def test_histogram_counts_params_by_leaf():
    tx = monitor.histogram(of="params")
    params = {"a": jnp.array([1.0, 3.0]), "b": jnp.array([0.5])}
    bad = {"a": jnp.array([jnp.nan, jnp.inf]), "b": params["b"]}
    step = jax.jit(lambda params: tx.update(params, tx.init(params), params)[1])
    one, other = monitor.histograms(step(params)), monitor.histograms(step(bad))
    np.testing.assert_array_equal(np.repeat(one["a"].edges[1:], one["a"].counts), [1.0, 4.0])
    assert other["a"].num_nonfinite == 2
    np.testing.assert_array_equal(one["b"].counts, other["b"].counts)


def test_histogram_inside_multi_steps_counts_mean():
    tx = optax.MultiSteps(optax.chain(monitor.histogram(1), optax.sgd(1.0)), 2)
    step = jax.jit(lambda grads, state: tx.update(grads, state, grads)[1], donate_argnums=1)
    state = tx.init(jnp.ones(3))
    for size, expected in ((1.0, []), (7.0, [4.0] * 3), (9.0, [4.0] * 3)):
        with jax.numpy_dtype_promotion("standard"):
            state = step(jnp.full(3, size), state)
        found = next(iter(monitor.histograms(state).values()))
        np.testing.assert_array_equal(np.repeat(found.edges[1:], found.counts), expected)


def test_histogram_metrics_contain_exponents_and_counts():
    tx = monitor.histogram(scope=scopes.group({"a": "x", "b": "y"}))
    grads = {"a": jnp.array([0.0, 3.0, 5.0, 6.0]), "b": jnp.array([0.25, jnp.inf, jnp.nan])}
    state = tx.init(grads)
    assert np.isnan(monitor.scalars(state)["histogram/median_exponent/x"])
    state = jax.jit(tx.update)(grads, state)[1]
    expected = {
        "median_exponent": (2, -3),
        "zero_fraction": (0.25, 0),
        "num_infinite": (0, 1),
        "num_nan": (0, 1),
    }
    for found in (monitor.scalars(state), jax.jit(monitor.metrics)(state)):
        for name, values in expected.items():
            assert [found[f"histogram/{name}/{x}"] for x in "xy"] == [*values], name
    whole = monitor.histogram()
    found = monitor.scalars(jax.jit(whole.update)(grads, whole.init(grads))[1])
    assert found["histogram/median_exponent"] == 1
    assert found["histogram/num_nan"] == 1
    sizes = {"x": 1.5 * 2.0 ** np.repeat([-9, -3, 2, 7], [4, 1, 94, 1])}
    found = monitor.scalars(jax.jit(whole.update)(sizes, whole.init(sizes))[1])
    assert [found[f"histogram/{x}_exponent"] for x in ("low", "median", "high")] == [-3, 2, 2]


def test_dtype_fit_finds_scales_without_loss():
    """The scales are those at which casts lose at most the allowed share, and overflow nothing."""
    sizes = {"small": np.random.default_rng(3).uniform(-32, -18, 5000), "large": [-3.0, 5.5]}
    tree = {name: np.float32(2.0 ** np.asarray(x)) for name, x in sizes.items()}
    tx = monitor.histogram()
    state = jax.jit(lambda x: tx.update(x, tx.init(x))[1])(tree)
    fit = monitor.dtype_fit(state, jnp.float16, max_lost_fraction=0.01)
    for name, x in tree.items():
        of_group = fit.groups[name]
        for scale, most in ((of_group.lowest, 0.01), (of_group.lowest / 2, 1)):
            lost = np.mean((x * scale).astype(np.float16) == 0)
            assert lost <= most
        assert name == "large" or lost > 0.01
        assert np.isfinite((x * of_group.highest).astype(np.float16)).all()
        with np.errstate(over="ignore"):
            assert not np.isfinite((x * of_group.highest * 4).astype(np.float16)).all()
    assert fit.poor_fits == ()
    assert fit.lowest <= fit.loss_scale <= fit.highest
    assert monitor.dtype_fit(state, jnp.float8_e4m3fn).poor_fits == ("small",)
    assert "does not fit" in str(monitor.dtype_fit(state, jnp.float8_e4m3fn))
    assert monitor.dtype_fit(state, jnp.bfloat16).loss_scale == 1
    assert monitor.dtype_fit(tx.init(tree)).loss_scale == 1


def test_histogram_steps_wrap_by_whole_periods():
    tx = monitor.histogram(3, scope=scopes.tree())
    start = 2**31 - 4
    state = tx.init(jnp.ones(2))._replace(
        steps=jnp.int32(start), last_counted_step=jnp.int32(start - 1)
    )
    counted, update = [], jax.jit(tx.update)
    for _ in range(8):
        before, state = int(state.steps), update(jnp.ones(2), state)[1]
        counted.append(int(state.last_counted_step) == before)
    first = -start % 3
    assert counted == [i % 3 == first for i in range(8)]


def test_histogram_of_nothing_has_no_nan():
    tx = monitor.histogram()
    numbers = monitor.scalars(tx.update({}, tx.init({}))[1])
    assert list(numbers.values()) == [0, 0, 0, 1]
    grads = {"w": jnp.zeros((0, 2))}
    state = tx.init(grads)
    assert np.isnan(monitor.scalars(state)["histogram/zero_fraction"])
    assert monitor.scalars(tx.update(grads, state)[1])["histogram/zero_fraction"] == 0


def test_histogram_of_wider_params_is_refused(x64):
    tx = monitor.histogram(of="params")
    narrow, wide = jnp.ones(3, jnp.float32), jnp.ones(3, jnp.float64)
    with pytest.raises(
        ValueError, match="the params have float64 leaves, but the params passed to init had none"
    ):
        tx.update(narrow, tx.init(narrow), wide)
    found = monitor.histograms(tx.update(narrow, tx.init(wide), wide)[1])["leaf"]
    # Nothing is too large for float64, whose bins end at infinity.
    assert (found.overflow_fraction(np.float64), found.underflow_fraction(float)) == (0, 0)


def test_histogram_moduli_at_upper_end():
    x = np.complex64([complex(np.inf, 1), complex(2.0**64, 2.0**64), complex(2.0**64, 1)])
    found = histograms_of({"x": jnp.asarray(x)})["x"]
    assert_counts(found, np.abs(x.astype(np.complex128)).astype(np.float32).astype(np.float64))


def fit(counts, dtype=jnp.float16, **options):
    tx = monitor.histogram()
    x = jnp.asarray(np.repeat([*counts], [*counts.values()]), jnp.float32)
    return monitor.dtype_fit(tx.update(x, tx.init(x))[1], dtype, **options)


def test_dtype_fit_allows_exactly_the_share():
    counts = {2.0**-40: 1, 2.0**-10: 3}
    assert fit(counts, max_lost_fraction=0.25).lowest < fit(counts, max_lost_fraction=0.2).lowest


def test_dtype_fit_needs_no_scale_at_ends():
    least = {2.0**-24: 1}
    assert (fit(least).lowest, fit(least).loss_scale) == (1, 1)
    most = {2.0**15: 1, 2.0**-20: 1}
    assert (fit(most).highest, fit(most).loss_scale) == (1, 1)


@pytest.mark.parametrize("dtype", [np.float64, float, "float64"])
def test_dtype_fit_of_float64_needs_no_scale(dtype):
    assert fit({2.0**-140: 1, 1e30: 1}, dtype).loss_scale == 1


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (None, TypeError, "dtype must be a numeric dtype.*got None"),
        (3, TypeError, "dtype must be a numeric dtype.*got 3"),
        ("float17", ValueError, "dtype must be the name of a numeric dtype.*'float17'"),
        (jnp.int8, ValueError, "dtype must be a real floating-point dtype.*int8"),
        (jnp.complex64, ValueError, "dtype must be a real floating-point dtype.*complex64"),
        (jnp.float8_e8m0fnu, ValueError, "dtype must be signed and able to represent zero"),
    ],
)
def test_dtype_fit_refuses_other_types(dtype, error, message):
    with pytest.raises(error, match=message):
        fit({1.0: 1}, dtype)
    found = histograms_of({"x": jnp.ones(2)})["x"]
    for share in (found.overflow_fraction, found.underflow_fraction):
        with pytest.raises(error, match=message):
            share(dtype)
