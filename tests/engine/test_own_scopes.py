"""A scope of a user's own: the example of the site, and what is said of wrong results."""

import re

import jax
import numpy as np
import optax
import pytest
import shown_code
from methods_table import assert_close

import optaxclip
from optaxclip import monitor, scopes, thresholds

(BLOCK,) = (block for block in shown_code.blocks("docs/adding.md") if "by_layer" in block)
SHOWN = shown_code.run(BLOCK, "docs/adding.md")
BY_LAYER, GRADS = SHOWN["by_layer"], SHOWN["grads"]


def test_custom_scope_example_groups_layers():
    found = {name: float(norm) for name, norm in SHOWN["norms_of_layers"].items()}
    assert found == {"layer 0": 5.0, "layer 1": 10.0, "rest": 2.0}


@pytest.mark.slow
def test_custom_scope_works_with_rules_and_records():
    rule = thresholds.ema(0.9, 1.1, record="clipped")
    clip = optaxclip.clip_by(BY_LAYER, rule, norm="rms", strict=True)
    tx = optax.chain(monitor.record(4, scope=BY_LAYER), clip)
    sequence = jax.tree.map(lambda x: np.stack([x, 3 * x, x]), GRADS)

    def step(state, grads):
        return tx.update(grads, state)[::-1]

    last, updates = jax.jit(lambda x: jax.lax.scan(step, tx.init(GRADS), x))(sequence)
    state = tx.init(GRADS)
    for i in range(3):
        grads = jax.tree.map(lambda x, i=i: x[i], sequence)
        expected, state = tx.update(grads, state)
        assert_close(jax.tree.map(lambda x, i=i: x[i], updates), expected)
    assert_close(last, state)
    assert last[1].info.num_clipped.tolist() == [1, 1, 1]


def test_custom_scope_isolates_nonfinite_group():
    bad = GRADS | {"layers": GRADS["layers"] | {"b": np.float32([np.nan, 8.0])}}
    updates, _ = optaxclip.clip_tree(bad, 100.0, scope=BY_LAYER)
    np.testing.assert_array_equal(np.isnan(updates["layers"]["w"]), [[True, True], [False, False]])
    np.testing.assert_array_equal(updates["head"], GRADS["head"])


ONE, WHOLE = scopes.Group(("a",), (0, 1)), ((0,), (0,))
WRONG = {
    "nothing": (
        None,
        TypeError,
        "a scope must return a scopes.Grouping, but this one returned None",
    ),
    "no group": (
        scopes.Grouping(("a",), WHOLE, "vector"),
        TypeError,
        "must contain only scopes.Group",
    ),
    "layout": (
        scopes.Grouping((ONE,), WHOLE, "list"),
        ValueError,
        "Grouping.layout must be one of",
    ),
    "a leaf too few": (
        scopes.Grouping((scopes.Group(("a",), (0,)),), WHOLE, "vector"),
        ValueError,
        "groups and axes for all 2 floating-point leaves",
    ),
    "axes too few": (
        scopes.Grouping((ONE,), WHOLE[:1], "vector"),
        ValueError,
        "and axes for 1 leaves",
    ),
    "an axis that is not there": (
        scopes.Grouping((ONE,), ((0, 1), (0,)), "vector"),
        ValueError,
        "leaf 'x' with shape (3,) and axes (0, 1), group ('a',) must have shape",
    ),
    "shape": (
        scopes.Grouping((ONE,), ((), (0,)), "vector"),
        ValueError,
        "must have shape (3,), but has shape ()",
    ),
    "names": (
        scopes.Grouping((scopes.Group(("a", "b"), (0, 1)),), WHOLE, "vector"),
        ValueError,
        "Group.names must have length 1",
    ),
    "two in a scalar": (
        scopes.Grouping((scopes.Group(("a",), (0,)), scopes.Group(("b",), (1,))), WHOLE, "scalar"),
        ValueError,
        'layout="scalar" must have exactly one group with shape (), but has groups with shapes [()',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_custom_scopes_raise(case):
    result, error, message = WRONG[case]
    message = message if "*" in message else re.escape(message)
    tree = {"x": np.ones(3, np.float32), "y": np.ones(2, np.float32)}
    with pytest.raises(error, match=message):
        optaxclip.clip_by(lambda flat: result, 1.0).init(tree)
    with pytest.raises(error, match=message):
        optaxclip.clip_tree(tree, 1.0, scope=lambda flat: result)
