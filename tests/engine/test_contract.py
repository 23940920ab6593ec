"""One contract for all transformations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from methods_table import (
    DISTINCT,
    GRADS,
    METHODS,
    ONE_OF_EACH,
    PARAMS,
    SHAPES,
    TYPICAL,
    assert_close,
    assert_same,
    at,
    avals,
    compilations,
    label,
    random_tree,
    stack,
)

import optaxclip

STEPS = 20
SEQUENCE = jax.tree.map(np.asarray, random_tree(2, STEPS))
each_method = pytest.mark.parametrize("name", METHODS)


def usual_threshold(name):
    return jnp.float32(METHODS[name].hyper[1])


def plain_step(name):
    def step(threshold, grads, state, params=PARAMS):
        return METHODS[name].make(threshold).update(grads, state, params)

    return step


@functools.cache
def first_run(name):
    """The compiled step that the tests share, what all steps gave, and the compilations of that."""
    step = jax.jit(plain_step(name))
    found = run(name, [at(SEQUENCE, i) for i in range(STEPS)], step=step)
    return step, found, step._cache_size()


@functools.cache
def fresh_state(name):
    return METHODS[name].make().init(PARAMS)


def run(name, grads_of_steps, threshold=None, step=None):
    """The updates and states of all steps."""
    step, threshold = (
        step or first_run(name)[0],
        usual_threshold(name) if threshold is None else threshold,
    )
    state, states, updates = fresh_state(name), [], []
    for grads in grads_of_steps:
        update, state = step(threshold, grads, state, PARAMS)
        updates, states = [*updates, update], [*states, state]
    return updates, states


def unlike_any(name):
    """A tree of every kind of leaf, and parameters for it; `axes` needs one axis at least."""
    shape = () if METHODS[name].shares not in ("row", "column") or "unit" in name else (1,)

    def struct(shape, dtype, weak_type=False):
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)

    tree = {
        "w": struct((2, 3), jnp.bfloat16),
        "half": [struct((3,), jnp.float16), None, {}],
        "single": struct((2, 2), jnp.float32),
        "complex": struct((2,), jnp.complex64),
        "weak": struct(shape, jnp.float32, weak_type=True),
        "empty": struct((0, 3), jnp.float32),
        "whole": struct((2,), jnp.int32),
        "flag": struct((), jnp.bool_),
        "no tangent": np.zeros((2,), jax.dtypes.float0),
        "key": jax.random.key(0),
    }
    if jax.config.jax_enable_x64:
        tree |= {"double": struct((3,), jnp.float64), "wide": struct((3,), jnp.complex128)}
    return tree


THRESHOLDS = {"number": 1.0, "NumPy": np.float16(1.0), "bfloat16": jnp.bfloat16, "float": float}
# Their first numbers are decays, percentiles or quantiles, which must not be narrower.
IN_FLOAT32 = {"autoclip", "clip_by_quantile", "clip_by_moving_max", "normalize_by_norm_history"}
# A threshold that is known and one that is traced, for each number of bits.
QUICK = [(32, "number"), (32, "bfloat16"), (64, "NumPy"), (64, "float")]


@pytest.mark.by_day(8)
@each_method
@pytest.mark.parametrize(
    ("bits", "kind"),
    slow_unless(lambda *case: case in QUICK, itertools.product((32, 64), THRESHOLDS)),
)
def test_update_keeps_avals_of_leaves_and_state(name, bits, kind):
    with jax.enable_x64(bits == 64):
        tree = unlike_any(name)
        state = jax.eval_shape(METHODS[name].make().init, tree)
        threshold = THRESHOLDS[kind]
        if name in IN_FLOAT32:
            threshold = {"NumPy": np.float32(1.0), "bfloat16": jnp.float32}.get(kind, threshold)
        if isinstance(threshold, type):
            traced = jax.ShapeDtypeStruct((), threshold)
            update, new_state = jax.eval_shape(plain_step(name), traced, tree, state, tree)
        else:
            update, new_state = jax.eval_shape(
                METHODS[name].make(threshold).update, tree, state, tree
            )
        assert avals(update) == avals(tree)
        assert avals(new_state) == avals(state)


@pytest.mark.by_day(12)
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_unless(
        lambda name, dtype: dtype == "bfloat16" or name in ONE_OF_EACH,
        itertools.product(METHODS, ["bfloat16", "float16", "complex64"]),
    ),
)
def test_state_ignores_dtype_of_gradients(name, dtype):
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), PARAMS)
    state = METHODS[name].make().init(PARAMS)
    update, new_state = jax.eval_shape(METHODS[name].make().update, grads, state, PARAMS)
    widened = METHODS[name].widens and dtype == "float16"
    assert avals(update) == avals(PARAMS if widened else grads)
    assert avals(new_state) == avals(state)


@pytest.mark.by_day(2)
@each_method
def test_update_compiles_once_for_all_steps(name):
    _, (updates, states), num_compilations = first_run(name)
    assert num_compilations == 1
    if METHODS[name].has_info:
        assert states[-1].steps == STEPS
    for state in (states[0], states[-1]):
        assert avals(state) == avals(METHODS[name].make().init(PARAMS))
    assert avals(updates[-1]) == avals(GRADS)


@pytest.mark.gpu
@pytest.mark.by_day(3)
@each_method
def test_methods_clip_and_only_shrink(name):
    _, (updates, states), _ = first_run(name)
    results = stack(updates)
    assert any(np.any(results[leaf] != SEQUENCE[leaf]) for leaf in SHAPES)
    if METHODS[name].keeps_small:
        assert all(np.all(np.abs(results[leaf]) <= np.abs(SEQUENCE[leaf])) for leaf in SHAPES)
        small = jax.tree.map(lambda x: x / 1024, GRADS)
        assert_same(run(name, [small])[0][0], small)
    if METHODS[name].has_info:
        assert isinstance(states[0], optaxclip.ClipState)
        assert np.sum(states[-1].info.num_clipped) > 0


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", slow_unless(lambda name: name in DISTINCT, METHODS))
def test_eager_update_matches_jit_and_compiles_once(name):
    _, expected, _ = first_run(name)
    state = None
    for i in range(4):
        with compilations() as new:
            # Made anew for each step, as where a hyperparameter is injected.
            method = METHODS[name].make()
            fresh, grads = method.init(PARAMS), jax.tree.map(jnp.asarray, at(SEQUENCE, i))
            before = state if i else fresh
            updates, state = method.update(grads, before, PARAMS)
        assert i < 2 or not new
        assert_close(updates, expected[0][i], atol=METHODS[name].atol)
        assert_close(state, expected[1][i])
        with compilations() as new:
            of_numpy = method.update(*jax.tree.map(np.asarray, (grads, before, PARAMS)))
        assert not new
        assert_same(of_numpy, (updates, state))


def test_compilations_counts_new_compilations():
    with compilations() as new:
        jax.jit(lambda x: x + 1)(1)
    assert len(new) == 1


def scan(name):
    def steps(threshold, sequence, state):
        def body(state, grads):
            return plain_step(name)(threshold, grads, state)[::-1]

        return jax.lax.scan(body, state, sequence)

    return steps


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["clip", "unit_smooth", "zclip", "adagc"])
def test_update_in_scan_matches_loop(name):
    _, (updates, states), _ = first_run(name)
    start = METHODS[name].make().init(PARAMS)
    last, all_updates = jax.jit(scan(name))(usual_threshold(name), SEQUENCE, start)
    assert_close(last, states[-1])
    assert_close(all_updates, stack(updates))


# By day one that remembers.
@pytest.mark.parametrize("name", slow_unless("adagc".__eq__, DISTINCT))
def test_scan_under_vmap_over_thresholds_trees_and_states_equals_loops(name):
    method, half = METHODS[name].make(), usual_threshold(name) / 2
    fresh, steps = method.init(PARAMS), 8  # which go round in each window
    trees = [jax.tree.map(lambda x, i=i: np.flip(x)[i : i + steps], SEQUENCE) for i in (0, 12)]
    lanes = [(threshold, tree) for threshold in (usual_threshold(name), half) for tree in trees]
    loops = [run(name, [at(tree, i) for i in range(steps)], threshold) for threshold, tree in lanes]
    over_trees = jax.vmap(scan(name), in_axes=(None, 0, 0))
    over_thresholds = jax.jit(jax.vmap(over_trees, in_axes=(0, None, None)))
    thresholds = np.stack([usual_threshold(name), half])
    last, updates = over_thresholds(thresholds, stack(trees), stack([fresh, fresh]))

    def as_lanes(results):
        return jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), stack(results))

    assert_close(last, as_lanes([states[-1] for _, states in loops]))
    alone = as_lanes([stack(updates) for updates, _ in loops])
    assert_close(updates, alone, atol=METHODS[name].atol)


def reverse(name, state, *point):
    """The gradients with respect to threshold, gradients and parameters."""
    _, pull_back = jax.vjp(lambda *args: update_only(name, state, *args), *point)
    return pull_back(random_tree(5))


def forward(name, state, *point):
    tangents = (jnp.ones(()), random_tree(5), random_tree(6))
    return jax.jvp(lambda *args: update_only(name, state, *args), point, tangents)[1]


def update_only(name, state, threshold, grads, params):
    return plain_step(name)(threshold, grads, state, params)[0]


FORWARD = ["clip", "clip_by_global_norm", "adaptive_grad_clip", "adagc"]
DERIVATIVES = [(reverse, name) for name in DISTINCT] + [(forward, name) for name in FORWARD]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("derivative", "name"), slow_unless(lambda _, name: name in TYPICAL, DERIVATIVES)
)
def test_method_derivatives_stay_finite(derivative, name):
    at_point = functools.partial(derivative, name, METHODS[name].make().init(PARAMS))
    zeros, least = jax.tree.map(jnp.zeros_like, GRADS), jnp.float32(0)
    if METHODS[name].has_memory:
        least = usual_threshold(name) / 2  # not every number of a rule may be 0
    points = [
        (usual_threshold(name), GRADS, PARAMS),
        (usual_threshold(name), GRADS | {"v": zeros["v"]}, PARAMS),
        (usual_threshold(name), zeros, PARAMS),
        (least, GRADS, PARAMS),
        (least, zeros, zeros),
    ]
    compiled = jax.jit(at_point)
    found = [jax.tree.leaves(compiled(*point)) for point in points]
    assert all(np.all(np.isfinite(x)) for leaves in found for x in leaves)
    assert any(np.any(np.asarray(x) != 0) for x in found[0])


def together(name, leaf, index):
    """Which entries become NaN with the given one."""
    shares, mask = METHODS[name].shares, {x: np.zeros(shape, bool) for x, shape in SHAPES.items()}
    if shares == "entry":
        mask[leaf][index] = True
    elif shares == "row":
        mask[leaf][index[:-1]] = True
    elif shares == "column":
        mask[leaf][(..., *index[1:])] = True
    else:
        members = {"leaf": [leaf], "label": [x for x in SHAPES if label(x, 0) == label(leaf, 0)]}
        for member in members.get(shares, SHAPES):
            mask[member][...] = True
    return mask


def with_entry(leaf, index, value):
    """The gradients with another number in one place."""
    changed = np.array(GRADS[leaf])
    changed[index] = value
    return GRADS | {leaf: changed}


@pytest.mark.gpu
@pytest.mark.by_day(40)
@pytest.mark.parametrize(
    "name", slow_unless(DISTINCT.__contains__, [x for x in METHODS if METHODS[x].shares])
)
@pytest.mark.parametrize(("leaf", "index"), [("w", (2, 5)), ("b", (1,))])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_element_affects_only_corresponding_group(name, leaf, index, value):
    bad = with_entry(leaf, index, value)
    entry = METHODS[name].shares == "entry"
    before = [GRADS] * (entry and METHODS[name].has_memory)  # else it has no bound
    (*_, updates), (*_, state) = run(name, [*before, bad])
    mask, bad_value = together(name, leaf, index), 0 if METHODS[name].shares == "step" else np.nan
    untouched = run(name, [*before, GRADS])[0][-1]
    if entry and np.isinf(value):
        large = with_entry(leaf, index, np.sign(value) * 9)
        return assert_same(updates, run(name, [*before, large])[0][-1])
    for key in SHAPES:
        np.testing.assert_array_equal(updates[key], np.where(mask[key], bad_value, untouched[key]))
    assert not METHODS[name].has_info or np.sum(state.info.num_nonfinite) == 1
    return None


@pytest.mark.by_day(16)
@pytest.mark.parametrize("name", slow_unless(DISTINCT.__contains__, METHODS))
def test_finite_step_ignores_earlier_nonfinite_steps(name):
    method = METHODS[name]
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), GRADS)
    updates, states = run(name, [at(SEQUENCE, 0), bad, bad, GRADS])
    instead = [GRADS, GRADS] if method.counts else []
    expected, without = run(name, [at(SEQUENCE, 0), *instead, GRADS])
    assert not (method.counts and method.has_memory), "no such method yet: compare by other means"
    assert_same(updates[-1], expected[-1])
    if method.has_info and not method.counts:
        assert_same(states[-1].rule, without[-1].rule)


# What wraps an optimizer has no state without the one of that.
WRAPPERS = {"scale_loss", "skip_above", "skip_above_loss", "skip_nonfinite"}


def needs_its_state(name):
    method = METHODS[name]
    return method.has_memory or method.counts or method.keeps_first


@pytest.mark.by_day(8)
@pytest.mark.parametrize(
    "name",
    slow_unless(
        lambda name: needs_its_state(name) or name in ONE_OF_EACH,
        [x for x in DISTINCT if x not in WRAPPERS],
    ),
)
def test_update_without_state_initializes_or_raises(name):
    tx = METHODS[name].make()
    begin = functools.partial(tx.update, GRADS, None, PARAMS, value=1.0, grad=None)
    if needs_its_state(name):
        with pytest.raises(ValueError, match=r"state must be .* got None.*call updates, state = "):
            begin()
    else:
        assert_same(begin(), tx.update(GRADS, tx.init(PARAMS), PARAMS))


@pytest.mark.by_day(25)
@pytest.mark.parametrize(
    ("name", "missing"),
    slow_unless(
        lambda name, missing: missing == "w" or name in ONE_OF_EACH,
        itertools.product(METHODS, ["b", "bv", "w", "wbv"]),
    ),
)
def test_update_accepts_none_gradients(name, missing):
    method = METHODS[name].make()
    grads, state = GRADS | dict.fromkeys(missing), method.init(PARAMS)
    updates, new_state = jax.eval_shape(method.update, grads, state, PARAMS)
    assert avals(updates) == avals(grads)
    assert avals(new_state) == avals(state)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "name", ["clip_by_norm", "clip_by_group_norm_dict", "adaptive_grad_clip", "clip"]
)
def test_none_leaf_leaves_other_groups_unchanged(name):
    whole = run(name, [GRADS])[0][0]
    method = METHODS[name].make()
    updates, state = method.update(GRADS | {"w": None}, method.init(PARAMS), PARAMS)
    assert_close(updates, whole | {"w": None})
    assert state.steps == 1
