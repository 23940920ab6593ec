"""Derivatives through every clip: right where it is smooth, finite where it is not."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax.experimental import checkify

import optaxclip
from optaxclip import norms, scopes

NORMS = {
    "l1": "l1",
    "l2": "l2",
    "linf": "linf",
    "rms": "rms",
    "mean_abs": "mean_abs",
    "average_l2": "average_l2",
    "lp(1.5)": norms.lp(1.5),
    "lp(3)": norms.lp(3),
}
SCOPES = {
    "tree": scopes.tree(),
    "leaf": scopes.leaf(),
    "unit": scopes.unit(),
    "axes": scopes.axes(-1),
    "group": scopes.group({"w": "weights", "b": "biases"}),
}
# Every norm, every scope and every response; compiling all their combinations would take minutes.
COMBINATIONS = [
    *[("tree", norm, "clip") for norm in ("l1", "l2", "linf", "lp(1.5)", "average_l2")],
    ("tree", "l2", "smooth"),
    ("leaf", "mean_abs", "normalize"),
    ("group", "rms", "clip"),
    ("unit", "l2", "clip"),
    ("unit", "l1", "smooth"),
    ("axes", "lp(3)", "normalize"),
]
# By day those whose norms and responses have derivatives of their own.
QUICK = [
    *[("tree", norm, "clip") for norm in ("l2", "linf", "lp(1.5)")],
    ("leaf", "mean_abs", "normalize"),
    ("unit", "l1", "smooth"),
]
combinations = pytest.mark.parametrize(
    ("scope", "norm", "response"), slow_unless(lambda *case: case in QUICK, COMBINATIONS)
)
clips = pytest.mark.parametrize(
    ("scope", "norm"),
    slow_unless(
        lambda *case: (*case, "clip") in QUICK,
        [case[:2] for case in COMBINATIONS if case[2] == "clip"],
    ),
)

INDEX = np.arange(10)
MEMBERS = {
    "tree": [INDEX],
    "leaf": [INDEX[:6], INDEX[6:]],
    "group": [INDEX[:6], INDEX[6:]],
    "unit": [*INDEX[:6].reshape(2, 3).T, INDEX[6:]],
    "axes": [*INDEX[:6].reshape(2, 3), INDEX[6:]],
}
POINT = np.array([0.9, -0.7, 0.5, 0.31, 1.2, -0.4, 0.8, -1.1, 0.2, 0.6])
WEIGHTS = np.cos(np.arange(10))


def clip(x, threshold, scope, norm, response, **options):
    """Clips ten entries as a matrix and a vector."""
    tree = {"w": x[:6].reshape(2, 3), "b": x[6:]}
    clipped, _ = optaxclip.clip_tree(
        tree, threshold, scope=SCOPES[scope], norm=NORMS[norm], response=response, **options
    )
    return jnp.concatenate([clipped["w"].ravel(), clipped["b"]])


def true_norm(x, norm):
    powers = {"l1": 1, "l2": 2, "rms": 2, "mean_abs": 1, "lp(1.5)": 1.5, "lp(3)": 3}
    powers["average_l2"] = 2
    if norm == "linf":
        return np.max(np.abs(x))
    total = np.sum(np.abs(x) ** powers[norm])
    found = (total / (len(x) if norm in ("rms", "mean_abs") else 1)) ** (1 / powers[norm])
    return found / len(x) if norm == "average_l2" else found


def largest_norm(scope, norm):
    return max(true_norm(POINT[members], norm) for members in MEMBERS[scope])


def reference(x, threshold, scope, norm, response):
    """The plain formula in float64 NumPy."""
    out = np.array(x)
    for members in MEMBERS[scope]:
        n = true_norm(x[members], norm)
        out[members] *= {
            "clip": min(1, threshold / n),
            "normalize": threshold / n,
            "smooth": 1 / math.sqrt(1 + (n / threshold) ** 2),
        }[response]
    return out


def differences(fn, x, step):
    """The Jacobian by central differences, one column for each entry of `x`."""
    return np.stack([(fn(x + e) - fn(x - e)) / (2 * step) for e in step * np.eye(len(x))], -1)


@functools.partial(jax.jit, static_argnames=("scope", "norm", "response"))
def derivatives(x, threshold, **combination):
    """Value, forward Jacobian, reverse gradient and Hessian, of the entries and the threshold."""

    def clipped(v):
        return clip(v[:-1], v[-1], **combination)

    def scalar(v):
        return jnp.asarray(WEIGHTS, jnp.float32) @ clipped(v)

    def twice(fn):
        """To differentiate, and to hand on."""
        return lambda v: (fn(v),) * 2

    v = jnp.append(x, threshold)
    jacobian, value = jax.jacfwd(twice(clipped), has_aux=True)(v)
    hessian, gradient = jax.jacfwd(twice(jax.grad(scalar)), has_aux=True)(v)
    return value, jacobian, gradient, hessian


@pytest.mark.gpu
@pytest.mark.by_day(1)
@combinations
def test_clip_derivatives_match_finite_differences(scope, norm, response):
    combination = {"scope": scope, "norm": norm, "response": response}
    # The smooth response has no corner where the norm is at the threshold; the others have.
    at_threshold = (float(np.float32(largest_norm(scope, norm))),)
    for threshold in (0.3, 0.97, *(at_threshold if response == "smooth" else ())):
        v = np.append(POINT, threshold)

        def plain(v):
            return reference(v[:-1], v[-1], **combination)

        value, forward, gradient, hessian = derivatives(
            np.float32(POINT), np.float32(threshold), **combination
        )
        np.testing.assert_allclose(value, plain(v), rtol=1e-5)
        jacobian = differences(plain, v, 1e-6)
        np.testing.assert_allclose(forward, jacobian, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradient, WEIGHTS @ jacobian, rtol=1e-4, atol=1e-5)
        second = differences(lambda v: differences(lambda u: WEIGHTS @ plain(u), v, 1e-4), v, 1e-4)
        np.testing.assert_allclose(hessian, second, rtol=1e-3, atol=1e-3)


@pytest.mark.by_day(2)
@combinations
def test_clip_derivatives_stay_finite_at_singular_points(scope, norm, response):
    combination = {"scope": scope, "norm": norm, "response": response}
    x, zeros = np.float32(POINT), np.zeros(10, np.float32)
    points = {
        "zero": (zeros, 1.0),
        "zero, threshold 0": (zeros, 0.0),
        "threshold 0": (x, 0.0),
        "threshold inf": (x, math.inf if response == "clip" else 1.0),
        "norm == threshold": (x, largest_norm(scope, norm)),
        "some groups zero": (np.where(INDEX < 6, zeros, x), 0.5),
        "some entries zero": (np.where(INDEX % 2, x, zeros), 0.5),
        "one entry": (np.where(INDEX == 3, np.float32(2), zeros), 0.5),
        "equal entries": (zeros + 1, 0.5),
        "negative zeros": (-zeros, 1.0),
        "overflow": (x * 1e25, 1e24),
    }
    for name, (x, threshold) in points.items():
        with jax.debug_nans(True):
            results = derivatives(x, jnp.float32(threshold), **combination)
        assert all(np.all(np.isfinite(result)) for result in results), name


@pytest.mark.by_day(3)
@combinations
@pytest.mark.parametrize("scale", [1e-10, 1e-15, 1e-20])
def test_clip_derivatives_stay_finite_for_tiny_gradients(scope, norm, response, scale):
    """Where the square or the cube of the norm underflows, but no derivative overflows."""
    x = jnp.float32(POINT * scale)
    for threshold in (scale / 10, scale * 10):
        results = derivatives(x, jnp.float32(threshold), scope=scope, norm=norm, response=response)
        assert all(np.all(np.isfinite(result)) for result in results)


@pytest.mark.slow
@clips
def test_identity_at_or_below_the_threshold(scope, norm):
    combination = {"scope": scope, "norm": norm, "response": "clip"}
    x, zeros = np.float32(POINT), np.zeros(10, np.float32)
    # The largest of the norms as measured, so that one of the groups is just at the threshold.
    _, info = optaxclip.clip_tree(
        {"w": x[:6].reshape(2, 3), "b": x[6:]}, math.inf, scope=SCOPES[scope], norm=NORMS[norm]
    )
    for point, threshold in (
        (x, np.max(info.norm)),
        (x, 1e3),
        (zeros, 1.0),
        (zeros, 0.0),
        (x * 1e25, 1e27),
        (x * 1e-25, 1e-20),
    ):
        value, forward, gradient, hessian = derivatives(
            point, jnp.float32(threshold), **combination
        )
        np.testing.assert_array_equal(value, point)
        np.testing.assert_array_equal(forward, np.eye(10, 11))
        np.testing.assert_array_equal(gradient, np.float32(np.append(WEIGHTS, 0)))
        np.testing.assert_array_equal(hessian, np.zeros((11, 11)))


@combinations
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_clip_derivatives_survive_overflowing_squares(scope, norm, response, scale):
    """Scaling gradients and threshold alike leaves the Jacobian as it is."""
    combination = {"scope": scope, "norm": norm, "response": response}
    scale = float(2 ** round(math.log2(scale)))
    x, threshold = np.float32(POINT), np.float32(0.3)
    value, jacobian, gradient, _ = derivatives(x, threshold, **combination)
    far = derivatives(scale * x, scale * threshold, **combination)
    np.testing.assert_allclose(far[0] / scale, value, rtol=1e-5)
    np.testing.assert_allclose(far[1], jacobian, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(far[2], gradient, rtol=1e-4, atol=1e-5)


def test_forward_derivative_survives_tiny_factors():
    """The tangent of the factor is not computed as a subnormal number or as zero."""

    def value(grads):
        clipped, _ = optaxclip.clip_tree(grads, 1e-5, scope=scopes.tree())
        return jnp.vdot(clipped, np.float32([1, 2, 3]))

    entries, tangent = np.float32([3, 4, 12]), np.float32([0.5, -0.25, 1])
    sizes = np.float32([1e10, 1e20, 1e30])
    along = jax.vmap(lambda s: jax.jvp(value, (entries * s,), (tangent,))[1])
    unit = entries / 13.0
    of_unit = np.float32([1, 2, 3]) @ (tangent - unit * (unit @ tangent)) / 13.0
    np.testing.assert_allclose(jax.jit(along)(sizes), 1e-5 / sizes * of_unit, rtol=1e-5)


def test_response_derivative_ignores_unused_branches():
    """The derivative would be infinity / infinity for infinite thresholds and norms."""

    def response(norm, trigger, target):
        return norm * jnp.minimum(1.0, target / norm)

    @jax.jit
    @jax.vmap
    def of_each(entry, threshold):
        def total(x):
            options = {"scope": scopes.tree(), "response": response, "nonfinite": "zero"}
            return jnp.sum(optaxclip.clip_tree(x, threshold, **options)[0])

        return jax.value_and_grad(total)(jnp.stack([entry, jnp.ones(())]))

    values, slopes = of_each(np.float32([1, jnp.inf, jnp.nan]), np.float32([jnp.inf, 1, 1]))
    np.testing.assert_array_equal(values, [2, 0, 0])
    np.testing.assert_array_equal(slopes, [[1, 1], [0, 0], [0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("response", ["clip", "smooth"])
def test_clip_derivatives_under_vmap_match_loop(response):
    def loss(x, threshold):
        return jnp.asarray(WEIGHTS, jnp.float32) @ clip(x, threshold, "leaf", "l2", response)

    x = np.float32(POINT)
    xs = np.stack([x, 0 * x, x * 1e25, x * 1e-15, x / 10])
    thresholds = np.float32([0.3, 1.0, 1e24, 1e-16, 5.0])
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    dx, dlimit = jax.jit(jax.vmap(gradient))(xs, thresholds)
    alone = [gradient(*point) for point in zip(xs, thresholds, strict=True)]
    np.testing.assert_allclose(dx, [point[0] for point in alone], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dlimit, [point[1] for point in alone], rtol=1e-4, atol=1e-6)
    assert np.all(np.isfinite(dx))


def loss_at_points(scope, norm, response):
    """A function to differentiate, and where."""
    x = np.float32(POINT)
    points = [(x * 1e25, 1.0), (x * 1e-25, 1e-26), (x, largest_norm(scope, norm))]
    points += [(np.where(INDEX % 2, x, np.zeros_like(x)), 0.5)]
    points += [(x * scale, threshold) for scale in (0, 1) for threshold in (0.0, 0.3, 1e3)]

    def loss(x, threshold):
        return jnp.sum(jnp.square(clip(x, threshold, scope, norm, response)))

    return jax.value_and_grad(loss, (0, 1)), [
        (x, jnp.float32(threshold)) for x, threshold in points
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "norm", "response"),
    [
        ("tree", "l2", "clip"),
        ("tree", "linf", "normalize"),
        ("leaf", "lp(1.5)", "clip"),
        ("unit", "l2", "smooth"),
    ],
)
def test_checkify_accepts_clip_derivatives(scope, norm, response):
    gradient, points = loss_at_points(scope, norm, response)
    checked = jax.jit(checkify.checkify(gradient, checkify.float_checks | checkify.div_checks))
    for x, threshold in points:
        error, _ = checked(x, threshold)
        assert error.get() is None, (x, threshold)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda x: x.__name__
)
def test_strict_keeps_derivatives(dtype):
    x = jnp.asarray(POINT, dtype)

    def gradients(strict):
        def loss(x, threshold):
            clipped = clip(x, threshold, "leaf", "l2", "clip", strict=strict)
            return jnp.asarray(WEIGHTS, jnp.float32) @ clipped.astype(jnp.float32)

        return jax.jit(jax.grad(loss, (0, 1)))(x, jnp.float32(0.3))

    (dx, dlimit), (strict_dx, strict_dlimit) = gradients(False), gradients(True)
    assert strict_dx.dtype == dtype
    assert np.all(strict_dx != 0)
    # Those of a factor that is smaller by less than 2e-6.
    np.testing.assert_allclose(strict_dx, dx, rtol=2e-6, atol=0)
    np.testing.assert_allclose(strict_dlimit, dlimit, rtol=2e-6)
    expected = WEIGHTS @ reference(POINT, 1.0, "leaf", "l2", "normalize")
    np.testing.assert_allclose(dlimit, expected, rtol=10 * float(jnp.finfo(dtype).eps))


@pytest.mark.by_day(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("response", ["clip", "smooth"])
def test_float64_derivatives_keep_full_precision(response):
    combination = {"scope": "leaf", "norm": "l2", "response": response}

    def fn(v):
        return clip(v[:-1], v[-1], **combination)

    def plain(v):
        return reference(v[:-1], v[-1], **combination)

    v = np.append(POINT, 0.3)
    np.testing.assert_allclose(jax.jit(fn)(v), plain(v), rtol=1e-14)
    np.testing.assert_allclose(
        jax.jit(jax.jacrev(fn))(v), differences(plain, v, 1e-5), rtol=1e-8, atol=1e-9
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [70, 300])
def test_large_group_derivatives_match_formula(size):
    """Those above 64 entries are measured in another way."""
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)

    def loss(x, threshold):
        (clipped,), _ = optaxclip.clip_tree([x], threshold, scope=SCOPES["tree"])
        return jnp.sum(jnp.sin(clipped))

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    points = [(x, np.linalg.norm(x)), (0 * x, 1.0), (x * np.float32(1e30), 2.0)]
    for point, threshold in points:
        dx, dlimit = gradient(point, jnp.float32(threshold))
        assert np.all(np.isfinite(dx))
        assert np.isfinite(dlimit)
    scaled = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64))
    dx, dlimit = gradient(x, jnp.float32(0.3))
    np.testing.assert_allclose(dlimit, np.cos(0.3 * scaled) @ scaled, rtol=1e-4, atol=1e-5)
    tangent = np.cos(0.3 * scaled)
    expected = 0.3 * (tangent - scaled * (scaled @ tangent)) / np.linalg.norm(x)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-6)


TRANSFORMATIONS = {
    "clip": optaxclip.clip,
    "clip_by_norm": optaxclip.clip_by_norm,
    "clip_by_global_norm": optaxclip.clip_by_global_norm,
    "clip_by_block_rms": optaxclip.clip_by_block_rms,
    "adaptive_grad_clip": optaxclip.adaptive_grad_clip,
    "normalize_by_global_norm": optaxclip.normalize_by_global_norm,
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformation_derivatives_stay_finite_at_zero(make):
    def loss(grads, params, threshold):
        tx = make(threshold)
        clipped, _ = tx.update(grads, tx.init(params), params)
        return jnp.sum(jnp.square(clipped["w"] + 1))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    for value in (0.0, 1.0):
        zeros, params = {"w": jnp.zeros((2, 3))}, {"w": jnp.full((2, 3), value)}
        derivative = gradient(zeros, params, 0.5)
        assert all(np.all(np.isfinite(d)) for d in jax.tree.leaves(derivative))
        if make != optaxclip.normalize_by_global_norm:
            np.testing.assert_array_equal(derivative[0]["w"], np.full((2, 3), 2.0))
