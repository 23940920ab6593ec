"""Trainers that go through a state by hand find the leaves that JAX finds, and no others.

Each walk has the shape of one that a trainer makes, not its code.
"""

import dataclasses
from collections.abc import Mapping

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
import pytest
from methods_table import PARAMS
from parts_table import RULES, SCOPES, TRANSFORMATIONS

import optaxclip
from optaxclip import accumulate, monitor, scopes, thresholds

LOSS = thresholds.window(6.0, 4)
MAKERS = (
    TRANSFORMATIONS
    | {
        f"{name}, by leaf": optaxclip.clip_by(SCOPES["leaf"], rule())
        for name, rule in RULES.items()
    }
    | {
        f"{name}, by unit": optaxclip.clip_by(SCOPES["unit"], rule())
        for name, rule in RULES.items()
    }
    | {
        "thresholds by label": optaxclip.clip_by_group_norm(
            {"w": 1.0, "b": thresholds.zscore(), "v": 2.0}, lambda path, leaf: path
        ),
        "loss": optaxclip.skip_above(optax.adam(0.1), 1.0, loss_threshold=LOSS),
        "record of the loss": monitor.record(loss=True),
        "noise scale": monitor.noise_scale(),
    }
)
"""Every kind of state of ours."""
STATES = {name: tx.init(PARAMS) for name, tx in MAKERS.items()}
STATES["in a chain"] = optax.chain(
    monitor.record(3, scope=scopes.leaf()),
    optax.masked(optaxclip.zclip(), {"w": True, "b": False, "v": True}),
    optaxclip.skip_nonfinite(optax.adam(0.1)),
).init(PARAMS)
STATES["accumulate"] = accumulate.value_and_grad(
    lambda params, batch: jnp.sum(params["w"]) + jnp.sum(batch),
    microbatch_size=2,
    clip=optaxclip.adagc(),
    reject_rule=LOSS,
).init(PARAMS, jnp.ones(4))
every_state = pytest.mark.parametrize("name", STATES)


def by_type(tree, path=""):
    """Leaves by what containers hold, as big_vision names them; dataclasses by Flax."""
    if dataclasses.is_dataclass(tree):
        tree = flax.serialization.to_state_dict(tree)
    if tree is None:
        return
    if isinstance(tree, Mapping):
        children = sorted(tree.items())
    elif isinstance(tree, (list, tuple)):
        children = list(enumerate(tree))
    else:
        yield path, tree
        return
    for key, child in children:
        yield from by_type(child, f"{path}/{key}")


def with_paths(tree, path=""):
    """The tree with a path in the place of each leaf, as Levanter makes it for its checkpoints."""

    def below(children):
        return {key: with_paths(child, f"{path}.{key}") for key, child in children}

    if tree is None:
        return None
    if isinstance(tree, dict):
        return below(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(**below(tree._asdict().items()))
    if isinstance(tree, (list, tuple)):
        return type(tree)(below(enumerate(tree)).values())
    return path if jax.tree.leaves(tree) else None


@every_state
def test_state_containers_match_jax_leaves(name):
    numbered = jax.tree.unflatten(
        jax.tree.structure(STATES[name]), range(len(jax.tree.leaves(STATES[name])))
    )
    found = list(by_type(numbered))
    assert sorted(number for _, number in found) == jax.tree.leaves(numbered)
    assert len({path for path, _ in found}) == len(found)


@every_state
def test_state_paths_match_state_structure(name):
    state, paths = STATES[name], with_paths(STATES[name])
    jax.tree.map(lambda path, x: None, paths, state, is_leaf=lambda x: x is None)
    # Levanter compares these numbers where it restores.
    counts = [len(jax.tree.leaves(tree, is_leaf=lambda x: x is None)) for tree in (paths, state)]
    assert counts[0] == counts[1]
    assert all(isinstance(path, str) for path in jax.tree.leaves(paths))


@every_state
def test_flax_state_dict_contains_only_arrays(name):
    """As t5x stores it."""
    stored = flax.serialization.to_state_dict(STATES[name])
    flat = flax.traverse_util.flatten_dict(stored, sep="/") if stored != () else {}
    found = [x for x in flat.values() if x is not None]
    assert len(found) == len(jax.tree.leaves(STATES[name]))
    assert all(hasattr(x, "dtype") for x in found)
