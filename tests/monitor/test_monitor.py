"""The monitor: reading records out of any state, flat scalars, and the ring of norms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import optaxclip
from optaxclip import monitor, scopes
from optaxclip.transforms.skip import skip_above, skip_nonfinite

GRADS = {"b": jnp.array([2.0]), "w": jnp.array([3.0, 4.0])}
NORM = np.sqrt(29.0)
BAD = GRADS | {"b": jnp.array([jnp.nan])}


def tree_clip(threshold=1.0, **options):
    return optaxclip.clip_by_global_norm(threshold, **options)


def after(tx, *steps, params=GRADS):
    state = tx.init(params)
    for grads in steps:
        state = tx.update(grads, state, params)[1]
    return state


CLIP, PARTLY = "clip_by_global_norm", {"b": True, "w": False}
SKIPPED = ["skip_nonfinite", f"inner_state/0/{CLIP}", "inner_state/2/again"]


def partitioned():
    transforms = {"mine": tree_clip(), "yours": optaxclip.clip_by_norm(2.0)}
    return optax.partition(transforms, {"b": "mine", "w": "yours"})


def skips():
    chain = optax.chain(tree_clip(4.0), optax.trace(0.5), tree_clip(name="again"))
    return skip_above(skip_nonfinite(chain), 100.0)


# What to make, the keys, and the norm that the first clip sees.
NESTINGS = {
    "alone": (tree_clip, [CLIP], NORM),
    "named": (lambda: tree_clip(name="mine"), ["mine"], NORM),
    "chain": (lambda: optax.chain(tree_clip(), optax.trace(0.5)), [f"0/{CLIP}"], NORM),
    "chain in chain": (
        lambda: optax.chain(optax.identity(), optax.chain(optax.scale(0.5), tree_clip())),
        [f"1/1/{CLIP}"],
        NORM / 2,
    ),
    "named_chain": (lambda: optax.named_chain(("a", tree_clip())), [f"a/{CLIP}"], NORM),
    "masked": (lambda: optax.masked(tree_clip(), PARTLY), [f"inner_state/{CLIP}"], 2.0),
    "partition": (
        partitioned,
        [f"inner_states/mine/inner_state/{CLIP}", "inner_states/yours/inner_state/clip_by_norm"],
        2.0,
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(optax.chain(tree_clip()), 1).gradient_transformation(),
        [f"inner_opt_state/0/{CLIP}"],
        NORM,
    ),
    "finite": (lambda: optax.apply_if_finite(tree_clip(), 3), [f"inner_state/{CLIP}"], NORM),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optaxclip.clip_by_global_norm)(1.0),
        [f"inner_state/{CLIP}"],
        NORM,
    ),
    "skips": (
        skips,
        ["skip_above", *(f"inner_state/{key}" for key in SKIPPED)],
        NORM,
    ),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_read_finds_records_in_nested_states(nesting):
    make, keys, norm = NESTINGS[nesting]
    state = (tx := make()).init(GRADS)
    assert list(monitor.read(state)) == keys
    with jax.numpy_dtype_promotion("standard"):  # which MultiSteps needs
        state = jax.jit(tx.update)(GRADS, state, GRADS)[1]
    infos = monitor.read(state)
    assert list(infos) == keys
    assert all(isinstance(info, optaxclip.ClipInfo) for info in infos.values())
    assert [np.max(info.norm) for info in infos.values()][:1] == pytest.approx([norm][: len(keys)])
    counts = [6 if "skip" in key.split("/")[-1] else 8 for key in keys]
    assert len(monitor.scalars(state)) == sum(counts)


def test_record_of_empty_tree_has_no_columns():
    state = monitor.record(scope=scopes.leaf()).init({})
    assert monitor.history_names(state) == ()
    assert state.ring.shape == (1000, 0)
    assert monitor.scalars(state) == {"record/norm": 0.0, "record/steps": 0.0}


def test_record_reports_largest_norm_per_label():
    tx = monitor.record(scope=optaxclip.scopes.group({"b": "low", "w": "high"}))
    state = tx.init(GRADS)
    states = [state._replace(last={"norm": jnp.array(x)}) for x in ([4.0, 2.0], [3.0, 5.0])]
    for each, expected in (
        (states[0], [4.0, 2.0, 0.0]),
        (jax.tree.map(lambda *x: jnp.stack(x), *states), [4.0, 5.0, 0.0]),
    ):
        found = monitor.scalars(each)
        assert list(found) == ["record/norm/high", "record/norm/low", "record/steps"]
        assert list(found.values()) == expected


def test_record_keeps_order_after_counter_saturates():
    tx = monitor.record(3)
    state, update = tx.init(GRADS)._replace(steps=jnp.int32(2**31 - 2)), jax.jit(tx.update)
    for size in (1.0, 2.0, 3.0, 4.0):
        state = update({"b": jnp.full(1, size), "w": jnp.zeros(2)}, state)[1]
    np.testing.assert_array_equal(monitor.history(state), [2, 3, 4])


def test_record_of_missing_leaves_has_zero_norm():
    tx = monitor.record()
    state = tx.update({"b": None, "w": None}, tx.init(GRADS))[1]
    assert state.last["norm"].shape == ()
    assert state.last["norm"] == 0.0


def test_loss_scale_requires_single_outer_state():
    tx = optaxclip.scale_loss(optax.sgd(0.1))
    state = tx.init(GRADS)
    assert monitor.loss_scale({"a": [state, tree_clip().init(GRADS)]}) == 2.0**15
    for wrong in (skip_nonfinite(optax.chain(tx)), optax.MultiSteps(tx, 2)):
        with pytest.raises(
            ValueError, match=r"scale_loss must not be inside another wrapper, but is in \w+; use"
        ):
            monitor.loss_scale(wrong.init(GRADS))
    for states, found in (
        (tree_clip().init(GRADS), "0 in"),
        ((state,) * 2, "2 in"),
    ):
        with pytest.raises(
            ValueError, match=f"exactly one scale_loss state, but there are {found}"
        ):
            monitor.loss_scale(states)


def test_history_names_raises_if_names_got_lost():
    lost = serialization.to_state_dict(monitor.record(scope=scopes.leaf()).init(GRADS))
    with pytest.raises(ValueError, match="names are missing from the record because"):
        monitor.history_names(lost)


def test_read_searches_lists_dicts_and_tuples():
    state = after(tree_clip(), GRADS)
    tree = {"a": [None, (state,)], "b": optax.EmptyState(), "c": optax.MaskedNode(), "d": 3}
    assert list(monitor.read(tree)) == [f"a/1/0/{CLIP}"]


@jax.tree_util.register_pytree_with_keys_class
class Pair(list):
    """Two children under one key."""

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey("both"), x) for x in self], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children)


def test_read_keeps_records_with_similar_paths():
    state = after(tree_clip(), GRADS)
    infos = monitor.read({"a/b": state, "a": {"b": state}})
    assert list(infos) == [f"['a']['b']/{CLIP}", f"['a/b']/{CLIP}"]
    infos = monitor.read(Pair([state, state]))
    assert list(infos) == [f"['both']/{CLIP}", f"['both']/{CLIP}_1"]
    # What a skip says of the loss has no state of its own.
    skip = skip_above(optax.identity(), 1.0, loss_threshold=1.0, name="s").init(GRADS)
    infos = monitor.read({"a": skip, "a/s": tree_clip(name="loss").init(GRADS)})
    assert list(infos) == ["['a']/s", "['a']/s/loss", "['a/s']/loss"]
    assert [list(info.names) for info in infos.values()] == [["tree"], ["loss"], ["tree"]]


def test_read_returns_same_names_under_jit():
    tx = skips()
    state, seen = tx.init(GRADS), []

    @jax.jit
    def step(grads, state):
        state = tx.update(grads, state, GRADS)[1]
        seen.append(list(monitor.read(state)))
        return state, monitor.read(state)

    names, keys = list(monitor.scalars(state)), list(monitor.read(state))
    for grads in (GRADS, BAD, GRADS):
        state, infos = step(grads, state)
        assert list(monitor.scalars(state)) == names
        # What jit returns is sorted, as every dict that crosses it.
        assert sorted(infos) == sorted(keys)
        jax.tree.map(np.testing.assert_array_equal, infos, monitor.read(state))
    assert seen == [keys]


@pytest.mark.parametrize("function", [monitor.scalars, monitor.history])
def test_scalars_and_history_under_jit_raise(function):
    state = after(optax.chain(tree_clip(), monitor.record(3)), GRADS)
    with pytest.raises(TypeError, match=r"inside jit.* contains tracers.*pass the state that"):
        jax.jit(function)(state)


def test_monitor_reads_train_state():
    tx = optax.chain(tree_clip(), optax.sgd(0.1))
    state = TrainState.create(apply_fn=None, params=GRADS, tx=tx).apply_gradients(grads=GRADS)
    assert list(monitor.read(state)) == [f"opt_state/0/{CLIP}"]
    assert monitor.scalars(state)[f"{CLIP}/norm"] == pytest.approx(NORM)


def test_monitor_reads_nnx_optimizer():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = optax.chain(monitor.record(3), skip_nonfinite(optax.chain(tree_clip(), optax.sgd(0.1))))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 2)))))(model))

    step(model, optimizer)
    keys, infos = ["1/skip_nonfinite", f"1/inner_state/0/{CLIP}"], monitor.read(optimizer)
    assert list(monitor.read(optimizer.opt_state)) == keys
    assert list(infos) == [f"opt_state/{key}" for key in keys]
    assert all(type(info.norm) is type(jnp.ones(())) for info in infos.values())
    assert monitor.scalars(optimizer)[f"{CLIP}/norm"] == pytest.approx(np.sqrt(3.0))
    np.testing.assert_allclose(monitor.history(optimizer), [np.sqrt(3.0)], rtol=1e-6)


def sizes(steps, seed=0):
    """Gradients of many steps, stacked, and their norms: of the tree, and of its leaves."""
    rng = np.random.default_rng(seed)
    stacked = {"b": rng.normal(size=(steps, 3)), "w": rng.normal(size=(steps, 2, 2))}
    stacked = {name: x.astype(np.float32) for name, x in stacked.items()}
    leaves = [np.sqrt(np.sum(x.reshape(steps, -1) ** 2, axis=1)) for x in stacked.values()]
    return stacked, np.hypot(*leaves), np.stack(leaves, axis=1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("per_leaf", [False, True])
def test_history_returns_last_norms(per_leaf):
    steps, *norms = sizes(13)
    tx = monitor.record(window=5, scope=scopes.leaf() if per_leaf else None)
    state, update = tx.init({"b": jnp.zeros(3), "w": jnp.zeros((2, 2))}), jax.jit(tx.update)
    assert monitor.history(state).shape == (0, 2)[: 1 + per_leaf]
    assert monitor.history_names(state) == (("b", "w") if per_leaf else ("tree",))
    for i in range(13):
        grads = {name: x[i] for name, x in steps.items()}
        updates, state = update(grads, state)
        jax.tree.map(np.testing.assert_array_equal, updates, grads)
        history = monitor.history(state)
        assert history.dtype == np.float32
        np.testing.assert_allclose(history, norms[per_leaf][max(i - 4, 0) : i + 1], rtol=1e-6)
    assert update._cache_size() == 1


@pytest.mark.by_day(1)
@pytest.mark.parametrize("per_leaf", [False, True])
def test_record_works_in_scan_and_vmap(per_leaf):
    steps, *norms = sizes(8)
    tx = monitor.record(window=6, scope=scopes.leaf() if per_leaf else None)
    start = tx.init({name: x[0] for name, x in steps.items()})
    state = jax.lax.scan(lambda state, grads: tx.update(grads, state)[::-1], start, steps)[0]
    np.testing.assert_allclose(monitor.history(state), norms[per_leaf][-6:], rtol=1e-6)
    states = jax.jit(jax.vmap(lambda grads: tx.update(grads, start)[1]))(steps)
    last = jax.tree.map(lambda x: x[-1], states)
    np.testing.assert_allclose(monitor.history(last), norms[per_leaf][-1:], rtol=1e-6)
    with pytest.raises(ValueError, match="states stacked by vmap"):
        monitor.history(states)


def test_record_passes_updates_through():
    tx = monitor.record(window=2, scope=scopes.leaf())
    state = tx.update(GRADS, tx.init(GRADS))[1]
    with jax.transfer_guard("disallow"):
        updates, state = tx.update(GRADS, state, None, value=1.0)
    assert updates is GRADS
    jax.eval_shape(tx.update, GRADS, state)  # needs no numbers
    state = after(monitor.record(scope=scopes.leaf()), GRADS, GRADS | {"w": None}, BAD)
    np.testing.assert_array_equal(monitor.history(state), [[2, 5], [2, np.nan], [np.nan, 5]])
    np.testing.assert_array_equal(monitor.history(after(monitor.record(), BAD)), [np.nan])
    with pytest.raises(
        ValueError, match=r"record: state must be .*, got None.* state = tx.init\(params"
    ):
        tx.update(GRADS, None)
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,))
    sharded = jax.device_put(GRADS, jax.NamedSharding(mesh, jax.P("x")))
    assert monitor.history(after(tx, sharded, sharded)).shape == (2, 2)
    with pytest.raises(
        ValueError,
        match=r"record: updates must not contain groups .*, but contain \['v'\]",
    ):
        tx.update(GRADS | {"v": jnp.ones(1)}, state)
    for window in (0, -1, 2.0, None):
        with pytest.raises((TypeError, ValueError), match="window must be an int >= 1"):
            monitor.record(window)
