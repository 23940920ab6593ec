"""`known_norm`: a stage uses the norm that the trainer passes to all stages."""

import functools

import jax
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by_global_norm, scopes, skip_above

GRADS = {"w": np.float32([30.0, 40.0])}
SHARE = np.float32([0.6, 0.8])
told = functools.partial(clip_by_global_norm, known_norm="grad_norm")


def update(tx, **extra_args):
    """The updates that follow `GRADS`, over their direction."""
    found, _ = jax.jit(tx.update)(GRADS, tx.init(GRADS), GRADS, **extra_args)
    size = np.linalg.norm(np.asarray(found["w"], np.float64))
    np.testing.assert_allclose(np.abs(found["w"]), size * SHARE, rtol=1e-6)
    return size


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.chain(clip_by_global_norm(1.0), clip_by_global_norm(0.5)), 0.5),
        (optax.chain(optax.sgd(0.01), clip_by_global_norm(0.01)), 0.01),
        (optax.chain(clip_by_global_norm(1.0), skip_above(optax.sgd(1.0), 10.0)), 1),
        (optaxclip.zclip(max_norm=0.25), 0.25),
        # Told, it takes what comes: 100, where the norm is 50.
        (told(1.0), 0.5),
        (told(1.0, strict=True), 0.5),
        (optax.chain(told(1.0), clip_by_global_norm(0.01)), 0.01),
        (optaxclip.zclip(max_norm=1.0, known_norm="grad_norm"), 0.5),
        (optaxclip.normalize_by_global_norm(known_norm="grad_norm"), 0.5),
        (skip_above(optax.chain(told(1.0), optax.sgd(1.0)), 60.0), 0.5),
        (skip_above(optax.sgd(1.0), 60.0, known_norm="grad_norm"), 0),
        (optaxclip.skip_nonfinite(optax.chain(told(1.0), optax.sgd(1.0))), 0.5),
    ],
)
def test_known_norm_applies_only_to_named_stages(tx, expected):
    np.testing.assert_allclose(update(tx, grad_norm=100.0), expected, rtol=2e-6)


def test_strict_known_norm_allows_for_rounded_sum():
    grads = np.ones(2**20, np.float32)
    norm = np.float32(2**10 * (1 - 7e-7))
    updates, _ = told(1.0, strict=True).update(grads, None, grad_norm=norm)
    assert 1 - 2e-6 < np.linalg.norm(np.float64(updates)) <= 1


def test_multi_steps_ignores_norm_of_single_microbatch():
    tx = optax.MultiSteps(clip_by_global_norm(1.0), 2)
    state = tx.init(GRADS)
    # Its mean of gradients relies on implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        for norm in (50.0, 1e6):
            updates, state = tx.update(GRADS, state, GRADS, grad_norm=norm)
    np.testing.assert_allclose(updates["w"], SHARE, rtol=1e-6)


def test_known_norm_rejects_group_norms_and_mask():
    by_leaf = optaxclip.clip_by(scopes.leaf(), 1.0, known_norm="grad_norm")
    with pytest.raises(
        ValueError, match=r"'grad_norm' cannot be combined with a scope that has .* scopes\.tree"
    ):
        by_leaf.update(GRADS, by_leaf.init(GRADS), grad_norm=50.0)
    with pytest.raises(
        ValueError, match="known_norm='grad_norm' cannot be combined with nonfinite='mask'"
    ):
        told(1.0, nonfinite="mask")
