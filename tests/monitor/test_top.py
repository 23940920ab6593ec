"""The worst few leaves in a log: `top=` of `metrics`, `scalars`, `json_line`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from flax import serialization
from jax.sharding import AxisType

import optaxclip
from optaxclip import monitor, scopes

SIZES = {"a": 2.0, "b": 30.0, "c": 0.5, "d": 7.0}
GRADS = {name: jnp.array([size, 0.0]) for name, size in SIZES.items()}
LABELS = {"a": "low", "b": "high", "c": "low", "d": "mid"}
LAYERS = scopes.leaf(stacked=1)


def chain():
    return optax.chain(
        monitor.record(3, scope=scopes.leaf(), stats=("norm", "max", "zero_fraction")),
        monitor.record(3, stats=("norm", "share"), name="whole"),
        monitor.record(3, scope=scopes.leaf(), stats=("ratio", "share"), name="shares"),
        optaxclip.clip_by_norm({"a": 0.1, "b": 10.0, "c": 1.0, "d": 0.07}),
        optaxclip.clip_by_group_norm(5.0, LABELS),
        optaxclip.clip_by_norm(1.0, axes=-1, name="units"),
        optaxclip.skip_nonfinite(optax.sgd(0.1)),
    )


def after(tx, grads, params=GRADS):
    return jax.jit(tx.update)(grads, tx.init(params), params)[1]


def both(state, top, **options):
    """What `scalars` gives, after a check that `metrics` gives the same inside of `jit`."""
    found = monitor.scalars(state, top=top, **options)
    inside = jax.jit(lambda state: monitor.metrics(state, top=top, **options))(state)
    assert {name.replace("/name", "/index") for name in found} == inside.keys()
    numbers = {name: x for name, x in found.items() if not isinstance(x, str)}
    np.testing.assert_allclose([float(inside[x]) for x in numbers], [*numbers.values()], rtol=1e-6)
    return found, inside


def column(found, name, field, count=3):
    return [found[f"{name}/top/{i}/{field}"] for i in range(count)]


def test_top_lists_worst_leaves_first():
    state = after(chain(), GRADS)
    found, inside = both(state, 3)
    plain = monitor.scalars(state)
    assert found | plain == found
    assert list(filter(plain.get, plain)) == [x for x in filter(found.get, found) if x in plain]
    assert column(found, "record", "name") == ["b", "d", "a"]
    assert column(found, "record", "norm") == column(found, "record", "max") == [30.0, 7.0, 2.0]
    assert column(found, "record", "zero_fraction") == [0.5, 0.5, 0.5]
    # The ratio of norm to threshold decides: 100, 20 and 3.
    assert column(found, "clip_by_norm", "name") == ["d", "a", "b"]
    assert column(found, "clip_by_norm", "threshold") == pytest.approx([0.07, 0.1, 10.0])
    assert column(found, "clip_by_norm", "clipped_norm") == pytest.approx([0.07, 0.1, 10.0])
    assert column(found, "clip_by_group_norm", "name", 1) == ["high"]
    assert column(found, "shares", "name") == ["b", "d", "a"]
    assert column(found, "units", "name", 1) == ["b"]
    assert not [x for x in found if x.startswith(("whole/top", "skip_nonfinite/top"))]
    assert column(inside, "record", "index") == [1, 3, 0]
    assert inside["record/top/0/index"].dtype == jnp.int32
    names = monitor.history_names(state, "record")
    assert [names[i] for i in column(inside, "record", "index")] == column(found, "record", "name")
    line = json.loads(monitor.json_line(state, top=1, step=3))
    assert line["record/top/0/name"] == "b"
    assert line["record/top/0/norm"] == 30.0


def test_top_lists_at_most_all_leaves():
    state = after(optaxclip.clip_by_norm(1.0), GRADS)
    found, _ = both(state, 9, prefix="train/")
    assert column(found, "train/clip_by_norm", "name", 4) == ["b", "d", "a", "c"]
    assert "train/clip_by_norm/top/4/norm" not in found
    assert found.keys() == monitor.scalars(state, "train/", top=4).keys()


def test_top_orders_equal_leaves_by_name():
    state = after(monitor.record(2, scope=scopes.leaf()), dict.fromkeys("abcd", jnp.zeros(1)))
    assert column(both(state, 4)[0], "record", "name", 4) == [*"abcd"]


def test_top_lists_nonfinite_first_and_missing_last():
    tx = monitor.record(2, scope=scopes.leaf())
    bad = GRADS | {"a": None, "c": jnp.full(2, jnp.nan), "d": jnp.full(2, jnp.inf)}
    found, _ = both(after(tx, bad), 4)
    assert column(found, "record", "name", 4) == ["c", "d", "b", "a"]
    np.testing.assert_array_equal(column(found, "record", "norm", 4), [np.nan, np.inf, 30, np.nan])
    found, _ = both(after(optaxclip.clip_by_norm(1.0), bad), 2)
    assert column(found, "clip_by_norm", "name", 2) == ["c", "d"]


@pytest.mark.slow
def test_top_counts_leaves_once_across_vmapped_states():
    def step(size):
        tx = optax.chain(monitor.record(2, scope=scopes.leaf()), optaxclip.clip_by_norm(1.0))
        grads = {name: size * x for name, x in GRADS.items()} | {"c": 5 / size * GRADS["c"]}
        return tx.update(grads, tx.init(GRADS))[1]

    found, _ = both(jax.jit(jax.vmap(step))(jnp.array([1.0, 0.1, 2.0])), 3)
    for name in ("record", "clip_by_norm"):
        assert column(found, name, "name") == ["b", "c", "d"]
        assert column(found, name, "norm") == [60.0, 25.0, 14.0]


@pytest.mark.parametrize(
    "kind", slow_unless(lambda kind: kind == AxisType.Explicit, [AxisType.Auto, AxisType.Explicit])
)
def test_top_works_on_mesh(kind):
    mesh = jax.make_mesh((2,), ("x",), (kind,))
    tx = optax.chain(monitor.record(2, scope=scopes.leaf()), optaxclip.clip_by_norm(1.0))
    with jax.set_mesh(mesh):
        grads = jax.device_put(GRADS, jax.NamedSharding(mesh, jax.P("x")))
        step = jax.jit(lambda grads: monitor.metrics(tx.update(grads, tx.init(grads))[1], top=2))
        found = step(grads)
    assert (
        column(found, "record", "index", 2) == column(found, "clip_by_norm", "index", 2) == [1, 3]
    )


def test_top_rejects_invalid_values():
    state = after(optax.chain(monitor.record(2), optaxclip.clip_by_global_norm(1.0)), GRADS)
    for function in (monitor.scalars, monitor.metrics):
        with pytest.raises(
            ValueError,
            match=r"^top must be 0 unless .* got 3; add monitor\.record\(scope=scopes",
        ):
            function(state, top=3)
        with pytest.raises(ValueError, match="top must be an int >= 0, got -1"):
            function(state, top=-1)
        with pytest.raises(TypeError, match=r"top must be an int >= 0, got 1\.5"):
            function(state, top=1.5)
    lost = serialization.to_state_dict(after(optaxclip.clip_by_norm(1.0), GRADS))
    assert column(monitor.metrics(lost, top=2), "clip", "index", 2) == [1, 3]
    with pytest.raises(
        ValueError, match=r"names are missing from the state of clip.* pass the nnx\.Optimizer"
    ):
        monitor.scalars(lost, top=2)
