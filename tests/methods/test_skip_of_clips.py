"""A skip around clips and records alone does not stop the optimizer behind it, and says so."""

import warnings

import jax.numpy as jnp
import optax
import pytest

import optaxclip

PARAMS = jnp.ones(2)
ALONE = {
    "one": optaxclip.clip_by_global_norm(1.0),
    "chain": optax.chain(optaxclip.zclip(), optaxclip.clip_by_norm(1.0)),
    "masked": optax.masked(optaxclip.clip_by_norm(1.0), True),
    "record": optax.chain(optaxclip.monitor.record(5), optaxclip.clip_by_global_norm(1.0)),
    "entries": optax.chain(optaxclip.clip(1.0), optaxclip.clip_by_second_moment()),
}
WITH_OPTIMIZER = {
    "sgd": optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "adam": optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1)),
    "none of ours": optax.sgd(0.1),
    "no state": optax.GradientTransformation(lambda params: (), lambda *_: None),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inner", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("skip", [optaxclip.skip_nonfinite, lambda x: optaxclip.skip_above(x, 9.0)])
def test_skip_around_only_clips_warns(skip, inner):
    tx = optax.chain(skip(inner), optax.sgd(0.1, momentum=0.9))
    said = "wraps only clipping and recording stages, .* on skipped steps; use "
    with pytest.warns(UserWarning, match=said) as warned:
        state = tx.init(PARAMS)
    assert warned[0].filename == __file__
    _, state = tx.update(PARAMS, state)
    updates, _ = tx.update(PARAMS * jnp.nan, state)
    assert jnp.all(updates != 0)


@pytest.mark.parametrize("inner", WITH_OPTIMIZER.values(), ids=WITH_OPTIMIZER)
def test_skip_around_optimizer_does_not_warn(inner):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optaxclip.skip_nonfinite(inner).init(PARAMS)
