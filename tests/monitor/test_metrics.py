"""The records as flat scalars: `metrics` on the device, `scalars` the same on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import AxisType

import optaxclip
from optaxclip import monitor, scopes
from optaxclip.transforms.skip import skip_above, skip_nonfinite

GRADS = {"b": jnp.array([2.0]), "w": jnp.array([3.0, 4.0])}
NORM = np.sqrt(29.0)
BAD = GRADS | {"b": jnp.array([jnp.nan])}
NAMES = ["norm", "threshold", "factor", "clipped_norm", "clipped_fraction", "num_clipped"]
NAMES += ["num_nonfinite", "steps"]
SKIP_NAMES = ["norm", "threshold", "factor", "clipped_norm", "num_nonfinite", "num_skipped"]
CLIP, LEAVES = "clip_by_global_norm", "clip_by_norm"


def tree_clip(threshold=1.0, **options):
    return optaxclip.clip_by_global_norm(threshold, **options)


def by_label(**options):
    return optaxclip.clip_by_group_norm(1.0, {"b": "critic", "w": "actor"}, **options)


def after(tx, *steps, params=GRADS, **extra):
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in steps:
        state = update(grads, state, params, **extra)[1]
    return state


def everything(inner=None):
    """A chain with each kind of record in it."""
    last = skip_above(
        optax.chain(tree_clip(0.5), optax.sgd(1.0)), 100.0, loss_threshold=1.0, name="skip"
    )
    return optax.chain(by_label(), optaxclip.clip_by_norm(1.0), tree_clip(), inner or last)


def assert_the_same(state, **options):
    """Both give the same names and numbers, which are returned."""
    numbers, in_order = monitor.scalars(state, **options), []

    @jax.jit
    def metrics(state):
        found = monitor.metrics(state, **options)
        in_order.extend(found)
        return found

    arrays = metrics(state)
    assert list(numbers) == in_order
    assert sorted(numbers) == list(arrays)
    for name, x in arrays.items():
        assert x.shape == ()
        np.testing.assert_allclose(np.float64(x), numbers[name], rtol=1e-6, err_msg=name)
    return numbers


def test_metrics_have_expected_names_and_numbers():
    numbers = assert_the_same(after(everything(), GRADS, value=2.0), prefix="train/")
    first = [
        f"clip_by_group_norm/{name}/{label}" for name in NAMES[:-1] for label in ("actor", "critic")
    ]
    first.append("clip_by_group_norm/steps")  # which all labels share
    rest = {LEAVES: NAMES, CLIP: NAMES, "skip": [*SKIP_NAMES, "loss", "loss_threshold"]}
    expected = [*first, *(f"{one}/{name}" for one, names in rest.items() for name in names)]
    expected += [f"{CLIP}_1/{name}" for name in NAMES]
    assert list(numbers) == [f"train/{name}" for name in expected]
    assert numbers["train/clip_by_group_norm/norm/actor"] == 5.0
    assert numbers["train/clip_by_group_norm/factor/critic"] == 0.5
    assert numbers["train/clip_by_group_norm/clipped_fraction/critic"] == 1.0
    assert numbers["train/skip/loss"] == 2.0
    assert numbers[f"train/{CLIP}_1/threshold"] == np.inf  # as the skip let nothing through
    for function in (monitor.scalars, monitor.metrics):
        with pytest.raises(TypeError, match="prefix must be a string"):
            function(tree_clip().init(GRADS), 3)


def test_metrics_number_equal_names():
    tx = optax.chain(tree_clip(), tree_clip(0.5), tree_clip(0.25, name=f"{CLIP}_1"))
    numbers = monitor.scalars(after(tx, GRADS))
    assert [numbers[f"{CLIP}{end}/threshold"] for end in ("", "_1", "_1_1")] == [1.0, 0.5, 0.25]
    assert len(numbers) == 3 * len(NAMES)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("where", ["scan", "vmap", "tracked", "untracked", "explicit", "nnx"])
def test_metrics_work_inside_compiled_functions(where):
    tx, steps = everything(tree_clip(0.5)), jax.tree.map(lambda x: jnp.stack([x, 2 * x]), GRADS)
    states = [after(tx, GRADS), after(tx, GRADS, jax.tree.map(lambda x: 2 * x, GRADS))]

    def step(state, grads):
        state = tx.update(grads, state)[1]
        return state, monitor.metrics(state)

    if where == "scan":
        found = jax.jit(lambda: jax.lax.scan(step, tx.init(GRADS), steps)[1])()
        expected = [monitor.scalars(state) for state in states]
    elif where == "vmap":
        found = jax.jit(jax.vmap(lambda grads: step(tx.init(GRADS), grads)[1]))(steps)
        double = jax.tree.map(lambda x: 2 * x, GRADS)
        expected = [monitor.scalars(after(tx, grads)) for grads in (GRADS, double)]
    elif where == "nnx":
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tree_clip(), wrt=nnx.Param)
        found = nnx.jit(monitor.metrics)(optimizer)
        found, expected = jax.tree.map(lambda x: x[None], found), [monitor.scalars(optimizer)]
    else:
        kind = AxisType.Explicit if where == "explicit" else AxisType.Auto
        mesh = jax.make_mesh((2,), ("data",), (kind,))
        spec = jax.P("data")
        grads = {"b": jnp.zeros(2), "w": jnp.arange(4.0)}
        expected = [monitor.scalars(after(tree_clip(), grads))]
        tx = tree_clip(specs=jax.P("data")) if where == "untracked" else tree_clip()

        def on_devices(grads):
            return monitor.metrics(tx.update(grads, tx.init(grads))[1])

        if where != "explicit":
            check = {"check_vma": where == "tracked"}
            on_devices = jax.shard_map(
                on_devices, mesh=mesh, in_specs=spec, out_specs=jax.P(), **check
            )
        with jax.set_mesh(mesh):
            found = jax.jit(on_devices)(jax.device_put(grads, jax.NamedSharding(mesh, spec)))
        found = jax.tree.map(lambda x: x[None], found)
    assert sorted(found) == sorted(expected[0])
    for name, column in found.items():
        wanted = [row[name] for row in expected]
        np.testing.assert_allclose(column, wanted, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("function", [monitor.read, monitor.scalars, monitor.metrics])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (GRADS, r"dict with the leaves 'b', 'w'; pass the optimizer's state"),
        (tree_clip(), "Transformation with the leaves 'init', 'update'"),
        (optaxclip.clip(1.0).init(GRADS), "ClipByValueState with the leaves 'steps'"),
        (tree_clip(record=False).init(GRADS), "record=False"),
        (optax.adam(0.1).init(GRADS), r"tuple with the leaves '0/count', .*, \.\.\.; pass"),
        (None, "NoneType without leaves"),
    ],
)
def test_monitor_functions_without_record_raise(function, given, said):
    subject = f"^monitor.{function.__name__}: opt_state"
    with pytest.raises(ValueError, match=rf"{subject} must contain.*{said}"):
        function(given)


def bare(tree):
    """Without names and what is empty, as `nnx.state` has it."""
    if not isinstance(tree, dict):
        return tree
    kept = {key: bare(x) for key, x in tree.items() if key not in ("name", "names", "leaves")}
    return {key: x for key, x in kept.items() if not isinstance(x, dict) or x}


def test_monitor_reads_states_stored_as_dicts():
    inner = optaxclip.skip_above(optax.chain(tree_clip(), optax.sgd(0.1)), 9.0, loss_threshold=3.0)
    chain = monitor.record(3), optaxclip.clip_by_norm(0.5), monitor.noise_scale()
    state = optax.chain(*chain, optaxclip.scale_loss(inner)).init(GRADS)
    taken_apart = serialization.to_state_dict(state)
    keys = ["1/clip", *(f"3/skip/{key}" for key in ("skip", "inner_state/skip"))]
    keys += [f"3/skip/inner_state/{key}" for key in ("skip/loss", "inner_state/0/clip")]
    for each in (taken_apart, bare(taken_apart)):
        assert list(monitor.read(each)) == keys
        assert len(monitor.scalars(each)) == len(monitor.scalars(state))
        # Beside it the leaves of a state that has kept its names are known.
        assert monitor.bad_leaves([each, optaxclip.clip_by_norm(1.0).init(GRADS)]) == ()
    with pytest.raises(
        ValueError,
        match=r"must contain a clipping stage .*, got a pytree of type dict with the leaves",
    ):
        monitor.read({"steps": 1, "info": {"norm": 1.0}})


def test_scalars_report_last_step_and_counts():
    tx = optax.chain(tree_clip(4.0), skip_above(optax.trace(0.5), 1.0))
    small = jax.tree.map(lambda x: x / 8, GRADS)
    state = tx.init(GRADS)
    assert list(monitor.scalars(state).values())[:4] == [0.0, np.inf, 1.0, 0.0]
    state = after(tx, GRADS, BAD, small, small, GRADS)
    numbers = monitor.scalars(state)
    assert all(type(number) is float for number in numbers.values())
    of_clip = [numbers[f"{CLIP}/{name}"] for name in NAMES]
    assert of_clip == pytest.approx([NORM, 4.0, 4.0 / NORM, 4.0, 2 / 5, 2.0, 1.0, 5.0])
    of_skip = [numbers[f"skip_above/{name}"] for name in SKIP_NAMES]
    assert of_skip == pytest.approx([4.0, 1.0, 0.0, 0.0, 1.0, 3.0])


def per_leaf_state(**columns):
    """A state of four steps with these columns."""
    params = {f"leaf{i}": jnp.zeros(1) for i in range(len(columns["norm"]))}
    state = optaxclip.clip_by_norm(1.0).init(params)
    arrays = {name: jnp.array(column) for name, column in columns.items()}
    return state._replace(steps=jnp.int32(4), info=state.info._replace(**arrays))


def test_scalars_report_worst_of_several_leaves():
    measured = {"norm": [8.0, 3.0, 0.1], "threshold": [4.0, 1.0, 1.0], "factor": [0.5, 0.25, 1.0]}
    state = per_leaf_state(**measured, num_clipped=[2, 4, 0], num_nonfinite=[0, 1, 3])
    expected = zip(NAMES, [3.0, 1.0, 0.25, 0.75, 1.0, 4.0, 3.0, 4.0], strict=True)
    assert monitor.scalars([state]) == {f"{LEAVES}/{name}": x for name, x in expected}


@pytest.mark.parametrize(
    ("norm", "threshold", "worst"),
    [
        ([2.0, np.nan, 1.0], [1.0, 9.0, 1.0], 1),
        ([2.0, 1.0, np.inf], [1.0, 1.0, np.inf], 2),
        ([2.0, 1.0, 1.0], [1.0, 0.0, 1.0], 1),
        ([1e38, 2e38, 1.0], [1e-38, 1e-38, 1.0], 1),
        ([0.0, 0.0, 0.0], [np.inf, np.inf, np.inf], 0),
    ],
)
def test_scalars_select_leaf_with_largest_excess(norm, threshold, worst):
    state = per_leaf_state(norm=norm, threshold=threshold, factor=[0.0, 1.0, 2.0])
    numbers = monitor.scalars(state)
    assert numbers[f"{LEAVES}/factor"] == worst
    np.testing.assert_array_equal(numbers[f"{LEAVES}/norm"], np.float32(norm[worst]))


def test_scalars_prefer_first_of_nearly_equal_ratios():
    thresholds = np.random.default_rng(0).uniform(0.1, 10.0, 300).astype(np.float32)
    state = per_leaf_state(norm=3 * thresholds, threshold=thresholds, factor=np.arange(300.0))
    assert assert_the_same(state)[f"{LEAVES}/factor"] == 0.0
    state = per_leaf_state(norm=[3.0, 3.00001], threshold=[1.0, 1.0], factor=[0.0, 1.0])
    assert assert_the_same(state)[f"{LEAVES}/factor"] == 1.0


def test_scalars_accept_empty_and_vmapped_states():
    empty = monitor.scalars(optaxclip.clip_by_norm(1.0).init({}))
    assert list(empty.values()) == [0.0, np.inf, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    tx = optaxclip.clip_by_norm(4.5)
    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), GRADS)
    state = jax.jit(jax.vmap(lambda grads: tx.update(grads, tx.init(GRADS))[1]))(batch)
    numbers = monitor.scalars(state)
    assert numbers[f"{LEAVES}/norm"] == 10.0
    assert numbers[f"{LEAVES}/clipped_fraction"] == 1


def test_scalars_reduce_vmapped_states_as_documented():
    """Whichever of them comes first."""

    def of(skipped, loss, threshold, scale, clipped, signal):
        skip = skip_above(optax.identity(), 1.0, loss_threshold=1.0).init(GRADS)
        info = skip.loss.info._replace(norm=jnp.float32(loss), threshold=jnp.float32(threshold))
        skip = skip._replace(num_skipped=jnp.int32(skipped), loss=skip.loss._replace(info=info))
        scaled = optaxclip.scale_loss(optax.identity()).init(GRADS)
        scaled = scaled._replace(loss_scale=jnp.float32(scale))
        clip = optaxclip.clip_by_norm(1.0).init(GRADS)
        counts = {"num_clipped": jnp.full(2, clipped), "num_nonfinite": jnp.full(2, clipped)}
        clip = clip._replace(steps=jnp.int32(8), info=clip.info._replace(**counts))
        noise = monitor.noise_scale().init(GRADS)
        noise = noise._replace(steps=jnp.int32(skipped), signal=signal, variance=2 * signal)
        record = monitor.record(2).init(GRADS)
        record = record._replace(steps=jnp.int32(clipped), last={"norm": jnp.float32(loss)})
        leaves = monitor.record(2, scope=scopes.leaf(), name="leaves").init(GRADS)
        leaves = leaves._replace(last={"norm": jnp.array([loss - 2, 2.5])})
        return skip, scaled, clip, noise, record, leaves

    # The second skip has not run, and its noise scale has no steps.
    states = (
        of(3, 5.0, 4.5, 4.0, 2, jnp.float32(1)),
        of(0, 2.0, 1.0, 8.0, 4, jnp.float32(3)),
    )
    for pair in (states, states[::-1]):
        numbers = monitor.scalars(jax.tree.map(lambda *x: np.stack(x), *pair), top=1)
        expected = {
            "skip_above/num_skipped": 3,
            "skip_above/loss": 2,  # which is further above its threshold
            "skip_above/loss_threshold": 1,
            "scale_loss/loss_scale": 4,
            f"{LEAVES}/num_clipped": 4,
            f"{LEAVES}/num_nonfinite": 4,
            f"{LEAVES}/clipped_fraction": 4 / 8,
            f"{LEAVES}/steps": 8,
            "noise_scale/signal": 2,
            "noise_scale/scale": 2,
            "record/norm": 5,
            "record/steps": 4,
            "leaves/top/0/norm": 3,
        }
        assert {name: numbers[name] for name in expected} == expected


@pytest.mark.by_day(1)
@pytest.mark.parametrize("leaves", [1, 1000])
def test_scalars_need_single_transfer(monkeypatch, leaves):
    clip = optaxclip.clip_by_norm(1.0)
    state = optax.chain(clip, skip_nonfinite(optax.chain(clip, optax.sgd(1.0)))).init(
        {f"{i}": 0.0 for i in range(leaves)}
    )
    state, calls = jax.tree.map(jnp.copy, state), []  # arrays that share no buffers
    expected, device_get = monitor.scalars(state), jax.device_get

    def fetch_and_delete(arrays):
        calls.append(len(jax.tree.leaves(arrays)))
        fetched = jax.tree.map(np.copy, device_get(arrays))
        jax.tree.map(lambda x: x.delete(), state)  # nothing can be fetched any more
        return fetched

    monkeypatch.setattr(jax, "device_get", fetch_and_delete)
    assert monitor.scalars(state) == expected
    assert calls == [6 + 5 + 6]


def test_clipped_fraction_is_that_of_num_clipped():
    tx = optaxclip.clip_by_norm(1.0)
    grads = {"a": jnp.zeros((0,)), "b": jnp.ones(1), "c": jnp.ones(1) * 2}
    state = tx.init(grads)
    for by in (1.0, 0.1, 2.0, 1.0):
        state = tx.update(jax.tree.map(lambda x, by=by: x * by, grads), state)[1]
    numbers = monitor.scalars(state)
    assert (numbers[f"{LEAVES}/num_clipped"], numbers[f"{LEAVES}/clipped_fraction"]) == (3, 0.75)


def test_entries_have_keys_for_each_layer():
    scope = scopes.leaf(stacked={"layers": 1})
    stages = (optaxclip.clip_by(scope, 2.5), monitor.record(scope=scope, stats=("norm", "max")))
    tx = optax.chain(*stages, monitor.histogram(scope=scope), optaxclip.clip_by_global_norm(1.0))
    grads = {"layers": jnp.array([[3.0, 4.0], [0.0, 2.0]]), "head": jnp.array([1.0])}
    state = tx.update(grads, tx.init(grads))[1]
    numbers = monitor.scalars(state, per_group=True)
    by_layer = {"head": 1, "layers/0": 5, "layers/1": 2}
    assert {name: numbers[f"clip_by/norm/{name}"] for name in by_layer} == by_layer
    assert numbers["clip_by/num_clipped/layers/0"] == numbers["clip_by/steps"] == 1
    assert numbers["record/max/layers/1"] == numbers["record/norm/layers/1"] == 2
    assert numbers["histogram/median_exponent/layers/1"] == 0
    assert "clip_by/norm" not in numbers
    np.testing.assert_allclose(numbers["clip_by_global_norm/norm"], 11.25**0.5, rtol=1e-5)
    inside = jax.jit(lambda state: monitor.metrics(state, per_group=True))(state)
    assert inside.keys() == numbers.keys()
    np.testing.assert_allclose([*map(float, map(inside.get, numbers))], [*numbers.values()])
    for checked_first in (state, ()):
        with pytest.raises(TypeError, match="per_group must be"):
            monitor.scalars(checked_first, per_group=1)


def test_learning_rates_are_in_the_log():
    schedule = optax.linear_schedule(0.2, 0.0, 2)
    tx = optax.chain(
        optaxclip.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
        optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=0.5),
    )
    update, state = jax.jit(tx.update), tx.init(jnp.zeros(2))
    for _ in range(2):
        state = update(jnp.ones(2), state)[1]
    for numbers in (monitor.scalars(state, "a/"), jax.jit(monitor.metrics)(state)):
        names = [name for name in numbers if "learning_rate" in name]
        np.testing.assert_allclose([numbers[name] for name in names], [0.1, 0.5])
    assert '"learning_rate": 0.1' in monitor.json_line(state)
