"""Statistics of a record over every kind of scope, beside NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optaxclip import monitor, scopes
from optaxclip.monitor._record import STATISTICS

STATS = tuple(STATISTICS)
OF_PARAMS = ("param_norm", "ratio", "cosine_param")
SHAPES = {"a": (3, 4, 5), "b": (7,), "c": (6, 2)}


def drawn(seed, scale=1.0, dtype=jnp.float32, zeros=0.3):
    """Leaves of which some entries are 0."""
    rng = np.random.default_rng(seed)
    sizes = {"a": 1.0, "b": 0.1, "c": 3.0}

    def leaf(name, shape):
        x = rng.normal(size=shape) * (rng.random(shape) >= zeros) * sizes[name]
        if jnp.issubdtype(dtype, jnp.complexfloating):
            x = x + 1j * rng.normal(size=shape)
        return jnp.asarray(x * scale, dtype)

    return {name: leaf(name, shape) for name, shape in SHAPES.items()}


def label(path, _):
    return "vector" if path == "b" else "matrix"


STACKED = {"a": 1, "b": 0, "c": 0}
# The scope, and the parts of a tree that belong together, under their names.
SCOPES = {
    "tree": (None, lambda x: {"tree": [x["a"], x["b"], x["c"]]}),
    "leaf": (scopes.leaf(), lambda x: {name: [leaf] for name, leaf in x.items()}),
    "layers": (
        scopes.leaf(stacked=STACKED),
        lambda x: {f"a/{i}": [x["a"][i]] for i in range(3)} | {"b": [x["b"]], "c": [x["c"]]},
    ),
    "experts": (
        scopes.leaf(stacked={"a": 2, "b": 0, "c": 0}),
        lambda x: (
            {f"a/{i}/{j}": [x["a"][i, j]] for i in range(3) for j in range(4)}
            | {"b": [x["b"]], "c": [x["c"]]}
        ),
    ),
    "group": (
        scopes.group(label),
        lambda x: {"matrix": [x["a"], x["c"]], "vector": [x["b"]]},
    ),
}
TREES = {
    "float32": (drawn(0), drawn(1, 10.0)),
    "bfloat16": (drawn(2, dtype=jnp.bfloat16), drawn(3, dtype=jnp.bfloat16)),
    "float16 beside float32": (drawn(4, 100.0, jnp.float16), drawn(5)),
    "complex64": (drawn(6, dtype=jnp.complex64), drawn(7, dtype=jnp.complex64)),
    "real beside complex64": (drawn(8), drawn(9, dtype=jnp.complex64)),
    "far down": (drawn(10, 1e-30), drawn(11, 1e-25)),
    "far up": (drawn(12, 1e30), drawn(13, 1e36)),
    "up beside down": (drawn(14, 1e18), drawn(15, 1e-18)),
    "alike": (drawn(16), jax.tree.map(lambda x: -2 * x, drawn(16))),
}
with jax.enable_x64(True):
    WIDE_TREES = {
        "float64": (drawn(17, dtype=jnp.float64), drawn(18, 10.0, jnp.float64)),
        "complex128": (drawn(19, dtype=jnp.complex128), drawn(20, dtype=jnp.complex128)),
        "float64 beside complex64": (drawn(21, dtype=jnp.float64), drawn(22, dtype=jnp.complex64)),
        "bfloat16 beside float64": (drawn(23, dtype=jnp.bfloat16), drawn(24, dtype=jnp.float64)),
        "far down in float64": (
            drawn(25, 1e-280, jnp.float64),
            drawn(26, 1e-250, jnp.float64),
        ),
        "far up in float64": (drawn(27, 1e290, jnp.float64), drawn(28, 1e300, jnp.float64)),
        "far up in complex128": (
            drawn(29, 1e300, jnp.complex128),
            drawn(30, 1e290, jnp.complex128),
        ),
    }


def reference(stat, grads, params, squares):
    """A statistic of entries `[n]` in float64, or complex128; `squares` are those of the tree."""
    norm, of_params = np.linalg.norm(grads), np.linalg.norm(params)
    return {
        "norm": lambda: norm,
        "max": lambda: np.max(np.abs(grads)),
        "mean_abs": lambda: np.mean(np.abs(grads)),
        "zero_fraction": lambda: np.mean(grads == 0),
        "share": lambda: norm**2 / squares,
        "param_norm": lambda: of_params,
        "ratio": lambda: norm / of_params,
        "cosine_param": lambda: np.real(np.vdot(params, grads)) / (norm * of_params),
    }[stat]()


def wide(leaves):
    """Entries of leaves, one after another, in a dtype in which no square leaves the range."""
    return np.concatenate([np.asarray(x).astype(np.clongdouble).ravel() for x in leaves])


RECORDS = {name: monitor.record(2, scope=scope, stats=STATS) for name, (scope, _) in SCOPES.items()}


@jax.jit
def recorded(grads, params):
    """The state of each scope after a step; trees of equal types share a program."""
    return {name: tx.update(grads, tx.init(params), params)[1] for name, tx in RECORDS.items()}


def is_as_in_numpy(state, of_tree, parts):
    """Checks all statistics of a state beside those of a tree's parts."""
    grads, params = (parts(x) for x in of_tree)
    assert monitor.history_names(state) == tuple(grads)
    squares = np.linalg.norm(wide(jax.tree.leaves(of_tree[0]))) ** 2
    for stat in STATS:
        rows = [(wide(grads[x]), wide(params[x]), squares) for x in grads]
        expected = [[reference(stat, *row) for row in rows]]
        found = monitor.history(state, stat=stat)
        assert found.shape == ((1,) if len(grads) == 1 else (1, len(grads)))
        found = found.reshape(np.shape(expected))
        # A record is in float32.
        expected = np.minimum(expected, float(jnp.finfo(jnp.float32).max)).astype(np.float32)
        close = {"rtol": 1e-6, "atol": 2e-7 if stat in ("cosine_param", "zero_fraction") else 0}
        np.testing.assert_allclose(found, expected, **close, err_msg=stat)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", TREES | WIDE_TREES)
def test_statistics_match_numpy_for_all_scopes(name):
    is_wide = name in WIDE_TREES
    of_tree = (WIDE_TREES if is_wide else TREES)[name]
    with jax.enable_x64(is_wide):
        states = recorded(*of_tree)
    for scope, (_, parts) in SCOPES.items():
        is_as_in_numpy(states[scope], of_tree, parts)


def are_cosines_right(sizes):
    tx = monitor.record(1, stats="cosine_param")
    grads, params = jnp.asarray([[3, -1, 0.5, 2], [1, 2, -3, 1.5]], sizes.dtype)

    @jax.jit
    @jax.vmap
    def cosine(size, other):
        return tx.update(size * grads, tx.init(params), other * params)[1].last["cosine_param"]

    found = cosine(np.repeat(sizes, len(sizes)), np.tile(sizes, len(sizes)))
    expected = np.dot(grads, params) / np.linalg.norm(grads) / np.linalg.norm(params)
    np.testing.assert_allclose(found, np.full(len(sizes) ** 2, expected), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_cosine_stays_exact_at_extreme_magnitudes():
    are_cosines_right(10.0 ** np.arange(-290, 291, 58))


@pytest.mark.slow
@pytest.mark.usefixtures("platform")
def test_cosine_stays_exact_on_all_platforms():
    are_cosines_right(np.float32(10) ** np.float32(range(-36, 37, 4)))


def test_cosine_never_leaves_unit_interval():
    """Along one line they are a rounding away from 1 and -1, and never beyond."""
    rng = np.random.default_rng(0)
    params = np.float32(rng.normal(size=(300, 3)))
    grads = params * np.float32(rng.uniform(0.1, 1, (300, 1)) * rng.choice([-1, 1], (300, 1)))
    tx = monitor.record(1, scope=scopes.leaf(stacked=1), stats=("cosine_param",))
    state = jax.jit(tx.update)(grads, tx.init(params), params)[1]
    found = np.abs(monitor.history(state, stat="cosine_param"))
    np.testing.assert_allclose(found, 1, rtol=1e-6)
    assert np.max(found) == 1


@pytest.mark.slow
def test_statistics_report_largest_unit_of_leaf():
    tx = monitor.record(2, scope=scopes.axes(0), stats=STATS)
    grads = {"m": jnp.array([[3.0, 0.0], [4.0, -1.0]]), "n": jnp.zeros((2, 0))}
    params = {"m": jnp.array([[3.0, 2.0], [4.0, 0.0]]), "n": jnp.zeros((2, 0))}
    state = jax.jit(tx.update)(grads, tx.init(params), params)[1]
    expected = {
        "norm": 5.0,
        "max": 4.0,
        "mean_abs": 3.5,
        "zero_fraction": 0.5,
        "share": 25 / 26,
        "param_norm": 5.0,
        "ratio": 1.0,
        "cosine_param": 1.0,
    }
    for stat in STATS:
        found = monitor.history(state, stat=stat)
        np.testing.assert_allclose(found, [[expected[stat], 0]], rtol=1e-6, err_msg=stat)
    # The largest of cosines may be below 0, and a unit that is not finite is worse than all.
    grads["m"] = jnp.array([[-3.0, 0.0], [-4.0, 0.0]])
    state = tx.update(grads, state, {"m": jnp.ones((2, 2)), "n": params["n"]})[1]
    np.testing.assert_array_equal(monitor.history(state, stat="cosine_param")[1], [0.0, 0.0])
    grads["m"] = jnp.array([[jnp.nan, 1.0], [0.0, 1.0]])
    state = tx.update(grads, state, params)[1]
    np.testing.assert_array_equal(monitor.history(state)[1], [np.nan, 0.0])


@pytest.mark.slow
def test_statistics_handle_missing_empty_and_zero_leaves():
    params = {"a": jnp.ones(2), "b": jnp.ones(3), "e": jnp.ones((0, 4)), "z": jnp.zeros(2)}
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0, 0, 0]), "e": params["e"]}
    grads |= {"z": jnp.zeros(2), "i": jnp.arange(3)}
    tx = monitor.record(4, scope=scopes.leaf(), stats=STATS)
    state = tx.init(params | {"i": jnp.arange(3)})
    update = jax.jit(tx.update)
    for missing in ({}, {"b": None}, {"b": optax.MaskedNode(), "i": None}):
        state = update(grads | missing, state, params)[1]
    assert monitor.history_names(state) == ("a", "b", "e", "z")
    nan = np.nan
    third = 1 / np.sqrt(3)
    expected = {
        "norm": ([3, 4, 0, 0], [3, nan, 0, 0]),
        "max": ([3, 4, 0, 0], [3, nan, 0, 0]),
        "mean_abs": ([1.5, 4 / 3, 0, 0], [1.5, nan, 0, 0]),
        "zero_fraction": ([0.5, 2 / 3, 0, 1], [0.5, nan, 0, 1]),
        "share": ([9 / 25, 16 / 25, 0, 0], [1, nan, 0, 0]),
        "param_norm": ([2**0.5, 3**0.5, 0, 0], [2**0.5, nan, 0, 0]),
        "ratio": ([3 / 2**0.5, 4 * third, 0, 0], [3 / 2**0.5, nan, 0, 0]),
        "cosine_param": ([0.5**0.5, third, 0, 0], [0.5**0.5, nan, 0, 0]),
    }
    for stat in STATS:
        first, other = expected[stat]
        found = monitor.history(state, stat=stat)
        np.testing.assert_allclose(found, [first, other, other], rtol=1e-6, err_msg=stat)
    tree = monitor.record(2, stats=STATS)
    empty = tree.update({}, tree.init({}), {})[1]
    found = {stat: float(x) for stat, x in empty.last.items()}
    assert found == dict.fromkeys(STATS, 0.0)


def test_statistics_report_nonfinite_gradients():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = monitor.record(4, scope=scopes.leaf(), stats=STATS)
    state, update = tx.init(params), jax.jit(tx.update)
    for bad in (jnp.inf, jnp.nan):
        state = update({"a": jnp.array([bad, 0.0]), "b": jnp.array([1.0, 1.0])}, state, params)[1]
    nan, inf, root = np.nan, np.inf, 2**0.5
    expected = {
        "norm": ([inf, root], [nan, root]),
        "max": ([inf, 1], [nan, 1]),
        "mean_abs": ([inf, 1], [nan, 1]),
        "zero_fraction": ([0.5, 0], [0.5, 0]),
        "share": ([nan, nan], [nan, nan]),
        "param_norm": ([root, root], [root, root]),
        "ratio": ([inf, 1], [nan, 1]),
        "cosine_param": ([nan, 1], [nan, 1]),
    }
    for stat in STATS:
        found = monitor.history(state, stat=stat)
        np.testing.assert_allclose(found, expected[stat], rtol=1e-6, err_msg=stat)


def test_share_survives_overflowing_and_underflowing_squares():
    """The sum of the norms, and the square of each, leave the range."""
    tx = monitor.record(2, scope=scopes.axes(-1), stats="share")
    state, update = (
        tx.init({"a": jnp.ones(1), "b": jnp.ones(1), "none": jnp.ones((0, 4))}),
        jax.jit(tx.update),
    )
    for size in (3e38, 1e-30):
        grads = {"a": jnp.full(1, size), "b": jnp.full(1, size), "none": jnp.ones((0, 4))}
        state = update(grads, state)[1]
    np.testing.assert_array_equal(monitor.history(state), [[0.5, 0.5, 0]] * 2)


@pytest.mark.slow
def test_norm_argument_changes_only_norm_statistics():
    grads, params = TREES["float32"]
    usual, other = (monitor.record(2, stats=STATS, norm=norm) for norm in ("l2", "l1"))
    ours, theirs = (
        jax.jit(tx.update)(grads, tx.init(params), params)[1].last for tx in (usual, other)
    )
    sums = [np.sum(np.abs(wide(jax.tree.leaves(x)))) for x in (grads, params)]
    for stat, expected in {
        "norm": sums[0],
        "param_norm": sums[1],
        "ratio": sums[0] / sums[1],
    }.items():
        np.testing.assert_allclose(theirs[stat], expected, rtol=1e-6)
    for stat in set(STATS) - {"norm", "param_norm", "ratio"}:
        np.testing.assert_array_equal(theirs[stat], ours[stat])


def test_statistics_accept_sparse_gradients():
    from jax.experimental.sparse import BCOO

    # Twice at one place, and once outside, which is padding.
    indices = jnp.array([[1], [1], [3], [9]])
    sparse = BCOO((jnp.array([1.0, 2.0, 4.0, 100.0]), indices), shape=(5,))
    dense, params = jnp.array([0.0, 3, 0, 4, 0]), {"w": jnp.array([1.0, 1, -2, 1, 0])}
    tx = monitor.record(2, stats=STATS)
    params["dense"] = beside = jnp.array([3.0, -1.0])
    found, expected = (
        jax.jit(tx.update)({"w": x, "dense": beside}, tx.init(params), params)[1].last
        for x in (sparse, dense)
    )
    for stat in STATS:
        np.testing.assert_allclose(found[stat], expected[stat], rtol=1e-6, err_msg=stat)


def test_cosine_accepts_sparse_params():
    from jax.experimental.sparse import BCOO

    params = BCOO((jnp.array([1.0, 2.0]), jnp.array([[1], [3]])), shape=(5,))
    tx = monitor.record(2, stats="cosine_param")
    found = jax.jit(tx.update)(jnp.arange(5.0), tx.init(params), params)[1].last
    np.testing.assert_allclose(found["cosine_param"], 7 / np.sqrt(30 * 5), rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("names", [("zero_fraction",), ("share", "ratio"), STATS])
def test_statistics_work_in_scan_and_vmap(names):
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    rng = np.random.default_rng(0)
    steps = {x: rng.normal(size=(5, *y.shape)).astype(np.float32) for x, y in params.items()}
    tx = monitor.record(3, scope=scopes.leaf(stacked={"a": 1, "b": 0}), stats=names)
    update = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(params)
    shapes = [x.shape for x in jax.tree.leaves(state)]
    for i in range(5):
        _, state = update(jax.tree.map(lambda x, i=i: x[i], steps), state, params)
    assert update._cache_size() == 1
    assert [x.shape for x in jax.tree.leaves(state)] == shapes

    @jax.jit
    def in_scan_and_vmap(steps):
        scanned, _ = jax.lax.scan(
            lambda state, grads: tx.update(grads, state, params)[::-1], tx.init(params), steps
        )
        return scanned, jax.vmap(lambda grads: tx.update(grads, tx.init(params), params)[1])(steps)

    scanned, each = in_scan_and_vmap(steps)
    for name in names:
        rows = monitor.history(state, stat=name)
        assert rows.shape == (3, 3)
        np.testing.assert_allclose(monitor.history(scanned, stat=name), rows, rtol=1e-6)
        np.testing.assert_allclose(each.last[name][2:], rows, rtol=1e-6)
