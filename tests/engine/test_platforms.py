"""Each platform's way gives the right numbers: those of GPUs and TPUs too, run here on a CPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from compiling import AS_USERS

import optaxclip
import optaxclip._backend.kernels as kernels
from optaxclip import norms, per_example, scopes
from optaxclip._engine.clip import group_norms

TREE = {
    "w": np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3),
    "b": np.linspace(0.5, 1, 5).astype(jnp.bfloat16),
    "z": np.array([3 - 4j, 0.1j], np.complex64),
    "s": np.array([0.7], np.float32),
}
SCALES = np.float32([1, 1e-25, 1e25])
"""Squares are in range, underflow, and overflow."""
SCOPES = {"tree": scopes.tree(), "leaf": scopes.leaf(), "columns": scopes.axes(0)}
NORMS = {
    "l1": ("l1", np.sum),
    "l2": ("l2", lambda x: np.sqrt(np.sum(x**2))),
    "linf": ("linf", np.max),
    "l3": (norms.lp(3), lambda x: np.sum(x**3) ** (1 / 3)),
    "rms": ("rms", lambda x: np.sqrt(np.mean(x**2))),
    "average": ("average_l2", lambda x: np.sqrt(np.sum(x**2)) / x.size),
}
CASES = list(itertools.product(SCOPES, NORMS))
# By day every norm and every scope, but not each of these with each of those.
SOME = [(scope, name) for scope, name in CASES if scope == "tree" or name == "l2"]


def at_scale(scale):
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), TREE)


def wide(tree):
    return {name: np.asarray(x, np.complex128) for name, x in tree.items()}


def truth(tree, scope, norm, threshold):
    """Each leaf, clipped in float64."""
    if scope == "tree":
        everything = np.concatenate([np.abs(x).ravel() for x in tree.values()])
        return {name: x * min(1, threshold / norm(everything)) for name, x in tree.items()}
    if scope == "leaf":
        return {name: x * min(1, threshold / norm(np.abs(x))) for name, x in tree.items()}
    clipped = {}
    for name, x in tree.items():
        columns = [
            column * min(1, threshold / norm(np.abs(column))) for column in x.T.reshape(-1, len(x))
        ]
        clipped[name] = np.stack(columns).T.reshape(x.shape)
    return clipped


@pytest.mark.by_day(1)
@pytest.mark.parametrize("cases", slow_unless(lambda cases: cases is SOME, [SOME, CASES]))
def test_platforms_clip_correctly_at_all_scales(platform, cases):
    # One after the other: `vmap` would take both branches of each.
    @jax.jit
    @functools.partial(functools.partial, jax.lax.map)
    def clip(scale):
        return {
            (scope, name): optaxclip.clip_tree(
                at_scale(scale), scale / 8, scope=SCOPES[scope], norm=NORMS[name][0]
            )[0]
            for scope, name in cases
        }

    found = jax.tree.map(np.asarray, clip(SCALES))
    for (i, scale), (scope, name) in itertools.product(enumerate(SCALES), cases):
        expected = truth(wide(at_scale(scale)), scope, NORMS[name][1], np.float64(scale) / 8)
        for leaf, x in expected.items():
            actual = found[scope, name][leaf][i].astype(np.complex128)
            rtol = 4e-3 if leaf == "b" else 2e-5
            case = f"{scope} {name} {leaf} {scale}"
            np.testing.assert_allclose(
                actual / scale, x / scale, rtol=rtol, atol=1e-6, err_msg=case
            )


@pytest.mark.by_day(1)
def test_platforms_handle_nonfinite_elements_and_derivatives(platform):
    @jax.jit
    def clip(x):
        found = {
            policy: optaxclip.clip_tree([x], 1.0, scope=scopes.axes(0), nonfinite=policy)[0][0]
            for policy in ("nan", "zero", "mask")
        }
        return found, jax.grad(lambda x: jnp.sum(jnp.sin(found_of(x))))(x[:, 1:])

    def found_of(x):
        return optaxclip.clip_tree([x], 1.0, scope=scopes.tree())[0][0]

    x = np.float32([[np.inf, 3.0], [1.0, 4.0]])
    found, derivative = clip(x)
    for policy, column in {"nan": [np.nan] * 2, "zero": [0, 0], "mask": [0, 1]}.items():
        np.testing.assert_allclose(found[policy], np.stack([column, [0.6, 0.8]], 1), rtol=3e-6)
    unit = np.array([0.6, 0.8])
    change = np.cos(unit)
    expected = (change - unit * np.dot(unit, change)) / 5
    np.testing.assert_allclose(derivative[:, 0], expected, rtol=1e-5)


@pytest.mark.by_day(1)
def test_platforms_sum_clipped_examples_correctly(platform):
    rows = np.float32([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 1.0], [3e25, 4e25]])
    found = jax.jit(
        lambda x: per_example.clip_sum({"w": x, "b": x[:, 0]}, 1.0, scope=scopes.leaf())
    )(rows)
    half = 2**-0.5
    np.testing.assert_allclose(
        found.grads["w"], [0.3 + 2 * 0.6 * half, 0.4 + 2 * 0.8 * half], rtol=3e-6
    )
    np.testing.assert_allclose(found.grads["b"], 0.3 + 2 * half, rtol=3e-6)
    assert (int(found.num_dropped), int(found.num_unclipped)) == (1, 1)


@pytest.mark.by_day(1)
def test_platforms_measure_bfloat16_columns_correctly(platform):
    """Of which a GPU sums some by themselves: where their number is a multiple of eight times 8."""
    rng = np.random.default_rng(0)
    shapes = [(64, 3), (68, 3), (8, 3), (3, 128), (2, 128, 3)]
    leaves = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    kernel = jnp.asarray(rng.normal(size=(2, 2, 64, 64)), jnp.bfloat16)
    found = jax.jit(functools.partial(group_norms, scope=scopes.unit()))(kernel)
    expected = np.sqrt(np.sum(np.asarray(kernel, np.float64) ** 2, (0, 1, 2)))
    np.testing.assert_allclose(found["leaf"], expected, rtol=1e-6)
    found = jax.jit(functools.partial(group_norms, scope=scopes.axes(0)))(leaves)
    for i, leaf in enumerate(leaves):
        expected = np.sqrt(np.sum(np.asarray(leaf, np.float64) ** 2, 0))
        np.testing.assert_allclose(found[str(i)], expected, rtol=1e-6)


def test_gpu_sums_add_equal_leaves_first(x64):
    """Small leaves that are alike, of one group, are added up before they are summed."""
    leaf = np.random.default_rng(0).normal(size=(2, 3, 64, 5)).astype(np.float32)
    cases = list(itertools.product(("l1", "l2"), [(0, 1, 2, 3), (0, 1, 2), (0, 2)], (True, False)))
    groups = np.arange(24) % 2

    @jax.jit
    def sums(leaf):
        options = {"groups": groups}
        return [
            kernels.GPU_SUMS.sums_in_float64(
                [x] * 24, norm=norms.as_norm(n), axes=[a] * 24, in_one_piece=whole, **options
            )
            for x in (leaf, leaf.astype(jnp.bfloat16))
            for n, a, whole in cases
        ]

    narrow = np.float64(jnp.asarray(leaf, jnp.bfloat16))
    rows = itertools.product((np.float64(leaf), narrow), cases)
    for found, (x, (name, axes, whole)) in zip(sums(leaf), rows, strict=True):
        expected = np.sum(np.abs(x) ** int(name[1]), axes)
        together = whole and len(axes) == 4
        assert np.count_nonzero([np.max(each) for each in found]) == (2 if together else 24)
        for group in range(2):
            total = np.sum([np.asarray(each) for each in found[group::2]], 0)
            np.testing.assert_allclose(total, 12 * expected, rtol=1e-12)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("scale", SCALES)
def test_global_norm_accepts_constant_leaves(platform, scale):
    """XLA then knows more of their squares than that of each."""

    @functools.partial(jax.jit, compiler_options=AS_USERS)
    def norms_of(c):
        each = jnp.full((30,), c), 3 * c, jax.grad(lambda x: c * jnp.sum(x))(jnp.ones((4, 25)))
        return [group_norms(x, scope=scopes.tree()) for x in each]

    found = norms_of(scale)
    np.testing.assert_allclose(np.float64(found) / scale, [30**0.5, 3, 10], rtol=1e-6)


@pytest.mark.by_day(1)
def test_column_norms_stay_correct_at_extreme_magnitudes(platform):
    """That of one complex entry is beyond it: the largest number stands for it."""
    columns = np.array([[3e38 + 3e38j, 3, 3e-30], [0, 4j, 4e-30]], np.complex64)
    found = group_norms(columns, scope=scopes.axes(0))["leaf"]
    np.testing.assert_allclose(found, [np.finfo(np.float32).max, 5, 5e-30], rtol=1e-6)
    with jax.enable_x64(True):
        found = group_norms(np.array([[3e200, 3e-200], [4e200, 4e-200]]), scope=scopes.axes(0))
    np.testing.assert_allclose(found["leaf"], [5e200, 5e-200], rtol=1e-14)


@pytest.mark.slow
@pytest.mark.usefixtures("platform")
def test_zeroed_leaf_has_zero_derivative():
    """The others have theirs, as if it were not there."""

    def total(tree, threshold, norm, strict):
        options = {"scope": scopes.leaf(), "nonfinite": "zero", "strict": strict}
        clipped, _ = optaxclip.clip_tree(tree, threshold, norm=norm, **options)
        return sum(jnp.sum(jnp.abs(x) ** 2) for x in clipped.values())

    @jax.jit
    def derivatives(bad):
        rest = {name: TREE[name] for name in ("z", "s")}
        damaged = {**rest, "w": jnp.asarray(TREE["w"]).at[1, 2].set(bad)}
        cases = [("l1", False), ("l2", False), ("l2", True)]
        trees = (damaged, rest)
        return [[jax.grad(total, (0, 1))(tree, 0.5, *case) for tree in trees] for case in cases]

    for bad in np.float32([np.inf, -np.inf, np.nan]):
        for (found, by_threshold), (expected, by_threshold_of_rest) in derivatives(bad):
            np.testing.assert_array_equal(found.pop("w"), np.zeros((4, 3)))
            for leaf, x in expected.items():
                np.testing.assert_allclose(found[leaf], x, rtol=1e-5)
            np.testing.assert_allclose(by_threshold, by_threshold_of_rest, rtol=1e-5)
