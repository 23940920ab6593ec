"""`nonfinite="error"` reports to `checkify` through `vmap` and `jit`, in any order."""

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


@pytest.mark.parametrize(
    ("method", "way"),
    [*[("l2", way) for way in WAYS], *[(name, "checkify(jit(vmap))") for name in METHODS]],
)
def test_one_bad_example_is_reported(method, way):
    tx = METHODS[method]

    def clip(grads):
        return tx.update({"w": grads}, tx.init({"w": grads}))[0]["w"]

    run = WAYS[way](clip)
    grads = jnp.array([[3.0, 4.0], [jnp.nan, 1.0], [0.1, 0.2]])
    error, clipped = run(grads)
    with pytest.raises(checkify.JaxRuntimeError, match="norm is not finite; leaves: w"):
        error.throw()
    np.testing.assert_array_equal(np.isnan(clipped), [[False] * 2, [True] * 2, [False] * 2])
    # Squares of these are not.
    assert run(grads.at[1, 0].set(3e38))[0].get() is None


def test_one_bad_slice_is_reported():
    tx = optaxclip.clip_by(scopes.axes(-1), 1.0, nonfinite="error")
    with pytest.raises(checkify.JaxRuntimeError, match="norm is not finite; leaves: w"):
        tx.update({"w": np.float32([[3.0, 4.0], [jnp.nan, 1.0]])}, None)
