"""Microbatches of a batch that is split over devices: as on one, and nothing is gathered."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NEEDS_JAX_0_10_2, slow_unless
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import accumulate, thresholds

DEVICES, EXAMPLES, NUMBER = 8, 64, 4
COLUMNS = {"w": P(None, "d"), "b": P()}
PLAIN = {"reject_rule": None, "compute_norms": False}
JUDGES = {
    "default": {},
    "clip": {"clip": 0.05},
    "rule": {"clip": 0.05, "reject_rule": thresholds.ema(0.9, 1.2, debias=True)},
    "plain": PLAIN,
}


@functools.cache
def task(judge):
    """Parameters and a batch; the device that has some of its examples has some of each part."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (8, 16)), "b": jnp.zeros(16)}
    x = jax.random.normal(keys[1], (EXAMPLES, 8))
    # The second microbatch is larger than the others, the third has a NaN.
    x = x.at[1::NUMBER].multiply(30.0)
    if JUDGES[judge] is not PLAIN:
        x = x.at[2, 0].set(jnp.nan)
    return params, x, (jnp.arange(EXAMPLES) % 5 + 1).astype(jnp.float32)


def loss_fn(params, x, tokens):
    of_each = jnp.mean(jnp.square(x @ params["w"] + params["b"][None]), axis=1)
    return jnp.sum(of_each * tokens) / jnp.sum(tokens)


def weight(x, tokens):
    return jnp.sum(tokens)


def made(loss=loss_fn, size=EXAMPLES // NUMBER, **options):
    options = {"weight": weight, **options}
    grad_fn = accumulate.value_and_grad(loss, batch_argnums=(1, 2), microbatch_size=size, **options)
    return lambda *args: grad_fn(*args, state=grad_fn.init(*args))


@functools.cache
def on_one_device(judge):
    return jax.jit(made(**JUDGES[judge]))(*task(judge))


def assert_as_on_one_device(found, judge):
    expected = on_one_device(judge)
    rejected = {"default": [2], "clip": [2], "rule": [1, 2], "plain": []}
    assert list(np.flatnonzero(expected[2].rejected)) == rejected[judge]

    def check(x, y):
        largest = np.max(np.abs(y), initial=0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * largest)

    jax.tree.map(check, found, expected)


def mesh_of(kind):
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,))


def placed(mesh, specs, judge):
    params, *batch = task(judge)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, P("d")))
    return jax.device_put(params, places[0]), *jax.device_put(batch, places[1])


def collectives_of(compiled):
    """In the loop and outside of it: the shapes that each collective is over."""
    inside, outside, current = [], [], None
    for line in compiled.as_text().splitlines():
        if re.match(r"%|ENTRY", line):
            current = outside if line.startswith("ENTRY") else inside
        found = re.search(r"= (.*?) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", line)
        if found:
            current.append((found[2], re.findall(r"\w+\[[\d,]*\]", found[1])))
    return inside, outside


def kinds(found):
    return {kind for kind, _ in found}


def of_gradients(found):
    """Those that are over matrices, whole or in parts."""
    return [kind for kind, shapes in found if any("," in shape for shape in shapes)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("judge", slow_unless(lambda judge: judge != "clip", JUDGES))
def test_accumulate_under_jit_matches_single_device(kind, judge):
    mesh = mesh_of(kind)
    args = placed(mesh, P(), judge)
    with jax.set_mesh(mesh):
        compiled = jax.jit(made(**JUDGES[judge])).lower(*args).compile()
        found = compiled(*args)
    assert_as_on_one_device(found, judge)
    inside, outside = collectives_of(compiled)
    assert kinds(inside) == {"all-reduce"}
    assert of_gradients(inside) == ["all-reduce"]
    assert outside == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("judge", slow_unless(lambda judge: judge == "rule", JUDGES))
def test_accumulate_sums_keep_params_sharding(kind, judge):
    """FSDP: each device keeps its share of the sum, and of the batch nothing is gathered."""

    def loss(params, *batch):
        if kind == AxisType.Explicit:
            params = params | {"w": jax.reshard(params["w"], P())}
        return loss_fn(params, *batch)

    mesh = mesh_of(kind)
    args = placed(mesh, COLUMNS, judge)
    with jax.set_mesh(mesh):
        compiled = jax.jit(made(loss, **JUDGES[judge])).lower(*args).compile()
        found = compiled(*args)
    assert_as_on_one_device(found, judge)
    assert found[1]["w"].sharding.is_equivalent_to(NamedSharding(mesh, COLUMNS["w"]), 2)
    inside, outside = collectives_of(compiled)
    assert kinds(inside) == {"all-reduce"}
    # Parameters alone are gathered, once, and the sum of squares of the mean is added up.
    gathered = [shapes for kind, shapes in outside if kind == "all-gather"]
    assert gathered == [["f32[8,16]"]]
    assert kinds(outside) <= {"all-gather", "all-reduce"}


def loss_over_devices(params, x, tokens):
    of_each = jnp.mean(jnp.square(x @ params["w"] + params["b"][None]), axis=1)
    total, number = jax.lax.psum((jnp.sum(of_each * tokens), jnp.sum(tokens)), "d")
    return total / number


def weight_over_devices(x, tokens):
    return jax.lax.psum(jnp.sum(tokens), "d")


def loss_of_shards(params, *batch):
    whole = jax.lax.all_gather(params["w"], "d", axis=1, tiled=True)
    return loss_fn(params | {"w": whole}, *batch)


LOSSES = {
    "of a part": (loss_fn, weight, P()),
    "of all": (loss_over_devices, weight_over_devices, P()),
    "of all, weight of a part": (loss_over_devices, weight, P()),
    "FSDP": (loss_of_shards, weight, COLUMNS),
}
# Without tracking a loss is that of a device's part.
SHARD_MAPS = [(loss, True) for loss in LOSSES] + [("of a part", False), ("FSDP", False)]


def in_shard_map(loss, check_vma, judge):
    loss, weighted, specs = LOSSES[loss]
    told = {} if check_vma else {"axis_name": "d", "specs": None if specs == P() else specs}
    by_parts = made(loss, EXAMPLES // NUMBER // DEVICES, weight=weighted, **told, **JUDGES[judge])
    mesh = mesh_of(AxisType.Auto)
    places = {"in_specs": (specs, P("d"), P("d")), "out_specs": (P(), specs, P())}
    args = placed(mesh, specs, judge)
    run = jax.shard_map(by_parts, mesh=mesh, check_vma=check_vma, **places)
    compiled = jax.jit(run).lower(*args).compile()
    return compiled(*args), collectives_of(compiled)


# By day each loss with one way to judge, and each way with several losses.
QUICK = [("of a part", True, "rule"), ("of all", True, "plain"), ("FSDP", True, "rule")]
QUICK += [("of all, weight of a part", True, "plain"), ("of a part", False, "plain")]
QUICK += [("of a part", False, "default"), ("FSDP", True, "plain")]


@pytest.mark.parametrize(
    ("loss", "check_vma", "judge"),
    slow_unless(
        lambda *case: case in QUICK, [(*way, judge) for way in SHARD_MAPS for judge in JUDGES]
    ),
)
def test_accumulate_in_shard_map_matches_single_device(loss, check_vma, judge):
    found, (inside, outside) = in_shard_map(loss, check_vma, judge)
    assert_as_on_one_device(found, judge)
    if loss == "FSDP":
        # What gathers a leaf also scatters its gradient, in each turn.
        assert of_gradients(inside).count("reduce-scatter") == 1
        assert "all-gather" not in kinds(inside)
    elif judge == "plain":
        assert of_gradients(inside) == []
        assert of_gradients(outside) == ["all-reduce"]
        # With the losses and weights, unless the loss itself, or the weight, adds up over devices.
        of_user = {"of a part": 0, "of all": 1, "of all, weight of a part": 1}[loss]
        # Before it comes a scalar, the largest weight.
        assert (len(inside), len(outside)) == (of_user, 2)
    else:
        # Of a loss of all by the weight of a part XLA may leave two, side by side.
        most = 2 if loss == "of all, weight of a part" else 1
        assert of_gradients(inside) in [["all-reduce"] * number for number in range(1, most + 1)]
        assert outside == []


@pytest.mark.by_day(1)
@pytest.mark.parametrize("options", [{}, PLAIN])
def test_accumulate_without_weight_counts_all_devices(options):
    def loss(w, x):
        return jnp.mean(jnp.square(x - w))

    x, mesh = jnp.arange(4.0 * DEVICES) ** 2, mesh_of(AxisType.Auto)
    by_parts = accumulate.value_and_grad(loss, microbatch_size=2, **options)
    run = jax.shard_map(by_parts, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    value, grads, found = jax.jit(run)(jnp.float32(1), x)
    np.testing.assert_allclose(value, loss(1, x), rtol=1e-6)
    np.testing.assert_allclose(grads, 2 * jnp.mean(1 - x), rtol=1e-6)
    np.testing.assert_array_equal(found.weight, [2 * DEVICES] * 2)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("judge", ["plain", "default"])
def test_accumulate_weights_overflow_over_devices(judge):
    """The weights of all devices and microbatches add up to 1e39."""

    def loss(w, x, weight):
        return jnp.sum(x * w)

    by_parts = accumulate.value_and_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=1,
        weight=lambda x, weight: jnp.sum(weight),
        **JUDGES[judge],
    )
    x, weights = jnp.arange(4.0 * DEVICES), jnp.full(4 * DEVICES, 3.0 * 1e38 / DEVICES)
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P()}
    run = jax.shard_map(by_parts, mesh=mesh_of(AxisType.Auto), **specs)
    value, grads, _ = jax.jit(run)(jnp.float32(1), x, weights)
    np.testing.assert_allclose([value, grads], np.mean(x), rtol=1e-6)


def test_unmeasured_accumulate_stays_finite_with_zero_weight_devices():
    def loss(w, x):
        return jnp.sum(w * x) / jnp.sum(jnp.abs(jnp.sign(x)))  # NaN for the first device

    by_parts = accumulate.value_and_grad(
        loss, microbatch_size=1, weight=lambda x: jnp.sum(x != 0), **PLAIN
    )
    x = jnp.full(2 * DEVICES, 3e38).at[:2].set(0)
    specs = {"in_specs": (P(), P("d")), "out_specs": P()}
    run = jax.jit(jax.shard_map(by_parts, mesh=mesh_of(AxisType.Auto), **specs))
    for unit in (1, 1e37):
        value, grads, found = run(jnp.float32(1), x / unit)
        np.testing.assert_allclose([value, grads, *found.loss], 3e38 / unit, rtol=1e-6)


def test_accumulate_averages_narrow_losses_in_float32():
    def loss(w, x):
        return jnp.mean(w * x).astype(jnp.bfloat16)

    specs = {"in_specs": (P(), P("d")), "out_specs": P()}
    for judge in PLAIN, {}:
        by_parts = accumulate.value_and_grad(loss, microbatch_size=1, **judge)
        run = jax.shard_map(by_parts, mesh=mesh_of(AxisType.Auto), **specs)
        value, _, found = jax.eval_shape(run, jnp.float32(1), jnp.ones(2 * DEVICES))
        assert value.dtype == found.loss.dtype == jnp.float32


def test_accumulate_axis_name_under_vmap_matches_single_device():
    params, *batch = task("default")
    parts = [x.reshape(DEVICES, -1, *x.shape[1:]) for x in batch]
    by_parts = made(size=EXAMPLES // NUMBER // DEVICES, axis_name="v")
    run = jax.vmap(by_parts, (None, 0, 0), out_axes=None, axis_name="v")
    assert_as_on_one_device(jax.jit(run)(params, *parts), "default")


@NEEDS_JAX_0_10_2
@pytest.mark.by_day(1)
@pytest.mark.parametrize("judge", slow_unless(lambda judge: judge == "rule", JUDGES))
@pytest.mark.parametrize("is_mesh_set", [False, True])
def test_accumulate_vmaps_seeds_over_explicit_mesh(judge, is_mesh_set):
    args = task(judge)
    seeds = [jax.tree.map(lambda x: np.stack([x] * DEVICES), tree) for tree in args]
    mesh = mesh_of(AxisType.Explicit)
    seeds = jax.device_put(seeds, NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh) if is_mesh_set else contextlib.nullcontext():
        found = jax.device_get(jax.jit(jax.vmap(made(**JUDGES[judge])))(*seeds))
    for seed in range(0, DEVICES, DEVICES - 1):
        assert_as_on_one_device(jax.tree.map(lambda x, seed=seed: x[seed], found), judge)


@NEEDS_JAX_0_10_2
def test_accumulate_vmaps_sharded_batches_over_explicit_mesh():
    mesh = mesh_of(AxisType.Explicit)
    x = jax.device_put(np.ones((DEVICES, 4), np.float32), NamedSharding(mesh, P("d")))
    by_parts = accumulate.value_and_grad(lambda w, x: jnp.mean(w * x), microbatch_size=2)
    of_seeds = jax.vmap(by_parts, in_axes=(None, 0))
    assert jax.eval_shape(of_seeds, jnp.float32(2), x)[1].shape == (DEVICES,)


@pytest.mark.slow
def test_microbatch_size_must_divide_device_batch():
    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(
        made(size=3), mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=(P(), P(), P())
    )
    with pytest.raises(ValueError, match="must divide the per-device batch size, got 3 for 8"):
        run(*task("plain"))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("options", [{}, PLAIN])
def test_accumulate_raises_for_unknown_batch_sharding(options):
    run = jax.shard_map(
        made(size=2, **options),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P(), P("d"), P("d")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    with pytest.raises(
        ValueError, match=r"axis_name is required .*; pass those of the axes \['d'\]"
    ):
        run(*task("plain"))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("options", [{}, PLAIN])
def test_accumulate_raises_for_invalid_specs(options):
    run = jax.shard_map(
        made(size=2, axis_name="d", specs="d", **options),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P(), P("d"), P("d")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    with pytest.raises(TypeError, match="specs must be a pytree of PartitionSpec or NamedSharding"):
        run(*task("plain"))
