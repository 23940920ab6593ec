"""What the page shows for axlearn: with a checkout of it, and with the lines that it calls."""

import dataclasses
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shown_code

from optaxclip import monitor


@dataclasses.dataclass
class OptParam:
    """A parameter, which JAX takes for a leaf."""

    value: Any
    factorization_spec: Any
    weight_decay_scale: Any


@dataclasses.dataclass
class Spec:
    """A shape and how it is split, which JAX takes for a leaf too."""

    shape: Any
    dtype: Any
    mesh_axes: Any


class Partitioned(NamedTuple):
    init: Any
    update: Any
    partition: Any


def opt_param_values(params):
    return jax.tree.map(lambda param: param.value, params)


def with_partition_fn(base, partition_fn):
    def init(params):
        return base.init(opt_param_values(params))

    def update(updates, state, params):
        return base.update(updates, state, opt_param_values(params))

    return Partitioned(init, update, partition_fn)


def chain(*args):
    def init(params):
        return tuple(tx.init(params) for tx in args)

    def update(updates, state, params):
        new = []
        for tx, of_tx in zip(args, state, strict=True):
            updates, of_tx = tx.update(updates, of_tx, params)
            new.append(of_tx)
        return updates, tuple(new)

    return Partitioned(init, update, lambda specs: tuple(tx.partition(specs) for tx in args))


def trace_partition(base):
    return with_partition_fn(base, lambda specs: optax.TraceState(trace=specs))


LINES = types.SimpleNamespace(
    OptStateSpec=Spec,
    PartitionSpec=jax.sharding.PartitionSpec,
    PartitionedGradientTransformation=Partitioned,
    chain=chain,
    current_context=lambda: None,
    maybe_instantiate=lambda inner: inner,
    opt_param_values=opt_param_values,
    trace_partition=trace_partition,
    with_partition_fn=with_partition_fn,
)
"""What of `axlearn.common.optimizers` the page names, as it does it in commit 34aed43."""

VALUES = {"c": jnp.zeros(()), "v": jnp.array([0.0, 1.0, 2.0, -3.0])}
STEPS, SPIKE, BAD = 12, 6, 8


@pytest.fixture(params=["its lines", "a checkout"])
def axlearn(request, imported, monkeypatch):
    if request.param == "a checkout":
        module = imported("axlearn.common.optimizers")
        base, spec = imported("axlearn.common.optimizer_base"), imported("axlearn.common.utils")
        return module, base.OptParam, spec.TensorSpec
    for name in ("axlearn", "axlearn.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["axlearn.common"], "optimizers", LINES, raising=False)
    return LINES, OptParam, Spec


def gradients(step):
    rng = np.random.default_rng(step)
    size = 1000.0 if step == SPIKE else 1.0
    bad = np.nan if step == BAD else 0.3
    return {"c": jnp.float32(bad), "v": jnp.asarray(size * rng.normal(size=4), jnp.float32)}


def test_axlearn_page_wraps_optimizers_in_skip(axlearn):
    optimizers, make_param, make_spec = axlearn
    block = shown_code.block_with("docs/trainers.md", "def specs_of")
    shown = shown_code.run(block, "docs/trainers.md")
    theirs = optimizers.trace_partition(optax.trace(0.9))
    tx = shown["skip"](optimizers.chain(shown["clip"](), theirs))

    def params_of(values):
        return jax.tree.map(lambda x: make_param(x, None, 1.0), values)

    @jax.jit
    def step(values, state, grads):
        updates, state = tx.update(grads, state, params_of(values))
        return jax.tree.map(lambda x, y: x - 0.1 * y, values, updates), state

    split = {"c": jax.sharding.PartitionSpec(), "v": jax.sharding.PartitionSpec("data")}
    specs = jax.tree.map(
        lambda x, axes: make_spec(shape=x.shape, dtype=x.dtype, mesh_axes=axes), VALUES, split
    )
    state = tx.init(params_of(VALUES))
    is_spec = lambda x: isinstance(x, make_spec)  # noqa: E731
    partition = tx.partition(specs)
    assert jax.tree.structure(partition, is_leaf=is_spec) == jax.tree.structure(state)
    for spec, leaf in zip(
        jax.tree.leaves(partition, is_leaf=is_spec), jax.tree.leaves(state), strict=True
    ):
        assert (tuple(spec.shape), spec.dtype) == (leaf.shape, leaf.dtype)
    assert partition.inner_state[1].trace["v"].mesh_axes == split["v"]
    assert partition.num_skipped.mesh_axes == jax.sharding.PartitionSpec()

    values, verdicts = VALUES, []
    for i in range(STEPS):
        before = values
        values, state = step(values, state, gradients(i))
        verdicts.append(monitor.step_status(state))
        if i in (SPIKE, BAD):
            jax.tree.map(np.testing.assert_array_equal, values, before)
    assert [i for i, verdict in enumerate(verdicts) if verdict == "skipped"] == [SPIKE, BAD]
    assert monitor.bad_leaves(state) == ("c",)
    assert int(state.inner_state[0].steps) == STEPS - 2
    assert np.isfinite(values["v"]).all()
