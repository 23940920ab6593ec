"""The picture of events: what it marks, and which limits it draws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import monitor, plots

Figure = pytest.importorskip("matplotlib.figure").Figure
SIZES = [1.0, 3.0, 0.0, 20.0, np.nan, 2.5, np.inf]


def events_of(inner):
    tx = monitor.events(inner)

    def step(state, size):
        return tx.update({"w": size[None]}, state)[1], None

    start = tx.init({"w": jnp.zeros(1)})
    return monitor.history(jax.jit(lambda xs: jax.lax.scan(step, start, xs)[0])(jnp.array(SIZES)))


def drawn(inner):
    ax = Figure().subplots()
    assert plots.events_over_steps(events_of(inner), ax=ax) is ax
    assert (ax.get_yscale(), ax.get_ylabel(), ax.get_xlabel()) == ("log", "gradient norm", "step")
    assert ax.get_legend() is None
    return {line.get_label(): line.get_xydata().tolist() for line in ax.lines}


def test_a_clip_alone():
    lines = drawn(optaxclip.clip_by_global_norm(2.0))
    assert list(lines) == ["norm", "limit", "clipped (3)", "not finite (2)"]
    assert lines["clipped (3)"] == [[1, 3], [3, 20], [5, 2.5]]
    assert [x for x, _ in lines["not finite (2)"]] == [4, 6]
    assert [y for _, y in lines["limit"]] == [2.0] * 7


@pytest.mark.slow
def test_a_skip_around_a_clip():
    inner = optax.chain(optaxclip.clip_by_global_norm(2.0), optax.sgd(0.1))
    lines = drawn(optaxclip.skip_above(inner, 10.0))
    marks = ["clipped (2)", "skipped (1)", "not finite, skipped (2)"]
    assert list(lines) == ["norm", "limit", "limit of clip_by_global_norm", *marks]
    assert lines["skipped (1)"] == [[3, 20]]
    assert lines["clipped (2)"] == [[1, 3], [5, 2.5]]
    assert lines["limit of clip_by_global_norm"] == [[x, 2.0] for x in (0, 1, 2, 5)]
    # The skip has no limit, and the second clip judges other norms.
    behind = optax.chain(inner, optaxclip.clip_by_norm(0.1))
    labels = list(drawn(optaxclip.skip_nonfinite(behind)))
    assert labels[:3] == ["norm", "limit of clip_by_global_norm", "clipped (3)"]


ROWS = np.zeros(
    4,
    [
        *(("step", int), ("norm", float), ("limit", float), ("verdict", "U9")),
        *((f"{name}/{what}", float) for name in ("inner", "behind") for what in ("norm", "limit")),
    ],
)
ROWS["step"], ROWS["norm"], ROWS["limit"] = range(7, 11), [1, 3, np.inf, 20], [10, np.inf, 10, 10]
ROWS["verdict"] = ["taken", "clipped", "skipped", "skipped"]
ROWS["inner/norm"], ROWS["inner/limit"] = [1 + 1e-6, 3, np.nan, np.nan], 2
ROWS["behind/norm"], ROWS["behind/limit"] = [1, 2, np.nan, np.nan], 0.5


def test_what_each_verdict_and_each_limit_looks_like():
    ax = plots.events_over_steps(ROWS, ax=Figure().subplots())
    lines = {line.get_label(): line for line in ax.lines}
    # The clip behind judges other norms.
    marks = ["clipped (1)", "skipped (1)", "not finite, skipped (1)"]
    assert list(lines) == ["norm", "limit", "limit of inner", *marks]
    assert lines["limit"].get_xydata().tolist() == [[7, 10], [9, 10], [10, 10]]
    assert lines["limit of inner"].get_ydata().tolist() == [2] * 4
    assert lines["clipped (1)"].get_xydata().tolist() == [[8, 3]]
    assert lines["skipped (1)"].get_xydata().tolist() == [[10, 20]]
    assert lines["not finite, skipped (1)"].get_xdata().tolist() == [9]
    looks = [(lines[x].get_linestyle(), lines[x].get_marker()) for x in ("limit", *marks)]
    assert looks == [("--", "None"), ("None", "^"), ("None", "s"), ("None", "X")]


def test_what_cannot_be_drawn():
    events = events_of(optaxclip.clip_by_global_norm(2.0))
    with pytest.raises(ValueError, match="events must have at least one step, got none"):
        plots.events_over_steps(events[:0])
    for wrong in ([1.0], events["norm"]):
        with pytest.raises(TypeError, match=r"events must be what monitor\.history returns of mon"):
            plots.events_over_steps(wrong)
