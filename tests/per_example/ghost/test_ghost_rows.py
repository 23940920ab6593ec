"""Rows of tables by indices of every dtype and mode: norms and sums of both methods agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from compiling import AS_USERS
from jax import lax

from optaxclip import per_example

NUMBERS = lax.GatherDimensionNumbers((1,), (0,), (0,))


def take(mode):
    fill = 0 if mode == "fill" else None
    return lambda w, i: jnp.take(w, i, axis=0, mode=mode, fill_value=fill)


def gather(mode):
    options = {"slice_sizes": (1, 3), "mode": mode, "fill_value": 0}
    return lambda w, i: lax.gather(w, i[:, None], NUMBERS, **options)


LOOKUPS = {"take, fill": take("fill"), "take, clip": take("clip")}
LOOKUPS |= {f"gather, {mode}": gather(mode) for mode in ("fill", "clip", "promise_in_bounds")}


def results(loss, params, *batch):
    """What either method gives with a threshold that clips nothing."""
    clips = (per_example.clipped_grad(loss, 1e6, method=way) for way in ("ghost", "vmap"))
    # As tests are compiled, XLA (JAX 0.10.2) mistakes narrow indices that are clipped.
    fn = jax.jit(lambda *args: [clip(*args) for clip in clips], compiler_options=AS_USERS)
    return fn(params, *batch)


def assert_alike(found, expected):
    """The same rows have gradients, and norms are the same."""

    def compare(path, x, y):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, *((r.grads, r.norms) for r in (found, expected)))


@pytest.mark.parametrize(
    ("dtype", "rows"),
    slow_unless(
        lambda dtype, rows: dtype == "int8" and rows == 300,
        [
            *(("int8", 300), ("int8", 128), ("int8", 5), ("uint8", 300), ("uint8", 256)),
            *(("int16", 40_000), ("uint16", 70_000), ("int32", 300), ("uint32", 300)),
        ],
    ),
)
def test_ghost_supports_narrow_index_dtypes(dtype, rows):
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    low, high = max(info.min, -rows - 3), min(info.max, rows + 3)
    ids = rng.integers(low, high, (4, 6), endpoint=True)
    ids[0, :3] = low, high, high
    params = {name: np.zeros((rows, 3), np.float32) for name in LOOKUPS}
    d = rng.normal(size=(4, 6, 3)).astype(np.float32)

    def loss(params, i, d):
        inside = jnp.clip(i, 0, min(rows - 1, info.max))
        at = {name: inside if "promise" in name else i for name in LOOKUPS}
        return sum(jnp.vdot(look(params[name], at[name]), d) for name, look in LOOKUPS.items())

    assert_alike(*results(loss, params, ids.astype(dtype), d))


def test_ghost_lookups_ignore_padding_indices():
    """Tokenizers pad with -100; d is larger there."""
    ids = np.array([[0, 2, -100, -100], [-100, -100, -100, -100], [1, 1, 1, -100]])
    d = np.where(ids[..., None] < 0, 100, [1, 2, 3]).astype(np.float32)
    w = np.zeros((5, 3), np.float32)
    for mode in ("fill", "clip"):
        expected, kept = np.zeros((3, 5, 3)), (ids >= 0) | (mode == "clip")
        for example, position in np.argwhere(kept):
            expected[example, max(ids[example, position], 0)] += d[example, position]
        norms = np.linalg.norm(expected.reshape(3, -1), axis=1)
        found = results(lambda w, i, d, mode=mode: jnp.vdot(take(mode)(w, i), d), w, ids, d)
        for result in found:
            np.testing.assert_allclose(result.grads, expected.sum(0), rtol=1e-6)
            np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
