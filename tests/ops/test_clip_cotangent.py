"""`ops.clip_cotangent`: the identity, and what comes back through it, in all modes and loops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax import lax
from jax.experimental import checkify
from jax.experimental.sparse import BCOO

from optaxclip import ops, per_example

INF, NAN = math.inf, math.nan
clip_cotangent = ops.clip_cotangent
RNG = np.random.default_rng(0)
SIZE, STEPS = 3, 4
WEIGHTS = np.float32(0.9 * RNG.normal(size=(SIZE, SIZE)))
START, END, DIRECTION = np.float32(RNG.normal(size=(3, SIZE)))
INPUTS, TARGETS = np.float32(RNG.normal(size=(2, STEPS, SIZE)))
KINDS = {"norm": "clip_norm", "value": "clip_value", "axes": "clip_norm"}
THRESHOLDS = {"norm": 0.8, "value": 0.35, "axes": 0.4}


def back(kind, cotangent, threshold):
    """What must come back, in plain operations."""
    if kind == "value":
        return jnp.clip(cotangent, -threshold, threshold)
    norm = jnp.abs(cotangent) if kind == "axes" else jnp.sqrt(jnp.sum(cotangent**2))
    return cotangent * jnp.minimum(1, threshold / norm)


def clipped(kind, x, threshold):
    """The same; by axes each entry is a group."""
    axes = {"axes": ()} if kind == "axes" else {}
    return clip_cotangent(x, **{KINDS[kind]: threshold}, **axes)


def cell(weights, h, x):
    return jnp.tanh(weights @ h + x)


def loss_with(loop, kind):
    """The loss of a recurrent network whose states' cotangents are clipped."""

    def loss(weights, start, threshold):
        def step(h, at):
            h = clipped(kind, cell(weights, h, at[0]), threshold)
            return h, jnp.sum(h * at[1])

        h, terms = loop(step, start, (jnp.asarray(INPUTS), jnp.asarray(TARGETS)))
        return jnp.sum(terms) + jnp.sum(jnp.sin(h) * END)

    return loss


def gradients_by_hand(kind, weights, start, threshold):
    """Those of the loss, one step after another, without any derivative of JAX's."""
    states = [start]
    for x in INPUTS:
        states.append(cell(weights, states[-1], x))
    d, by_weights = jnp.cos(states[-1]) * END, jnp.zeros_like(weights)
    for before, h, target in zip(states[-2::-1], states[:0:-1], TARGETS[::-1], strict=True):
        d = back(kind, d + target, threshold) * (1 - h**2)
        by_weights += jnp.outer(d, before)
        d = weights.T @ d
    return by_weights, d


def unrolled(step, carry, xs):
    terms = []
    for i in range(STEPS):
        carry, term = step(carry, jax.tree.map(lambda x: x[i], xs))  # noqa: B023
        terms.append(term)
    return carry, jnp.stack(terms)


def in_fori_loop(step, carry, xs):
    def body(i, carry):
        h, term = step(carry[0], jax.tree.map(lambda x: x[i], xs))
        return h, carry[1] + term

    return lax.fori_loop(0, STEPS, body, (carry, jnp.zeros(())))


def remade(change):
    return lambda step, carry, xs: lax.scan(change(step), carry, xs)


def in_vmap(step, carry, xs):
    found = jax.vmap(lambda h: lax.scan(step, h, xs))(carry[None])
    return jax.tree.map(lambda x: x[0], found)


LOOPS = {
    "scan": lax.scan,
    "unrolled": unrolled,
    "fori_loop": in_fori_loop,
    "jit": remade(jax.jit),
    "checkpoint": remade(jax.checkpoint),
    "checkpoint around": jax.checkpoint(lax.scan, static_argnums=0),
    "cond": remade(lambda step: lambda h, at: lax.cond(jnp.sum(h) < 99, step, step, h, at)),
    "two": functools.partial(lax.scan, unroll=2),
    "vmap": in_vmap,
}
CASES = [("scan", "norm"), *((loop, "norm") for loop in LOOPS if loop != "scan")]
CASES += [("scan", "value"), ("scan", "axes"), ("vmap", "axes")]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("loop", "kind"), slow_unless(lambda loop, kind: loop == "scan" and kind != "axes", CASES)
)
def test_clip_cotangent_derivatives_match_manual_backpropagation(loop, kind):
    loss, by_hand = loss_with(LOOPS[loop], kind), functools.partial(gradients_by_hand, kind)

    def both(weights, start, threshold):
        def through(gradients, way):
            def along(w, s, c):
                return jnp.sum(jnp.sin(gradients(w, s, c)[1]) * DIRECTION)

            return way(along, (0, 1, 2))(weights, start, threshold)

        found = jax.grad(loss, (0, 1))
        first = [gradients(weights, start, threshold) for gradients in (found, by_hand)]
        ways = ((found, jax.grad), (found, jax.jacfwd), (by_hand, jax.grad))
        return first, [through(*way) for way in ways]

    threshold = jnp.float32(THRESHOLDS[kind])
    (first, by_hand_first), seconds = jax.jit(both)(WEIGHTS, START, threshold)
    unclipped = jax.jit(jax.grad(loss, (0, 1)))(WEIGHTS, START, jnp.float32(INF))
    assert not np.allclose(first[1], unclipped[1], rtol=0.1)
    for x, y in zip(first, by_hand_first, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    *found, expected = seconds
    assert all(np.any(x != 0) for x in expected)
    for way in found:
        for x, y in zip(way, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_clip_cotangent_acts_as_identity_in_forward_mode():
    loss = loss_with(lax.scan, "norm")

    def both(weights, start):
        def fn(w, s):
            return loss(w, s, 0.1), loss(w, s, INF)

        forward = jax.jacfwd(fn, (0, 1))(weights, start)
        forward_twice = jax.jacfwd(jax.jacfwd(fn, 1), 1)(weights, start)
        reverse_over = jax.jacrev(jax.jacfwd(fn, 1), 1)(weights, start)
        return fn(weights, start), forward, forward_twice, reverse_over

    for found, expected in jax.jit(both)(WEIGHTS, START):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


def test_clip_cotangent_keeps_clipping_in_second_derivative():
    def total(loop, by, x):
        def step(carry, _):
            h, found = carry
            h = clip_cotangent(jnp.sin(3 * h), clip_norm=0.5)
            return (h, found + by * jnp.sum(h**2)), None

        return loop(step, (x, jnp.zeros(())), jnp.arange(float(STEPS)))[0][1]

    def derivatives(loop):
        fn = functools.partial(total, loop)
        return jax.grad(fn, 1)(1.0, START), jax.grad(jax.grad(fn), 1)(1.0, START)

    def scan(step, carry, xs):
        return lax.scan(step, carry, xs)

    def one_by_one(step, carry, xs):
        for x in xs:
            carry, _ = step(carry, x)
        return carry, None

    found, expected = jax.jit(lambda: (derivatives(scan), derivatives(one_by_one)))()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)  # as `by` is 1


def coming_back(x, cotangent, **options):
    """What comes back through a clip of `x`."""
    return jax.vjp(lambda x: clip_cotangent(x, **options), x)[1](cotangent)[0]


TREE = {
    "w": np.float32([[3, 4], [6, 8]]),
    "none": None,
    "step": jnp.int32(3),
    "mask": np.array([True]),
    "key": jax.random.key(0),
    "number": 2.0,
    "half": jnp.ones(4, jnp.float16),
    "complex": np.complex64([3 + 4j]),
    "empty": jnp.zeros((0, 2)),
}


@pytest.mark.slow
def test_clip_cotangent_clips_leaves_separately():
    out = clip_cotangent(TREE, clip_norm=1.0)
    assert jax.tree.structure(out) == jax.tree.structure(TREE)
    for name, leaf in TREE.items():
        if leaf is not None:
            assert jax.typeof(out[name]) == jax.typeof(jnp.asarray(leaf))
            assert jnp.all(out[name] == leaf)
    floats = {name: TREE[name] for name in ("w", "number", "half", "complex", "empty")}
    found = jax.jit(jax.grad(sum_of_squares))(floats | {"half": jnp.full(4, 100, jnp.float16)})
    np.testing.assert_allclose(found["w"], TREE["w"] / 125**0.5, rtol=1e-6)
    np.testing.assert_allclose(found["half"], [0.5] * 4)
    np.testing.assert_allclose(found["number"], 1)
    np.testing.assert_allclose(np.abs(found["complex"]), [1], rtol=1e-6)
    assert found["half"].dtype == jnp.float16
    assert found["empty"].shape == (0, 2)
    assert clip_cotangent({}, clip_value=1.0) == {}


def sum_of_squares(tree):
    leaves = jax.tree.leaves(clip_cotangent(tree, clip_norm=1.0))
    return sum(jnp.sum(jnp.abs(leaf) ** 2).astype(jnp.float32) for leaf in leaves)


EXACT = [
    ([3, 4], jnp.float32, 5, 1),
    ([3, 4], jnp.float32, 1, 0.2),
    ([3, 4], jnp.float32, 0, 0),
    ([3, 4], jnp.float32, -1, 0),
    ([3, 4], jnp.float32, INF, 1),
    ([0, 0], jnp.float32, 0, 1),
    ([1e20] * 4, jnp.float32, 1, 0.5e-20),
    ([1e-25] * 4, jnp.float32, 1e-26, 0.05),
    ([300] * 4, jnp.float16, 1, 1 / 600),
    ([6e4] * 4, jnp.float16, 1.3e5, 1),
    ([1e20] * 4, jnp.bfloat16, 1, 0.5e-20),
]


def test_clip_cotangent_survives_extreme_magnitudes():
    cotangents = [jnp.asarray(entries, dtype) for entries, dtype, *_ in EXACT]
    thresholds = [jnp.float32(threshold) for *_, threshold, _ in EXACT]

    @jax.jit
    def clips(cotangents, thresholds):
        rows = zip(cotangents, thresholds, strict=True)
        return [coming_back(jnp.zeros_like(x), x, clip_norm=threshold) for x, threshold in rows]

    for found, x, (*_, factor) in zip(
        clips(cotangents, thresholds), cotangents, EXACT, strict=True
    ):
        assert found.dtype == x.dtype
        wide = np.asarray(x, np.float64) * factor
        rtol = 0 if factor == 1 else 2 * float(jnp.finfo(x.dtype).eps)
        np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=rtol)


def test_clip_cotangent_clips_by_axes_and_value():
    x, d = np.ones((2, 2), np.float32), np.float32([[3, 4], [0.3, 0.4]])
    found = coming_back(x, d, clip_norm=1.0, axes=-1)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.3, 0.4]])
    found = coming_back(x[0], np.float32([NAN, -INF]), clip_value=2.0)
    np.testing.assert_array_equal(found, [NAN, -2])
    found = coming_back(np.complex64([1]), np.complex64([6 + 8j]), clip_value=5)
    np.testing.assert_allclose(found, [3 + 4j], rtol=1e-6)
    found = coming_back(x, d, clip_value=-1)
    np.testing.assert_array_equal(found, 0 * d)


def test_clip_cotangent_clips_stored_sparse_elements():
    x = BCOO((jnp.ones(2), np.int32([[1], [1]])), shape=(3,))

    def loss(data):
        out = clip_cotangent({"rows": BCOO((data, x.indices), shape=x.shape)}, clip_norm=1.0)
        return jnp.sum(out["rows"].todense() * jnp.array([1.0, 30.0, 1.0]))

    np.testing.assert_allclose(jax.grad(loss)(x.data), [0.5**0.5] * 2, rtol=1e-6)


def test_clip_cotangent_applies_nonfinite_policies():
    d = np.float32([3, NAN])
    for policy, expected in (("nan", [NAN, NAN]), ("zero", [0, 0]), ("mask", [1, 0])):
        found = coming_back(np.ones(2, np.float32), d, clip_norm=1.0, nonfinite=policy)
        np.testing.assert_array_equal(found, expected)


def test_clip_cotangent_reports_leaf_to_checkify():
    def loss(h, by):
        def step(h, _):
            return clip_cotangent({"h": h}, clip_norm=1.0, nonfinite="error")["h"], None

        return jnp.sum(lax.scan(step, h, length=2)[0] * by)

    checked = jax.jit(checkify.checkify(jax.grad(loss)))
    assert checked(jnp.ones(2), 1.0)[0].get() is None
    assert "clip_cotangent: " in (said := checked(jnp.ones(2), NAN)[0].get())
    assert "for the leaves h" in said
    every = checkify.float_checks | checkify.div_checks
    finite = jax.grad(lambda h: jnp.sum(clip_cotangent(h, clip_norm=1.0) * 0.0))
    assert jax.jit(checkify.checkify(finite, every))(jnp.ones(2))[0].get() is None


EXAMPLES = np.float32([[3, 4], [0.3, 0.4], [-6, 8]])


def by_example(thresholds, axis_name=None):
    """The gradients of sums over examples, each with a threshold, in several ways."""

    def loss(w, x, threshold):
        return jnp.sum(clip_cotangent(w, clip_norm=threshold, axis_name=axis_name) * x)

    def all_losses(w, x, thresholds, in_axes):
        return jnp.sum(jax.vmap(loss, in_axes, axis_name="n")(w, x, thresholds))

    @jax.jit
    def ways(w, x, thresholds):
        many = jnp.broadcast_to(w, x.shape)
        vmap = functools.partial(jax.vmap, axis_name="n")
        return {
            "vmap of grad": vmap(jax.grad(loss))(many, x, thresholds),
            "vmap of grad, one w": vmap(jax.grad(loss), (None, 0, 0))(w, x, thresholds),
            "grad of vmap": jax.grad(all_losses)(many, x, thresholds, (0, 0, 0)),
            "grad of vmap, at the last axis": jax.grad(
                lambda w: all_losses(w, x, thresholds, (1, 0, 0))
            )(many.T).T,
            "the sum": jax.grad(all_losses)(w, x, thresholds, (None, 0, 0)),
            "the sum, in jit": jax.grad(
                lambda w: jnp.sum(
                    jax.vmap(jax.jit(loss), (None, 0, 0), axis_name="n")(w, x, thresholds)
                )
            )(w),
        }

    return ways(jnp.ones(2), EXAMPLES, jnp.asarray(thresholds))


def test_clip_cotangent_under_vmap_clips_examples_separately():
    expected = np.float32([[1.8, 2.4], [0.3, 0.4], [-0.6, 0.8]])
    for name, found in by_example([3.0, 1.0, 1.0]).items():
        wanted = expected.sum(0) if name.startswith("the sum") else expected
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)


def test_clip_cotangent_with_axis_name_clips_batch():
    norm = np.sqrt(np.sum(np.float64(EXAMPLES) ** 2))
    for name, found in by_example([1.0] * 3, axis_name="n").items():
        wanted = EXAMPLES / norm
        wanted = wanted.sum(0) if name.startswith("the sum") else wanted
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_clip_cotangent_works_in_per_example_losses(method):
    def loss(params, x):
        h = clip_cotangent(jnp.tanh(x @ params["w"]), clip_norm=0.1)
        return jnp.sum((h @ params["v"]) ** 2) + jnp.sum(
            clip_cotangent(params["b"], clip_norm=0.2) * x
        )

    params = {"w": np.float32(RNG.normal(size=(2, 3))), "v": np.ones((3, 2), np.float32)}
    params |= {"b": np.float32([1, 2])}
    clip = per_example.clipped_grad(loss, 0.5, batch_argnums=1, method=method)
    total = jax.jit(clip)(params, EXAMPLES)[0]
    expected = jax.tree.map(np.zeros_like, params)
    for x in EXAMPLES:
        each = ops.clip_by_global_norm(jax.grad(loss)(params, x), 0.5)[0]
        expected = jax.tree.map(np.add, expected, each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), total, expected)


def test_clip_cotangent_supports_linear_transpose_and_eager_mode():
    x = jnp.float32([3, 4])
    transposed = jax.linear_transpose(lambda x: clip_cotangent(x, clip_norm=1.0), x)
    np.testing.assert_allclose(transposed(x)[0], [0.6, 0.8], rtol=1e-6)
    assert clip_cotangent(x, clip_norm=1.0) is x
    gradient = jax.grad(lambda x: jnp.sum(clip_cotangent(x, clip_norm=1.0) ** 2))
    np.testing.assert_allclose(gradient(x), [0.6, 0.8], rtol=1e-6)
