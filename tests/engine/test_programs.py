"""What is compiled once in eager mode, however often the same transformation is made."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import GRADS, METHODS, PARAMS, compilations, random_tree

import optaxclip
from optaxclip import norms, responses, scopes


def scheduled(make):
    """With a schedule of its own each time, of other numbers too."""
    numbers = iter(range(1, 100))
    return lambda: make(optax.cosine_decay_schedule(1.0 + next(numbers), 10))


def _any_parts(schedule):
    parts = {"norm": norms.lp(3), "response": responses.auto_s(0.5), "nonfinite": "mask"}
    return optaxclip.clip_by(scopes.leaf(), schedule, **parts)


def _with_noise(threshold):
    return optaxclip.per_example_clip_and_aggregate(threshold, 1.0, key=0)


# `test_contract.py` has the methods without a schedule.
MAKERS = {
    "clip_by_value": lambda: optaxclip.clip_by_value(-1.0, 1.0),
    "skip_nonfinite": lambda: optaxclip.skip_nonfinite(optax.identity()),
    "record": lambda: optaxclip.monitor.record(3),
    "per_example": lambda: optaxclip.per_example_clip_and_aggregate(1.0, 1.0, key=0),
    **{
        f"{make.__name__} scheduled": scheduled(make)
        for make in (
            *(optaxclip.clip_by_global_norm, optaxclip.clip_by_norm, optaxclip.clip_by_block_rms),
            *(optaxclip.adaptive_grad_clip, optaxclip.normalize_by_global_norm, optaxclip.clip),
            *(_any_parts, _with_noise),
        )
    },
    "skip_above scheduled": scheduled(lambda fn: optaxclip.skip_above(optax.identity(), fn)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.usefixtures("standard_promotion")
def test_equal_transformations_compile_once(name):
    grads = random_tree(1, 2) if name.startswith(("per_example", "_with_noise")) else GRADS

    def two_steps():
        tx = MAKERS[name]()
        _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        tx.update(grads, state, PARAMS)

    two_steps()
    with compilations() as new:
        for _ in range(4):
            two_steps()
    assert not new


@pytest.mark.usefixtures("standard_promotion")
def test_schedule_changes_threshold_without_recompilation():
    schedule = optax.piecewise_constant_schedule(4.0, {1: 0.5, 2: 0.5})
    tx = optaxclip.clip_by_global_norm(schedule)
    state, found = tx.init(jnp.zeros(1)), []
    for _ in range(4):
        updates, state = tx.update(jnp.full(1, 9.0), state)
        found.append(updates[0])
    np.testing.assert_allclose(found, [4, 2, 1, 1], rtol=1e-6)


def test_program_contains_no_large_constants():
    grads = [jax.ShapeDtypeStruct((n, 2**20), jnp.float32) for n in (2, 3)]
    tx = optaxclip.adaptive_grad_clip(0.1)
    state = jax.eval_shape(tx.init, grads)
    program = jax.make_jaxpr(tx.update)(grads, state, grads)
    assert sum(np.size(x) for x in program.consts) < 1000


@pytest.mark.by_day(20)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_init_concatenates_no_leaves(name):
    program = jax.make_jaxpr(METHODS[name].make().init)(PARAMS)
    assert "concatenate" not in str(program)
