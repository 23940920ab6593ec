"""`optax.tree_map_params` over every transformation, and what Optax asks of any that is given it.

As `contrib/_common_test.py` of Optax: a state that was mapped is the same in the next step, in
`scan` and `cond`.
"""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from cases import slow_unless
from methods_table import GRADS, METHODS, PARAMS, TYPICAL, avals, label, random_tree
from parts_table import RULES, SCOPES, TRANSFORMATIONS

import optaxclip
from optaxclip import monitor, scopes, thresholds
from optaxclip._base.state import StaticNames

MOMENTS = {
    "StableAdamState": ("mu", "nu"),
    "SecondMomentState": ("moments",),
    "ScaleByAdamState": ("mu", "nu"),
    "TraceState": ("trace",),
    "MultiStepsState": ("acc_grads",),
}
"""Fields with the shapes of the parameters, ours and Optax's."""


def moments_of(state):
    """The identities of all moments in a state."""
    return {
        id(x)
        for kind, fields in MOMENTS.items()
        for _, found in optax.tree.get_all_with_path(state, kind)
        for x in jax.tree.leaves([getattr(found, field) for field in fields])
    }


def names_in(state):
    """All names in a state, in order; JAX does not list them, as they belong to its structure."""
    if isinstance(state, StaticNames):
        return [list(state)]
    children = state.values() if isinstance(state, dict) else state
    is_node = isinstance(state, (dict, list, tuple))
    return [names for child in children for names in names_in(child)] if is_node else []


def injected():
    make = optax.inject_hyperparams(optaxclip.scale_by_stable_adam)
    return optax.chain(optaxclip.clip_by_norm(1.0), make(clipping_threshold=0.5))


def in_everything():
    clips = optax.chain(optaxclip.zclip(), optaxclip.clip_by_norm(1.0), optax.adam(0.1))
    return optaxclip.skip_above(optaxclip.skip_nonfinite(clips), thresholds.zscore())


def of_rule(scope, rule):
    return lambda: optaxclip.clip_by(SCOPES[scope], RULES[rule]())


CASES = {name: lambda name=name: TRANSFORMATIONS[name] for name in TRANSFORMATIONS}
PAIRS = [*zip(itertools.cycle(SCOPES), RULES), *((scope, "zscore") for scope in SCOPES)]
CASES |= {f"{scope}, {rule}": of_rule(scope, rule) for scope, rule in PAIRS}
CASES |= {
    "rules by name": lambda: optaxclip.clip_by(
        scopes.group(label), {"matrix": thresholds.zscore(), "vector": 1.0}
    ),
    "loss": lambda: monitor.record(4, loss=True),
    "injected": injected,
    "in everything": in_everything,
    "named_chain": lambda: optax.named_chain(
        ("agc", optaxclip.adaptive_grad_clip(0.1)), ("adam", optax.scale_by_adam())
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(
        optax.chain(optaxclip.clip_by_norm(1.0), optax.trace(0.9)), 3
    ),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.chain(optaxclip.clip_by_norm(1.0), optax.trace(0.9)), 2
    ).gradient_transformation(),
}


def gradients(name):
    return random_tree(2, 2) if name.startswith("per_example") else GRADS


def update_of(tx):
    """With all that some transformation wants."""
    return lambda grads, state: tx.update(grads, state, PARAMS, value=1.0)


QUICK = [name for name in CASES if name not in METHODS or name in TYPICAL]
QUICK = [name for name in QUICK if not name.endswith(", zscore") or name.startswith("group")]


@pytest.mark.by_day(4)
@pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, CASES))
def test_tree_map_params_keeps_states_usable(name):
    tx, grads = CASES[name](), gradients(name)
    step = jax.jit(chex.assert_max_traces(update_of(tx), n=1))
    with jax.numpy_dtype_promotion("standard"):  # which MultiSteps needs
        state = jax.eval_shape(tx.init, PARAMS)
        seen, others = [], []
        mapped = optax.tree_map_params(
            tx,
            lambda x: seen.append(x) or x,
            state,
            transform_non_params=lambda x: others.append(x) or x,
        )
        assert jax.tree.structure(mapped) == jax.tree.structure(state)
        assert {id(x) for x in seen} == moments_of(state)
        assert len(seen) + len(others) == len(jax.tree.leaves(state))
        # The same leaves in one program: what comes out is the same, and need not be computed.
        leaves = zip(jax.tree.leaves(mapped), jax.tree.leaves(state), strict=True)
        assert all(x is y for x, y in leaves)
        of_mapped = step.eval_shape(grads, mapped)
        assert of_mapped == step.eval_shape(grads, state)
        # Names come back at the next step, also where a program was first made for a state without
        # them; but `MultiSteps` keeps the structure of the state before.
        names = [names_in(of_mapped[1])]

        def again(state):
            after = update_of(tx)(grads, state)[1]
            names.append(names_in(after))
            return after

        after = jax.eval_shape(lambda s: jax.lax.cond(True, again, lambda s: s, s), mapped)
        assert avals(after) == avals(mapped)
        assert (names == [names_in(state)] * 2) == (name != "MultiSteps")


@pytest.mark.by_day(15)
@pytest.mark.parametrize("name", CASES)
def test_tree_map_params_derives_specs_for_states(name):
    tx = CASES[name]()
    shapes = jax.eval_shape(tx.init, PARAMS)
    of_params = {leaf: jax.P(leaf) for leaf in PARAMS}
    specs = optax.tree_map_params(
        tx, lambda _, spec: spec, shapes, of_params, transform_non_params=lambda _: jax.P()
    )
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    rows = zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True)
    by_shape = {PARAMS[leaf].shape: jax.P(leaf) for leaf in PARAMS}
    moments = moments_of(shapes)
    for shape, spec in rows:
        assert spec == (by_shape[shape.shape] if id(shape) in moments else jax.P())


def test_static_names_have_equal_hashes():
    # A dict compares hashes before it compares keys.
    assert {StaticNames(("b", "w")): 1}[StaticNames()] == 1


@pytest.mark.slow
def test_jit_distinguishes_labels_from_leaf_names():
    """A function compiled for the one is not used for the other."""
    log = jax.jit(monitor.metrics)
    for scope in (scopes.leaf(), scopes.group({name: name for name in GRADS})):
        tx = optaxclip.clip_by(scope, 1.0)
        _, state = tx.update(GRADS, tx.init(PARAMS))
        assert set(log(state)) == set(monitor.metrics(state))


def test_lost_names_error_restores_names():
    tx = optax.MultiSteps(optaxclip.clip_by_norm(1.0), 2)
    state = optax.tree_map_params(tx, lambda x: x, tx.init(PARAMS))
    with jax.numpy_dtype_promotion("standard"):
        _, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    line = (
        r"restore the names with state = "
        r"(jax.tree.map\(lambda _, x: x, tx.init\(params\), state\))$"
    )
    with pytest.raises(ValueError, match=line) as error:
        monitor.bad_leaves(state)
    code = re.search(line, str(error.value)).group(1)
    state = eval(code, {"jax": jax, "tx": tx, "params": PARAMS, "state": state})
    assert monitor.bad_leaves(state) == ()
    (info,) = monitor.read(state).values()
    assert list(info.names) == ["b", "v", "w"]


def test_missing_or_unknown_groups_require_names():
    tx = optaxclip.clip_by_norm(1.0)
    mapped = optax.tree_map_params(tx, lambda x: x, tx.init(PARAMS))
    with pytest.raises(ValueError, match="state must have the names of its 3 groups"):
        tx.update(GRADS | {"v": None}, mapped)
    with pytest.raises(ValueError, match=r"passed to init lacked, but contain \['u'\]"):
        tx.update(GRADS | {"u": jnp.ones(1)}, tx.init(PARAMS))


def test_skip_nonfinite_restores_names_with_all_leaves():
    tx = optaxclip.skip_nonfinite(optax.identity())
    state = optax.tree_map_params(tx, lambda x: x, tx.init(PARAMS))
    for grads, names in ((GRADS | {"v": None}, []), (GRADS, ["b", "v", "w"])):
        _, state = tx.update(grads, state)
        assert (list(state.leaves), state.is_bad_leaf.shape) == (names, (3,))
