"""Transformations from plain data."""

import inspect
import json
import tomllib

import jax
import ml_collections
import numpy as np
import optax
import pytest
import yaml
from methods_table import PARAMS, assert_same, label, random_tree

import optaxclip
from optaxclip import accumulate, from_config, monitor, norms, responses, scopes, thresholds
from optaxclip.config import _unknown, _with_integer_keys

RULE = {"name": "zscore", "z_thresh": 0.5, "warmup_steps": 2}
LINEAR = {
    "schedule": "linear_schedule",
    "init_value": 2.0,
    "end_value": 0.5,
    "transition_steps": 3,
}
OWN_RULE, OWN_LINEAR = thresholds.zscore(0.97, 0.5, 2), optax.linear_schedule(2.0, 0.5, 3)
LABELS = {"w": "matrix", "b": "vector", "v": "vector"}

PAIRS = {
    "by name": (
        {"name": "zclip", "z_thresh": 0.5, "warmup_steps": 2},
        optaxclip.zclip(z_thresh=0.5, warmup_steps=2),
    ),
    "a chain": (
        [{"name": "clip", "max_delta": 1.0}, {"name": "optax.sgd", "learning_rate": 0.5}],
        optax.chain(optaxclip.clip(1.0), optax.sgd(0.5)),
    ),
    "no stage": ([], optax.identity()),
    "a skip of a chain": (
        {
            "name": "skip_above",
            "limit": 4.0,
            "inner": ["optax.identity", {"name": "clip_by_global_norm", "max_norm": 1.0}],
        },
        optaxclip.skip_above(
            optax.chain(optax.identity(), optaxclip.clip_by_global_norm(1.0)), 4.0
        ),
    ),
    "a skip of what is there": (
        {"name": "skip_nonfinite", "inner": optax.sgd(0.5), "as": "skip"},
        optaxclip.skip_nonfinite(optax.sgd(0.5), name="skip"),
    ),
    "a schedule made of schedules": (
        {
            "name": "clip_by_global_norm",
            "max_norm": {
                "schedule": "join_schedules",
                "schedules": [
                    {"schedule": "constant_schedule", "value": 3.0},
                    {
                        "schedule": "piecewise_constant_schedule",
                        "init_value": 1.0,
                        "boundaries_and_scales": {"1": 0.5},
                    },
                ],
                "boundaries": [1],
            },
        },
        optaxclip.clip_by_global_norm(
            optax.join_schedules(
                [
                    optax.constant_schedule(3.0),
                    optax.piecewise_constant_schedule(1.0, {1: 0.5}),
                ],
                [1],
            )
        ),
    ),
    "arguments of a scope": (
        {"name": "clip_by", "scope": {"name": "axes", "axes": [-1]}, "limit": 1.0},
        optaxclip.clip_by(scopes.axes((-1,)), 1.0),
    ),
    "a limit for each group": (
        {
            "name": "clip_by",
            "scope": {"name": "group", "labels": LABELS},
            "limit": {"matrix": RULE, "vector": LINEAR},
        },
        optaxclip.clip_by(scopes.group(label), {"matrix": OWN_RULE, "vector": OWN_LINEAR}),
    ),
    "a limit for each label": (
        {
            "name": "clip_by_group_norm",
            "labels": LABELS,
            "max_norm": {"matrix": RULE, "vector": LINEAR},
        },
        optaxclip.clip_by_group_norm({"matrix": OWN_RULE, "vector": OWN_LINEAR}, label),
    ),
    "a transformation for each label": (
        {
            "name": "optax.partition",
            "param_labels": LABELS,
            "transforms": {
                "matrix": [{"name": "clip", "max_delta": 1.0}, "optax.identity"],
                "vector": {"name": "optax.sgd", "learning_rate": LINEAR},
            },
        },
        optax.partition(
            {
                "matrix": optax.chain(optaxclip.clip(1.0), optax.identity()),
                "vector": optax.sgd(OWN_LINEAR),
            },
            LABELS,
        ),
    ),
    "what the monitor records": (
        {"name": "monitor.record", "as": "raw", "scope": "leaf", "stats": ["norm", "max"]},
        monitor.record(scope=scopes.leaf(), stats=("norm", "max"), name="raw"),
    ),
    "a rule of a schedule": (
        {
            "name": "clip_by",
            "scope": "unit",
            "limit": {"name": "relative_to_params", "ratio": LINEAR},
        },
        optaxclip.clip_by(scopes.unit(), thresholds.relative_to_params(OWN_LINEAR)),
    ),
    "norm and response by name": (
        {
            "name": "clip_by",
            "scope": "tree",
            "limit": 1.0,
            "norm": {"name": "l1"},
            "response": {"name": "smooth"},
        },
        optaxclip.clip_by(scopes.tree(), 1.0, norm="l1", response="smooth"),
    ),
    "norm and response with arguments": (
        {
            "name": "clip_by",
            "scope": "leaf",
            "limit": 1.0,
            "norm": {"name": "lp", "p": 3},
            "response": {"name": "band", "min_factor": 0.5, "max_factor": 3.0},
        },
        optaxclip.clip_by(
            scopes.leaf(),
            1.0,
            norm=norms.lp(3),
            response=responses.band(min_factor=0.5, max_factor=3.0),
        ),
    ),
}


def three_steps(tx):
    states, steps = tx.init(PARAMS), []
    for seed in range(3):
        updates, states = tx.update(random_tree(seed + 1), states, PARAMS)
        steps.append(updates)
    return steps, states


# Optax's schedules of steps rely on implicit promotion.
@pytest.mark.by_day(1)
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("case", PAIRS)
def test_it_makes_what_its_data_says(case):
    config, expected = PAIRS[case]
    made = from_config(config)
    assert jax.tree.structure(made.init(PARAMS)) == jax.tree.structure(expected.init(PARAMS))
    assert_same(three_steps(made), three_steps(expected))
    assert isinstance(made, optax.GradientTransformationExtraArgs)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("limit", ["quantile_limit", {"name": "quantile_limit", "init_limit": 2.0}])
def test_the_limit_of_examples_follows_a_quantile(limit):
    name = "per_example_clip_and_aggregate"
    made = from_config({"name": name, "limit": limit, "noise_multiplier": 0.0})
    first = made.init(PARAMS).limit
    assert first == (0.1 if limit == "quantile_limit" else 2.0)


def test_a_transformation_that_is_there_is_taken_as_it_is():
    sgd = optax.sgd(0.5)
    assert from_config(sgd).init is sgd.init
    from_config({"name": "skip_nonfinite", "inner": sgd})


def test_the_noise_scale_is_made_from_data():
    made = from_config({"name": "monitor.noise_scale", "decay": 0.5, "as": "noise"})
    noise = accumulate.NoiseSums(np.float32(9), np.float32(5))
    assert_same(
        *(
            tx.update(PARAMS, tx.init(PARAMS), noise=noise)
            for tx in (made, monitor.noise_scale(0.5, name="noise"))
        )
    )


def is_plain(config):
    return "what is there" not in config


DATA = {name: config for name, (config, _) in PAIRS.items() if is_plain(name)}


class OnlyKeys:
    """The least that is a mapping."""

    def __init__(self, config):
        self._config = config

    def keys(self):
        return self._config.keys()

    def __getitem__(self, key):
        return in_other_mappings(self._config[key])


def in_other_mappings(config):
    if isinstance(config, dict):
        return OnlyKeys(config)
    return [in_other_mappings(each) for each in config] if isinstance(config, list) else config


FORMATS = {
    "JSON": lambda config: json.loads(json.dumps(config)),
    "YAML": lambda config: yaml.safe_load(yaml.safe_dump(config)),
    "ml_collections": lambda config: ml_collections.ConfigDict({"tx": config}).tx,
    "any mapping": in_other_mappings,
}


@pytest.mark.by_day(9)
@pytest.mark.parametrize("case", DATA)
def test_it_reads_what_others_wrote(case):
    expected = PAIRS[case][1]
    for read in FORMATS.values():
        made = from_config(read(DATA[case]))
        assert jax.tree.structure(made.init(PARAMS)) == jax.tree.structure(expected.init(PARAMS))


@jax.numpy_dtype_promotion("standard")
def test_it_reads_toml():
    config = tomllib.loads("""
        [[tx]]
        name = "clip_by"
        scope = "leaf"
        limit = {name = "zscore", z_thresh = 0.5, warmup_steps = 2}
        [[tx]]
        name = "clip_by_global_norm"
        [tx.max_norm]
        schedule = "piecewise_constant_schedule"
        init_value = 1.0
        boundaries_and_scales = {1 = 0.5}
    """)["tx"]
    halved = optax.piecewise_constant_schedule(1.0, {1: 0.5})
    stages = [optaxclip.clip_by(scopes.leaf(), OWN_RULE), optaxclip.clip_by_global_norm(halved)]
    assert_same(three_steps(from_config(config)), three_steps(optax.chain(*stages)))


def test_stages_may_be_a_tuple_of_any_mappings():
    stages, expected = PAIRS["a chain"]
    made = from_config(tuple(map(OnlyKeys, stages)))
    assert jax.tree.structure(made.init(PARAMS)) == jax.tree.structure(expected.init(PARAMS))


def test_only_strings_of_digits_become_integer_keys():
    found = _with_integer_keys({"10": "a", 2: "b", "x": "c", "1.5": "d"})
    assert found == {10: "a", 2: "b", "x": "c", "1.5": "d"}


def test_it_leaves_the_data_alone():
    config = ml_collections.FrozenConfigDict({"tx": PAIRS["a limit for each group"][0]}).tx
    before = config.to_json()
    from_config(config)
    from_config(config)
    assert config.to_json() == before


def test_trees_of_the_user_are_not_read():
    """Parameters may be called as our keys are."""
    tree = {"name": np.float32([3.0, 4.0]), "schedule": np.float32([6.0, 8.0])}
    labels = {"name": "leaf", "schedule": "linear"}
    tx = from_config({"name": "clip_by_group_norm", "max_norm": 1.0, "labels": labels})
    updates, state = tx.update(tree, tx.init(tree))
    assert list(state.info.names) == ["leaf", "linear"]
    np.testing.assert_allclose(updates["schedule"], [0.6, 0.8])


def made_by(module, kind):
    fns = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name
        for name, fn in fns.items()
        if inspect.isfunction(fn) and kind in str(inspect.signature(fn).return_annotation)
    }


def test_it_knows_what_is_public_and_nothing_else():
    with pytest.raises(ValueError, match="there is no transformation 'x'; there are ") as caught:
        from_config({"name": "x"})
    listed = str(caught.value).partition("there are ")[2]
    own = made_by(optaxclip, "Transformation") - {"from_config"}
    own |= {f"monitor.{name}" for name in made_by(optaxclip.monitor, "Transformation")}
    assert {"zclip", "skip_nonfinite", "clip_by_value", "monitor.record"} <= own
    assert listed == f"{sorted(own)}, and those of Optax, such as 'optax.adamw'"
    with pytest.raises(ValueError, match=r"there is no limit rule 'x'; there are \['adagc', "):
        from_config({"name": "clip_by", "scope": "leaf", "limit": {"name": "x"}})


def test_each_known_name_is_listed_once_the_nearest_first_and_optaxs_where_asked_for():
    own, theirs = ["zclip", "skip", "autoclip"], ["optax.adamw", "optax.adam", "optax.sgd"]
    hint = ", and those of Optax, such as 'optax.adamw'"
    for name, names, listed in (
        ("zclop", own, "['zclip', 'autoclip', 'skip']"),
        ("x", own, "['autoclip', 'skip', 'zclip']"),
        ("x", own + theirs, f"['autoclip', 'skip', 'zclip']{hint}"),
        (
            "adamw",
            own + theirs,
            f"['optax.adamw', 'optax.adam', 'autoclip', 'skip', 'zclip']{hint}",
        ),
        ("optax.adamw2", own + theirs, "['optax.adamw', 'optax.adam', 'optax.sgd']"),
    ):
        assert _unknown(name, names) == f"{name!r}; there are {listed}"


def test_errors_of_a_transformation_say_where_it_was():
    config = {"name": "skip_nonfinite", "inner": [{"name": "clip", "max_delta": -1.0}]}
    with pytest.raises(ValueError, match="max_delta must not be negative") as caught:
        from_config(config)
    note = "The error is from clip in config.inner[0], called with {'max_delta': -1.0}."
    assert caught.value.__notes__ == [note]


def test_yaml_takes_for_text_what_messages_say_it_does():
    for text in ("1e-3", "inf", "-Infinity", "nan"):
        assert yaml.safe_load(text) == text
    assert yaml.safe_load("1.0e-3") == 1e-3
    assert yaml.safe_load(".inf") == float("inf")
