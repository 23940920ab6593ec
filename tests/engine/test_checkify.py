"""`nonfinite="error"` reports to `checkify` through `vmap` and `jit`, in any order."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import optaxclip
from optaxclip import norms, scopes

METHODS = {
    "l2": optaxclip.clip_by_global_norm(1.0, nonfinite="error"),
    "linf": optaxclip.clip_by_norm(1.0, norm="linf", nonfinite="error"),
    "l3": optaxclip.clip_by(scopes.unit(), 1.0, norm=norms.lp(3), nonfinite="error"),
    "zscore": optaxclip.clip_by(scopes.leaf(), optaxclip.thresholds.zscore(), nonfinite="error"),
}
WAYS = {
    "checkify(vmap)": lambda fn: checkify.checkify(jax.vmap(fn)),
    "checkify(jit(vmap))": lambda fn: checkify.checkify(jax.jit(jax.vmap(fn))),
    "jit(checkify(vmap))": lambda fn: jax.jit(checkify.checkify(jax.vmap(fn))),
    "vmap(checkify)": lambda fn: jax.vmap(checkify.checkify(fn)),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("method", "way"),
    [*[("l2", way) for way in WAYS], *[(name, "checkify(jit(vmap))") for name in METHODS]],
)
def test_checkify_reports_nonfinite_example(method, way):
    tx = METHODS[method]

    def clip(grads):
        return tx.update({"w": grads}, tx.init({"w": grads}))[0]["w"]

    run = WAYS[way](clip)
    grads = jnp.array([[3.0, 4.0], [jnp.nan, 1.0], [0.1, 0.2]])
    error, clipped = run(grads)
    with pytest.raises(
        checkify.JaxRuntimeError, match="the gradient norm is NaN or infinite for the leaves w"
    ):
        error.throw()
    np.testing.assert_array_equal(np.isnan(clipped), [[False] * 2, [True] * 2, [False] * 2])
    # Squares of these are not.
    assert run(grads.at[1, 0].set(3e38))[0].get() is None


@pytest.mark.by_day(1)
@pytest.mark.parametrize("method", METHODS)
def test_nonfinite_error_without_checkify_explains_remedy(method):
    """The message is JAX's own; we have no code where JAX raises it."""
    tx = METHODS[method]
    with pytest.raises(ValueError, match="which was not functionalized") as raised:
        jax.jit(tx.update)({"w": jnp.ones((2, 3))}, tx.init({"w": jnp.ones((2, 3))}))
    shown = "".join(traceback.format_exception(raised.value))
    for line in (
        'nonfinite="error" needs checkify',
        "jit(checkify.checkify(step))(*args); error.th",
    ):
        assert line in shown


@pytest.mark.slow
@pytest.mark.usefixtures("platform")
def test_checkify_ignores_unused_products():
    """At the scales of sums that are not used they are infinite, of both signs, or `inf * 0`."""
    record = optaxclip.monitor.record(2, stats=("cosine_param",))

    def update(grads, weights):
        _, state = record.update(grads, record.init(weights), weights)
        return optaxclip.monitor.metrics(state)["record/cosine_param"]

    check = jax.jit(checkify.checkify(update, checkify.all_checks))
    rng = np.random.default_rng(0)
    for of_grads, of_weights in ((1, 1), (1e13, 1), (1e38, 1e-20), (1e30, 1e30), (1e-30, 1e-30)):
        pair = [rng.normal(size=(8, 9)) * size for size in (of_grads, of_weights)]
        grads, weights = (jnp.float32(x / 10) for x in pair)
        grads, weights = grads.at[0, 0].set(0), weights.at[1, 1].set(0)
        error, cosine = check(grads, weights)
        assert error.get() is None, (of_grads, of_weights)
        x, y = np.float64(grads), np.float64(weights)
        exact = np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y)
        np.testing.assert_allclose(cosine, exact, rtol=1e-5, atol=1e-7)
