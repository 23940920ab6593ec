"""`json_line`: valid JSON, the scalars' own numbers, and a log that `suggest` reads."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import monitor, tuning


def refused(name):
    raise AssertionError(f"{name} is no JSON")


def parsed(line):
    assert "\n" not in line
    return json.loads(line, parse_constant=refused)


def chain():
    clips = (monitor.record(4), optaxclip.clip_by_global_norm(1.0), optaxclip.zclip())
    return optaxclip.skip_nonfinite(optax.chain(*clips, optax.sgd(0.1)))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("gradient", [3.0, np.nan, np.inf, -np.inf])
def test_json_line_replaces_nonfinite_numbers_by_null(gradient):
    tx = chain()
    start = tx.init(jnp.zeros(2))
    for state in (start, tx.update(jnp.array([gradient, 4.0]), start)[1]):
        numbers = monitor.scalars(state)
        assert not all(np.isfinite(list(numbers.values())))  # thresholds without an end, at least
        expected = {name: x if np.isfinite(x) else None for name, x in numbers.items()}
        found = parsed(monitor.json_line(state))
        assert found == expected
        assert list(found) == list(numbers)


def test_json_line_puts_keyword_values_first():
    state = chain().init(jnp.zeros(2))
    more = {
        "step": 2**70,
        "run": 'a "b"\n\u2028',
        "loss": jnp.float32(0.5),
        "low": jnp.bfloat16(0.25),
        "one": np.int32(3),
        "bad": jnp.nan,
        "worse": np.float64(np.inf),
        "ok": True,
        "none": None,
    }
    found = parsed(monitor.json_line(state, **more))
    assert list(found)[: len(more)] == list(more)
    expected = more | {"loss": 0.5, "low": 0.25, "one": 3, "bad": None, "worse": None}
    assert {name: found[name] for name in more} == expected
    assert found["ok"] is True


def test_json_line_rejects_invalid_values():
    tx = optaxclip.clip_by_global_norm(1.0)
    state = tx.init(jnp.zeros(2))
    for value in (jnp.zeros(2), [1.0], {"a": 1}, 1j, b"x", object):
        with pytest.raises(
            TypeError, match=r"loss must be a number, a string, a bool, or None, got"
        ):
            monitor.json_line(state, loss=value)
    with pytest.raises(TypeError, match="loss must be a number"):
        jax.jit(lambda x: monitor.json_line(state, loss=x) and x)(1.0)
    with pytest.raises(
        ValueError, match="name of a scalar, got 'clip_by_global_norm/norm'; rename"
    ):
        monitor.json_line(state, **{"clip_by_global_norm/norm": 1.0})
    with pytest.raises(
        ValueError,
        match=r"monitor\.json_line: opt_state must contain .* that keeps a record .*, got",
    ):
        monitor.json_line(optax.sgd(0.1).init(jnp.zeros(2)))
    with pytest.raises(
        TypeError, match=r"monitor\.json_line cannot be called inside jit, .* contains tracers"
    ):
        jax.jit(lambda state: monitor.json_line(state) and 0)(state)


def test_suggest_reads_json_lines(tmp_path):
    tx = optax.chain(monitor.record(4), optaxclip.clip_by_global_norm(2.0), optax.sgd(0.1))
    state, update = tx.init(jnp.float32(0)), jax.jit(tx.update)
    norms = np.exp(0.1 * np.random.default_rng(0).normal(size=60)).astype(np.float32)
    norms[[20, 30, 40]] = 10.0, np.nan, np.inf
    lines = []
    for step, norm in enumerate(norms):
        state = update(jnp.float32(norm), state)[1]
        lines.append(monitor.json_line(state, step=step, loss=1.0))
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    pytest.importorskip("pandas")
    series = tuning.read_log(tmp_path / "log.jsonl")
    assert series.name == "record/norm"
    with pytest.warns(UserWarning, match="only 58 norms"):
        found = tuning.suggest(series)
    assert found.num_nonfinite == 2
    np.testing.assert_array_equal(found.norms, np.where(np.isfinite(norms), norms, np.nan))
