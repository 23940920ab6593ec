"""What is wrong with plain data is said with the place, and with what there is."""

import inspect

import pytest
import yaml

import optaxclip
from optaxclip import from_config
from optaxclip.config.names import unknown

LINEAR = {
    "schedule": "linear_schedule",
    "init_value": "1e-3",
    "end_value": 0.5,
    "transition_steps": 3,
}


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
        assert unknown(name, names) == f"{name!r}; there are {listed}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "clip_by_global_nrom"}, r"config: .* there are \['clip_by_global_norm', "),
        ({"name": "adamw"}, r"config: .* there are \['optax.adamw', "),
        ({"name": "muon"}, r"config: .* there are \['optax.contrib.muon', "),
        ({"name": "record"}, r"config: .* there are \['monitor.record', "),
        (
            {"name": "optax.adamv"},
            r"there are \['optax.adam', 'optax.radam', .*'optax.yogi', 'optax.zero_nans'\]$",
        ),
        (
            {"name": "clip_by_norm", "max_norm": 1.0, "nonfinit": "zero"},
            r"config: clip_by_norm has no argument 'nonfinit'; there are \['nonfinite', 'as', ",
        ),
        ({"name": "clip_by_norm"}, "config: clip_by_norm needs the argument 'max_norm'"),
        (
            {"name": "optax.partition", "param_labels": "a", "transforms": {"a": {"name": "zap"}}},
            r"config.transforms.a: there is no transformation 'zap'",
        ),
        ([{"name": "zclip"}, {"name": "zap"}], r"config\[1\]: there is no transformation 'zap'"),
        (
            {"name": "skip_nonfinite", "inner": [{"name": "zclip", "alfa": 1.0}]},
            r"config.inner\[0\]: zclip has no argument 'alfa'; there are \['alpha', ",
        ),
        (
            {"name": "clip_by", "scope": "leaf", "limit": {"a": {"name": "z_score"}}},
            r"config.limit.a: there is no limit rule 'z_score'; there are \['zscore', ",
        ),
        (
            {
                "name": "per_example_clip_and_aggregate",
                "limit": {"name": "quantile"},
                "noise_multiplier": 0.0,
            },
            r"config.limit: there is no quantile limit 'quantile'; there are \['quantile_limit'\]",
        ),
        (
            {"name": "clip_by", "scope": {"name": "leef"}, "limit": 1.0},
            r"config.scope: there is no scope 'leef'; there are \['leaf', ",
        ),
        (
            {"name": "clip", "max_delta": {"schedule": "linear"}},
            r"config.max_delta: there is no schedule 'linear'; there are \['linear_schedule', ",
        ),
        (
            {"name": "clip", "max_delta": {"schedule": "linear_schedule", "value": 1.0}},
            r"config.max_delta: linear_schedule has no argument 'value'; there are ",
        ),
        (
            {"name": "clip_by", "scope": "tree", "limit": 1.0, "norm": {"name": "lq", "p": 1}},
            r"config.norm: there is no norm 'lq'; there are \['lp'\]",
        ),
        ({"name": "__dir__"}, "there is no transformation"),
        ({"name": "optax.chain"}, "there is no transformation"),
        ({"name": "from_config"}, "there is no transformation"),
    ],
)
def test_what_there_is_not_is_an_error_that_lists_what_there_is(config, message):
    with pytest.raises(ValueError, match=message):
        from_config(config)


@pytest.mark.parametrize(
    "config",
    [
        *(3, None, {}, {"max_norm": 1.0}, {"name": 3}, [1.0]),
        {"name": "optax.partition", "param_labels": "a", "transforms": {"a": {"b": 1.0}}},
        {"name": "skip_nonfinite", "inner": {"a": "optax.identity"}},
    ],
)
def test_what_is_no_config_is_an_error(config):
    with pytest.raises(TypeError, match=r"config.* must be a mapping with the name of a tran"):
        from_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "clip_by_global_norm", "max_norm": "1e-3"},
        {"name": "clip_by", "scope": "leaf", "limit": "1e-3"},
        {"name": "clip", "max_delta": LINEAR},
        {"name": "clip_by_group_norm", "max_norm": {"a": "1e-3"}, "labels": "a"},
    ],
)
def test_numbers_that_yaml_takes_for_text_are_told(config):
    assert yaml.safe_load("1e-3") == "1e-3"
    with pytest.raises(TypeError, match=r"config\.\S+ is the string '1e-3' .* write 1.0e-3"):
        from_config(config)
    assert yaml.safe_load("1.0e-3") == 1e-3


@pytest.mark.parametrize("text", ["inf", "-Infinity", "nan"])
def test_infinity_that_yaml_takes_for_text_is_told(text):
    assert yaml.safe_load(text) == text
    with pytest.raises(TypeError, match=rf"is the string '{text}' .* write \.inf or \.nan$"):
        from_config({"name": "clip_by_norm", "max_norm": text})
    assert yaml.safe_load(".inf") == float("inf")


def test_errors_of_a_transformation_say_where_it_was():
    config = {"name": "skip_nonfinite", "inner": [{"name": "clip", "max_delta": -1.0}]}
    with pytest.raises(ValueError, match="max_delta must not be negative") as caught:
        from_config(config)
    note = "The error is from clip in config.inner[0], called with {'max_delta': -1.0}."
    assert caught.value.__notes__ == [note]
