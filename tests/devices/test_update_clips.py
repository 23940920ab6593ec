"""Clips of updates and of attention's weights over many devices give the numbers of one."""

import functools

import jax
import numpy as np
import optax
import pytest
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

SPECS = {"query": P("data", "model", None), "key": P("data", "model"), "layers": P(None, "data")}
SHAPES = {"query": (4, 4, 3), "key": (4, 4, 3), "layers": (2, 8)}
RNG = np.random.default_rng(0)
PARAMS, GRADS = (
    {name: RNG.normal(size=shape).astype("f4") for name, shape in SHAPES.items()} for _ in range(2)
)
MOST_NORMS = 2 * 4  # entries of a leaf: 16 and more
LOGITS = np.float32([1.0, 2.0, 4.0, 8.0])


def heads(path, leaf):
    del leaf
    return optaxclip.Heads(1) if path in ("query", "key") else None


def transformation(**specs):
    direction = optaxclip.scale_by_stable_adam(
        clipping_threshold=0.5, stacked={"query": 0, "key": 0, "layers": 1}, **specs
    )
    return optax.chain(direction, optaxclip.clip_attention_logits(2.0, heads=heads, **specs))


def step(grads, params, logits, **specs):
    tx = transformation(**specs)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params, max_logits=logits)
    return updates, [state[0].clip.info.norm, state[1].info.norm]


def placed(mesh):
    trees = (
        {x: jax.device_put(tree[x], NamedSharding(mesh, SPECS[x])) for x in tree}
        for tree in (GRADS, PARAMS)
    )
    return *trees, jax.device_put(LOGITS, NamedSharding(mesh, P("model")))


@functools.cache
def on_one_device():
    return jax.jit(step)(GRADS, PARAMS, LOGITS)


def assert_as_on_one_device(found):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_update_clips_under_jit_match_single_device(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(*placed(mesh)).compile()
        found = compiled(*placed(mesh))
    gathers = ["all-gather"] if kind == AxisType.Auto else []
    assert set(collectives(compiled)) <= {"all-reduce", *gathers}
    assert most_gathered(compiled) <= MOST_NORMS
    for name, x in found[0].items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)
    assert_as_on_one_device(found)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("tracked", [True, False])
def test_update_clips_in_shard_map_match_single_device(tracked):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(grads, params, logits):
        return step(grads, params, logits, specs=SPECS)

    specs = (SPECS, SPECS, P("model"))
    out = (SPECS, P())
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=tracked)
    assert_as_on_one_device(jax.jit(run)(*placed(mesh)))
