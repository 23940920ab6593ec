"""`jax.export` stores a step with its state in bytes, by names that stay, for another process."""

import jax
import optax
import pytest
from cases import slow_unless
from jax import export
from methods_table import GRADS, METHODS, PARAMS, assert_same

pytest.importorskip("flatbuffers", reason="JAX needs it to serialize")


@pytest.fixture(autouse=True, scope="module")
def _states_of_optax():
    for kind in (optax.EmptyState, optax.TraceState):
        export.register_namedtuple_serialization(kind, serialized_name=f"optax.{kind.__name__}")


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "name",
    slow_unless(lambda name: name in ("adagc", "skip_above_loss", "clip_by_group_norm"), METHODS),
)
def test_a_step_survives_bytes(name):
    tx = METHODS[name].make()
    state = tx.init(PARAMS)
    stored = export.export(jax.jit(tx.update))(GRADS, state, PARAMS).serialize()
    updates, after = export.deserialize(stored).call(GRADS, state, PARAMS)
    expected = tx.update(GRADS, state, PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(expected[1])
    assert_same((updates, after), jax.jit(tx.update)(GRADS, state, PARAMS))
    again = export.deserialize(stored).call(GRADS, after, PARAMS)
    assert jax.tree.structure(again[1]) == jax.tree.structure(after)


def test_names_do_not_change():
    state = METHODS["skip_above_loss"].make().init(PARAMS)
    stored = export.export(jax.jit(lambda state: state))(state).serialize()
    for name in (b"optaxclip.SkipState", b"optaxclip.ClipInfo", b"optaxclip.LossState"):
        assert name in stored
