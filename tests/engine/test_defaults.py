"""What holds without an option, and where the order of names or numbers does not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import clip_by, responses, scopes, thresholds


def test_clip_rounds_bfloat16_to_nearest():
    leaf = jnp.linspace(0.5, 2, 64, dtype=jnp.bfloat16)
    tx = optaxclip.clip_by_global_norm(1.0)
    by_engine = optaxclip.clip_by(scopes.tree(), 1.0)
    info = by_engine.update(leaf, by_engine.init(leaf))[1].info
    exact = np.float64(leaf) * np.float64(info.factor)
    nearest = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
    assert np.any(nearest > exact)
    assert np.any(nearest < exact)
    for updates in (
        tx.update(leaf, tx.init(leaf))[0],
        by_engine.update(leaf, by_engine.init(leaf))[0],
        optaxclip.clip_tree(leaf, 1.0, scope=scopes.tree())[0],
    ):
        np.testing.assert_array_equal(np.float64(updates), nearest)


def test_group_scope_accepts_labels_in_any_order():
    labels = {"a": "south", "b": "east", "c": "west", "d": "north", "e": "east"}
    threshold_values = {"north": 1.0, "east": 2.0, "south": 3.0, "west": 4.0}
    grads = {leaf: jnp.array([10.0 * (1 + i)]) for i, leaf in enumerate(labels)}
    tx = optaxclip.clip_by_group_norm(threshold_values, labels)
    updates, state = tx.update(grads, tx.init(grads))
    norms = {"east": np.hypot(20, 50), "north": 40, "south": 10, "west": 30}
    info = state.info
    plain = optaxclip.clip_tree(grads, threshold_values, scope=scopes.group(labels))[1]
    for names in (info.names, plain.names, tx.init(grads).info.names):
        assert list(names) == sorted(threshold_values)
    np.testing.assert_allclose(info.norm, [norms[name] for name in info.names], rtol=1e-6)
    np.testing.assert_array_equal(info.threshold, [threshold_values[name] for name in info.names])
    for leaf, label in labels.items():
        expected = grads[leaf] * threshold_values[label] / norms[label]
        np.testing.assert_allclose(updates[leaf], expected, rtol=3e-6)


def test_leaf_scope_orders_more_than_ten_leaves():
    grads = [jnp.array([3.0 * (1 + i), 4.0 * (1 + i)]) for i in range(12)]
    threshold_values = {str(i): 1.0 + i for i in range(12)}
    updates, info = optaxclip.clip_tree(grads, threshold_values, scope=scopes.leaf())
    assert list(info.names) == sorted(threshold_values)
    np.testing.assert_array_equal(info.threshold, [threshold_values[name] for name in info.names])
    expected = np.multiply.outer(1.0 + np.arange(12), [0.6, 0.8])
    np.testing.assert_allclose(updates, expected, rtol=3e-6)


def test_unit_scope_function_receives_leaf_paths():
    grads = {"a": np.float32([[3.0, 4.0], [0.0, 5.0]]), "b": [np.float32([[3.0, 4.0], [6.0, 8.0]])]}
    axes = {"a": 1, "b/0": (0, 1)}
    info = optaxclip.clip_tree(grads, 9.0, scope=scopes.unit(lambda path, leaf: axes[path]))[1]
    np.testing.assert_allclose(info.norm, [5, 125**0.5], rtol=1e-6)


def test_leaf_scope_numbers_doubly_stacked_layers():
    names = clip_by(scopes.leaf(stacked=2), 1.0).init({"w": jnp.ones((2, 11, 3))}).info.names
    assert list(names) == [f"w/{i}/{j:02}" for i in range(2) for j in range(11)]


def test_auto_s_with_zero_gamma_normalizes():
    leaf = np.float32([3.0, 4.0])
    updates = optaxclip.clip_tree(leaf, 1.0, scope=scopes.tree(), response=responses.auto_s(0))[0]
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=3e-6)
    for size in np.float32([1e-30, 1e30]):  # whose squares leave the range
        np.testing.assert_allclose(responses.auto_s(0)(size, size, size), size, rtol=1e-6)


def test_response_names_equal_responses_with_defaults():
    assert responses.as_response("auto_s") == responses.auto_s()
    assert responses.as_response("band") == responses.band()


def test_zero_policy_counts_nonfinite_leaf():
    grads = {"a": np.array([np.nan, 1.0], jnp.bfloat16), "b": np.float32([3.0, 4.0])}
    updates, info = optaxclip.clip_tree(grads, 1.0, scope=scopes.leaf(), nonfinite="zero")
    assert list(info.num_nonfinite) == [1, 0]
    np.testing.assert_allclose(info.factor, [0, 0.2], rtol=3e-6)
    np.testing.assert_array_equal(updates["a"], [0, 0])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("tree", [{}, {"w": None}, jnp.zeros(0)], ids=str)
def test_empty_tree_keeps_state_shapes(tree):
    tx = optaxclip.clip_by_global_norm(1.0)
    state = tx.init(tree)
    after = tx.update(tree, state)[1]
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert (after.info.norm, after.info.factor) == (0, 1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("response", ["clip", "normalize", "smooth", "auto_s", "band"])
def test_without_a_threshold_every_response_lets_gradients_be(response):
    # As while a rule has seen too few norms.
    tx = clip_by(scopes.tree(), thresholds.ema(0.9, 1.5, warmup_steps=3), response=response)
    for grads in (np.float32([3.0, 4.0]), jnp.zeros(2)):
        np.testing.assert_array_equal(tx.update(grads, tx.init(grads))[0], grads)


def test_zero_group_records_unit_factor():
    for options in ({"response": "normalize"}, {"strict": True}):
        tx = clip_by(scopes.tree(), 0.5, **options)
        updates, state = tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))
        np.testing.assert_array_equal(updates, [0, 0])
        np.testing.assert_allclose(state.info.factor, 1, rtol=2e-6)


def test_ambiguous_group_names_raise():
    for other in ("a/05", "a/0"):
        grads = {"a": jnp.ones((10, 2)), other: jnp.ones(2)}
        tx = clip_by(scopes.leaf(stacked={"a": 1, other: 0}), 1.0)
        with pytest.raises(ValueError, match=rf"stacked layers in \('a/0', .*'{other}'.*; rename"):
            tx.init(grads)


def test_masked_elements_have_zero_derivative():
    def clip(x):
        return optaxclip.clip_tree([x], 1.0, scope=scopes.tree(), nonfinite="mask")[0][0]

    @jax.jit
    def derivatives(x, weights, tangent):
        found = jax.grad(lambda x: weights @ clip(x))(x)
        return found, jax.jvp(clip, (x,), (tangent,))[1]

    x, weights = np.float32([np.nan, 3, np.inf, 4]), np.float32([1, 2, 3, 4])
    expected, expected_change = derivatives(x[1::2], weights[1::2], weights[:2])
    found, change = derivatives(x, weights, np.float32([np.nan, 1, np.inf, 2]))
    np.testing.assert_allclose(found, [0, expected[0], 0, expected[1]], rtol=1e-6)
    np.testing.assert_allclose(change[1::2], expected_change, rtol=1e-6)
    np.testing.assert_array_equal(change[::2], 0)


def test_grad_norm_applies_only_to_whole_tree():
    grads = {"a": np.float32([jnp.nan, 3.0]), "b": np.float32([6.0, 8.0])}
    by_leaf = clip_by(scopes.leaf(), 1.0, nonfinite="zero")
    masked = clip_by(scopes.tree(), 1.0, nonfinite="mask")
    for tx in (by_leaf, masked):
        given = tx.update(grads, None, grad_norm=9.0)
        jax.tree.map(np.testing.assert_array_equal, given, tx.update(grads, None))
    for options in ({"scope": scopes.leaf()}, {"scope": scopes.tree(), "nonfinite": "mask"}):
        given, expected = (
            optaxclip.clip_tree(grads, 1.0, use_norm=norm, **options) for norm in (9.0, None)
        )
        jax.tree.map(np.testing.assert_array_equal, given, expected)


@pytest.mark.usefixtures("x64")
def test_use_norm_accepts_float64():
    leaf = jnp.array([3e200, 4e200])
    updates, info = optaxclip.clip_tree(leaf, 1.0, scope=scopes.tree(), use_norm=np.float64(5e200))
    assert float(info.norm) == 5e200
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-12)


def test_params_may_be_anything_where_no_threshold_is_relative_to_them():
    grads = {"w": np.float32([3.0, 4.0]), "b": jnp.ones(1)}
    tx = clip_by(scopes.leaf(), 1.0)
    updates, _ = tx.update(grads, tx.init(grads), {"other": "a word"})
    np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)


def test_python_scalars_combine_with_traced_leaves():
    agc = optaxclip.adaptive_grad_clip(0.5)

    def run(x):
        tree = {"x": x, "y": 12.0}
        clipped = clip_by(scopes.tree(), 6.5).update(tree, None)[0]
        by_params = agc.update({"x": x[0]}, None, {"x": 4.0})[0]
        return optaxclip.ops.global_norm(tree), clipped["y"], by_params["x"]

    found = jax.eval_shape(run, jnp.ones(2))
    assert all((x.shape, x.dtype) == ((), jnp.float32) for x in found)


def test_unit_factor_changes_no_bits():
    tiny = np.array([0x0001, 0x8042, 0x3F00], np.uint16).view(jnp.bfloat16)
    options = {"scope": scopes.tree(), "response": responses.clip_with_eps()}
    found, _ = optaxclip.clip_tree(tiny, 0.6, **options)
    assert np.asarray(found).tobytes() == tiny.tobytes()
