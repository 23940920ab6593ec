"""`jax.export` of all transformations: platforms, symbolic shapes, steps stored in bytes."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from jax import export
from methods_table import DISTINCT, GRADS, METHODS, PARAMS, assert_close, assert_same, avals

from optaxclip import clip_by, scopes
from optaxclip._engine.clip import group_norms

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
STACKED = ("leaf_stacked_strict", "both")
SYMBOLIC = {
    "columns": {"w": "6, n", "b": "n", "v": "2*m"},
    "both": {"w": "n, m", "b": "n", "v": "4"},
}
CASES = slow_unless(
    lambda name, case: name in DISTINCT and case == "both",
    [case for case in product(METHODS, SYMBOLIC) if case != STACKED],
)
some_methods = pytest.mark.parametrize("name", ["clip", "clip_by_block_rms", "adaptive_grad_clip"])


def exported(update, *arguments):
    return export.export(jax.jit(update), platforms=PLATFORMS)(*arguments)


def symbolic_tree(shapes):
    scope = export.SymbolicScope()
    return {
        leaf: jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), jnp.float32)
        for leaf, shape in shapes.items()
    }


# The symbolic shapes are exported for all platforms too.
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name in ("clip", STACKED[0]) or name not in DISTINCT, METHODS)
)
def test_export_supports_all_platforms(name):
    method = METHODS[name].make()
    arguments = (GRADS, method.init(PARAMS), PARAMS)
    module = exported(method.update, *arguments)
    assert module.platforms == PLATFORMS
    out = jax.tree.unflatten(module.out_tree, module.out_avals)
    assert avals(out) == avals((GRADS, arguments[1]))


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_export_supports_symbolic_shapes(name, shapes):
    tree, method = symbolic_tree(SYMBOLIC[shapes]), METHODS[name].make()
    state = jax.eval_shape(method.init, tree)
    module = exported(method.update, tree, state, tree)
    assert module.platforms == PLATFORMS
    updates, new_state = jax.tree.unflatten(module.out_tree, module.out_avals)
    assert {leaf: str(x.shape) for leaf, x in updates.items()} == {
        leaf: str(x.shape) for leaf, x in tree.items()
    }
    assert avals(new_state) == avals(state)


def test_stacked_layers_require_fixed_number():
    # Because layers have a name each.
    tree, method = symbolic_tree(SYMBOLIC["both"]), METHODS[STACKED[0]].make()
    stacks = clip_by(scopes.leaf(stacked=2), 1.0)
    for tx, shapes in ((method, tree), (stacks, symbolic_tree({"w": "6, n"}))):
        with pytest.raises(ValueError, match="leaf 'w' must have a fixed number of layers"):
            jax.eval_shape(tx.init, shapes)


@functools.cache
def exported_symbolic(name):
    tree, method = symbolic_tree(SYMBOLIC["both"]), METHODS[name].make()
    return exported(method.update, tree, method.init(GRADS), tree)


@pytest.mark.by_day(1)
@some_methods
@pytest.mark.parametrize("sizes", [(3, 5), (1, 1)])
def test_symbolic_export_accepts_all_sizes(name, sizes):
    n, m = sizes
    rng, method = np.random.default_rng(0), METHODS[name].make()
    shapes = {"w": (n, m), "b": (n,), "v": (4,)}
    grads, params = (
        {leaf: jnp.asarray(rng.normal(size=shape), jnp.float32) for leaf, shape in shapes.items()}
        for _ in range(2)
    )
    state = method.init(params)
    updates, new_state = exported_symbolic(name).call(grads, state, params)
    expected, expected_state = method.update(grads, state, params)
    assert_close(updates, expected)
    assert_close(new_state, expected_state)


def test_symbolic_export_measures_bfloat16_columns():
    leaf = jax.ShapeDtypeStruct(export.symbolic_shape("n, m"), jnp.bfloat16)
    module = exported(functools.partial(group_norms, scope=scopes.axes(0)), leaf)
    found = module.call(jnp.ones((9, 2), jnp.bfloat16))["leaf"]
    np.testing.assert_allclose(found, [3, 3], rtol=1e-6)


pytest.importorskip("flatbuffers", reason="JAX needs it to serialize")


@pytest.fixture(autouse=True, scope="module")
def _states_of_optax():
    for kind in (optax.EmptyState, optax.TraceState):
        export.register_namedtuple_serialization(kind, serialized_name=f"optax.{kind.__name__}")


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "name",
    slow_unless(lambda name: name in ("adagc", "skip_above_loss", "clip_by_group_norm"), METHODS),
)
def test_exported_update_survives_serialization(name):
    tx = METHODS[name].make()
    state = tx.init(PARAMS)
    stored = export.export(jax.jit(tx.update))(GRADS, state, PARAMS).serialize()
    updates, after = export.deserialize(stored).call(GRADS, state, PARAMS)
    expected = tx.update(GRADS, state, PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(expected[1])
    assert_same((updates, after), jax.jit(tx.update)(GRADS, state, PARAMS))
    again = export.deserialize(stored).call(GRADS, after, PARAMS)
    assert jax.tree.structure(again[1]) == jax.tree.structure(after)


def test_serialized_names_stay_stable():
    state = METHODS["skip_above_loss"].make().init(PARAMS)
    stored = export.export(jax.jit(lambda state: state))(state).serialize()
    for name in (b"optaxclip.SkipState", b"optaxclip.ClipInfo", b"optaxclip.LossState"):
        assert name in stored
