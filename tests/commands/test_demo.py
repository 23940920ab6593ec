"""The command line and the demo: what it prints, draws and refuses, and that clipping helps."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
import optaxclip.commands.figures as figures
from optaxclip import plots
from optaxclip.__main__ import COMMANDS, main
from optaxclip._base import extras
from optaxclip.commands import demo, sweep

rich = pytest.importorskip("rich")
pytest.importorskip("rich.progress")
Figure = pytest.importorskip("matplotlib.figure").Figure
task = pytest.importorskip("optaxclip.commands.demo_task")


def run(capsys, *args):
    assert main(["demo", *map(str, args)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def corpus():
    return task.encode(demo.read_text(None))


def trained(corpus, name, seed=0, steps=60):
    return task.Task(corpus, seed).train(demo.METHODS[name](), steps, lambda _: None)


@pytest.fixture
def small(monkeypatch):
    """A network that is soon trained."""
    for name, value in {"LENGTH": 20, "BATCH": 2, "HIDDEN": 8, "HELD_OUT_WINDOWS": 2}.items():
        monkeypatch.setattr(task, name, value)


@pytest.mark.usefixtures("small")
def test_prints_a_table_and_the_path_of_a_picture(capsys, tmp_path):
    out = tmp_path / "made" / "for it"
    printed = run(capsys, "--steps", 3, "--methods", "none", "agc", "--out", out)
    first, *lines = [line for line in printed.splitlines() if line.strip()]
    network = "a recurrent network learns the characters of the help topics of Python"
    assert first == f"{network}, 3 steps with each of: none, agc"
    titles = [re.split(r"\s{2,}", line.strip()) for line in lines[:2]]
    assert titles[0] == ["last", "final", "best", "largest"]
    assert titles[1][:5] == ["method", "limit", "loss", "loss", "raw norm"]
    assert [line.split()[:2] for line in lines[3:-2]] == [["none", ANY], ["agc", "0.01"]]
    path = out / demo.PICTURE
    assert lines[-2] == f"curves: {path}"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_last_line_is_a_command_and_bars_say_compiling(capsys, tmp_path, monkeypatch):
    said = []

    class Bar(rich.progress.Progress):
        def add_task(self, description, **options):
            said.append((description, 0))
            return super().add_task(description, **options)

        def update(self, task_id, **options):
            said.append((options["description"], options.get("advance", 0)))
            super().update(task_id, **options)

    def of_bar(name):
        of_run = [x for x in said if x[0].startswith(name)]
        done = of_run.index((name, task.CHUNK)) if name == "zclip" else of_run.index((name, 10))
        assert of_run[done - 1] == (f"{name}: compiling", 0)
        assert {description for description, _ in of_run[done:]} == {name}

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("a text").write_text("Größe und Gewicht. " * 200, encoding="utf-8")
    printed = run(capsys, "--text", "a text", "--steps", 11, "--methods", "zclip")
    of_bar("zclip")
    assert re.search(r"zclip +1 ", printed)  # its cap
    _, found, command = printed.splitlines()[-1].partition("next: which limit is best here? python")
    assert found
    module, *args = shlex.split(command)[1:]
    assert (module, *args) == ("optaxclip", "sweep", "--text", "a text")
    assert main([*args, "--steps", "10", "--limits", "1"]) == 0
    of_bar("sweep")
    printed = capsys.readouterr().out
    assert "other seeds may give other results: pass --seeds 3 or more" in printed
    said_last = printed.splitlines()[-1]
    assert said_last.startswith("next: ")
    assert said_last.endswith("python -m optaxclip suggest LOG")


def test_the_steps_are_on_linear_axes_and_the_limit_beside_the_norms(corpus):
    steps = np.arange(1, 41)
    record = [np.ones(40), np.linspace(1, 3, 40), steps > 3, np.ones(40)]
    history = task.History(*record, np.arange(1, 42, 10), np.ones(5))
    figure = figures.side_by_side()
    demo.draw({"none": history, "global_norm": history}, figure)
    assert [ax.get_xscale() for ax in figure.axes] == ["linear", "linear"]
    left, right = (ax.lines[0].get_xydata().tolist() for ax in figure.axes)
    # Of the losses the step behind them, of the norms the last of those with this largest norm.
    assert [x for x, _ in left] == [1, 11, 21, 31, 41]
    assert right == [[step, history.norm[step - 1]] for step in (10, 20, 30, 40)]
    assert "limit 1 of global_norm" in labels(figure.axes[1])
    said = [ax.get_ylabel() for ax in figure.axes]
    assert said == ["held-out loss (nats)", "largest raw norm of 10 steps"]
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["none", "global_norm", "limit 1 of global_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_clipping_helps(corpus, seed, monkeypatch):
    for name, value in {"LENGTH": 80, "BATCH": 4, "HELD_OUT_WINDOWS": 8}.items():
        monkeypatch.setattr(task, name, value)
    plain, clipped = (trained(corpus, name, seed) for name in ("none", "global_norm"))
    assert np.isnan(plain.held_out[-1])
    assert len(clipped.nonfinite) == 0
    assert clipped.held_out[-1] < np.nanmin(plain.held_out) - 1
    same = slice(0, min(np.flatnonzero(clipped.clipped)))
    np.testing.assert_array_equal(plain.loss[same], clipped.loss[same])
    assert not plain.clipped.any()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_an_incomplete_last_chunk(corpus):
    history = trained(corpus, "normalize", steps=task.CHUNK + 3)
    assert history.loss.shape == history.norm.shape == history.clipped.shape == (task.CHUNK + 3,)
    assert history.evals.tolist() == [1, task.CHUNK + 1, task.CHUNK + 4]
    assert history.held_out.shape == (3,)
    assert history.clipped.all()


def test_rare_characters_share_a_number():
    text = "".join(map(chr, range(300, 500))) + "a" * 1800
    corpus = task.encode(text)
    assert corpus.train.max() == task.MAX_SYMBOLS - 1
    assert (corpus.train == 0).sum() == 200 - (task.MAX_SYMBOLS - 2)
    assert len(corpus.held_out) == task.HELD_OUT_SHARE * len(text)


LIMITED_FROM_THE_START = [
    *("global_norm", "norm", "value", "agc", "block_rms", "normalize", "adagc", "quantile"),
    "zclip",
]


@jax.jit
def exploded():
    """What each method makes of an explosion at the first step."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 1e6 * x, params)
    methods = {name: demo.METHODS[name]() for name in LIMITED_FROM_THE_START}
    return {
        name: method.update(grads, method.init(params), params)[0]
        for name, method in methods.items()
    }


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", LIMITED_FROM_THE_START)
def test_every_method_with_a_first_limit_bounds_an_explosion(name):
    assert jnp.abs(exploded()[name]["w"]).max() <= 1.0


def parsed(command, *args):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return vars(parser.parse_args(args))


def test_arguments_have_the_defaults_that_the_help_names():
    both = {"text": None, "seed": 0, "out": Path()}
    methods = ("global_norm", "norm", "value", "agc")
    assert parsed(demo) == both | {"methods": methods, "steps": 600}
    found = parsed(sweep)
    assert (len(found["limits"]), found["limits"][0], found["limits"][-1]) == (10, 0.03, 1000)
    assert found == both | {"limits": found["limits"], "steps": 200, "seeds": 1}


def test_whole_numbers_reach_to_both_ends_of_their_ranges(capsys):
    for command, name, low, high in (
        (demo, "--steps", 1, 10**6),
        (demo, "--seed", 0, 2**32 - 1),
        (sweep, "--steps", 10, 10**6),
        (sweep, "--seeds", 1, 1000),
        (sweep, "--seed", 0, 2**32 - 1),
    ):
        for number in (low, high):
            assert parsed(command, name, str(number))[name[2:]] == number
        for number in (low - 1, high + 1):
            with pytest.raises(SystemExit):
                parsed(command, f"{name}={number}")
            said = f"'{number}' is not a whole number from {low} to {high}"
            assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("--text missing", "cannot read missing: No such file"),
        ("--text .", "cannot read .: Is a directory"),
        ("--text empty", "empty has 0 characters; the demo needs at least 2000"),
        ("--text latin1", "UTF-8: iconv -f latin1 -t utf-8 'latin1' > utf8.txt"),
        ("--methods global_norm magic", "invalid choice: 'magic'"),
        ("--methods", "expected at least one argument"),
        ("--steps 0", "'0' is not a whole number from 1 to 1000000"),
        ("--steps 1.5", "'1.5' is not a whole number"),
        ("--steps many", "'many' is not a whole number"),
        ("--seed -1", "'-1' is not a whole number from 0"),
        ("--out empty", "cannot write to empty: File exists"),
        ("--out empty/below", "cannot write to empty/below: Not a directory"),
        ("--color", "unrecognized arguments: --color"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, tmp_path, monkeypatch, args, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "latin1").write_bytes("é".encode("latin1") * 3000)
    assert_refused(capsys, ["demo", *args.split()], reason)


def test_no_command_prints_the_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("usage: ")
    assert all(command.HELP.split()[0] in printed.err for command in COMMANDS.values())


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"optaxclip {optaxclip.__version__}\n"


@pytest.mark.parametrize("picture", [demo.PICTURE, sweep.PICTURE])
def test_git_ignores_what_the_commands_write_here(picture):
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("no repository")
    subprocess.run(["git", "-C", root, "check-ignore", "-q", picture], check=True)


def test_missing_packages_are_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert_refused(capsys, ["demo"], f"needs rich: {extras.remedy('demo')}")


def test_the_remedy_works_where_the_package_lies(tmp_path, monkeypatch):
    """In a checkout the index may not have the package, and the package need not be installed."""
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert extras.remedy("demo") == 'pip install "optaxclip[demo]"'
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert extras.remedy("demo") == 'pip install "optaxclip[demo]"'
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "optaxclip"\n')
    assert extras.remedy("demo") == f'pip install "{tmp_path}[demo]"'
    monkeypatch.chdir(tmp_path)
    assert extras.remedy("demo") == 'pip install ".[demo]"'


def test_missing_help_topics_are_said(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert_refused(capsys, ["demo"], "give a text with --text FILE")


def assert_refused(capsys, args, reason):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert len(printed.err.splitlines()) == 1
    assert reason in printed.err


def test_ctrl_c_is_quiet(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["demo"], "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_needs_no_extra_and_has_an_example():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({demo.NEEDS}));"
        "from optaxclip.__main__ import main; main(['demo', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "example:\n  python -m optaxclip demo" in done.stdout
    assert "agc          adaptive_grad_clip(0.01)" in done.stdout
    assert "zclip        zclip(max_norm=1.0)" in done.stdout


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def test_loss_curves_cut_explosions_off_and_cross_them_out():
    figure = Figure()
    ax = figure.subplots()
    losses = {"plain": [4.0, 1e30, np.nan, np.nan], "clipped": [4.0, 3.0, 1e9, 2.0]}
    assert plots.loss_curves(losses, [0, 10, 20, 30], ax=ax) is ax
    assert 4.0 < ax.get_ylim()[1] < 5.0
    assert labels(ax) == ["plain", "clipped", "not finite"]
    crosses = [line for line in ax.lines if line.get_marker() == "X" and len(line.get_xdata())]
    assert [line.get_xdata()[-1] for line in crosses] == [20]
    at = ax.transAxes.inverted().transform(crosses[0].get_transform().transform((20, 1)))
    assert at[1] == pytest.approx(1.0)
    assert crosses[0].get_color() == ax.lines[0].get_color() != ax.lines[1].get_color()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("limits", [{"ylim": (0.02, 2.0), "yscale": "log"}, {"xlim": (0.0, 0.1)}])
def test_crosses_stay_at_the_edge_of_axes_whose_limits_are_set_later(limits):
    figure = figures.side_by_side()
    for ax in figure.axes:
        plots.loss_curves({"lost": [1e30, 1e3, np.nan], "clipped": [0.3, 0.2, 0.2]}, ax=ax)
        ax.set(**limits)
    figure.draw_without_rendering()
    whole = figure.bbox
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
        assert ax.get_window_extent().height > 0.7 * whole.height


@pytest.mark.parametrize("losses", [[np.nan], [np.inf, np.nan], [2.0, 2.0], [np.nan, 3.0]])
def test_loss_curves_of_unusual_runs(losses):
    ax = plots.loss_curves({"run": losses}, ax=Figure().subplots())
    assert np.isfinite(ax.get_ylim()).all()
    if losses == [2.0, 2.0]:
        assert ax.get_ylim() == (1.0, 3.0)


def test_every_stretch_of_losses_that_are_not_finite_has_a_cross_and_a_rise_before_it():
    nan = np.nan
    for losses, crossed, rises in (
        ([nan, nan, 2.0], [0], 0),
        ([2.0, nan, nan, 1.0, np.inf], [1, 4], 2),
        ([nan, 2.0, nan], [0, 2], 1),
        ([2.0, 1.0], [], 0),
    ):
        ax = plots.loss_curves({"run": losses}, ax=Figure().subplots())
        found = [x for line in ax.lines if line.get_marker() == "X" for x in line.get_xdata()]
        assert (found, len(ax.patches)) == (crossed, rises)


def test_norm_curves_have_a_legend_on_axes_of_their_own():
    ax = plots.norm_curves({"a": np.geomspace(1, 1e9, 5)}, limit=2.0)
    assert ax.get_yscale() == "log"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "limit 2"]
    assert ax.lines[0].get_xdata()[0] == 0


def test_a_limit_is_named_and_coloured_after_its_run():
    ax = Figure().subplots()
    plots.norm_curves({"a": [1.0, 2.0], "b": [2.0, 3.0]}, limit={"b": 2.0}, ax=ax)
    assert labels(ax) == ["a", "b", "limit 2 of b"]
    assert ax.lines[-1].get_color() == ax.lines[1].get_color()


def test_equal_runs_are_all_seen():
    ax = plots.loss_curves({name: [2.0, 1.0] for name in "abc"}, ax=Figure().subplots())
    widths = [line.get_linewidth() for line in sorted(ax.lines, key=lambda line: line.zorder)]
    assert widths == sorted(set(widths), reverse=True)


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ({}, {}, "norms must be a dict with at least one run"),
        (
            {"a": []},
            {},
            "norms of 'a' must have at least one entry, got none; record some steps first",
        ),
        ({"a": np.ones((3, 2))}, {}, r"must have one axis, got the shape \(3, 2\); .* one column"),
        (
            {"a": [1.0]},
            {"steps": [1, 2]},
            r"steps must have one entry for each of 1 norms of 'a', got .*2",
        ),
        ({"a": [1.0]}, {"limit": {"b": 2.0}}, r"limit must be of the runs \['a'\], got \['b'\]"),
    ],
)
def test_curves_that_cannot_be_drawn(series, options, message):
    with pytest.raises(ValueError, match=message):
        plots.norm_curves(series, **options)


@pytest.mark.parametrize("draw", [plots.loss_curves, plots.norm_curves])
@pytest.mark.parametrize("series", [np.ones(3), np.array(1.0), [1.0, 2.0], "log.csv", None])
def test_curves_are_given_by_the_name_of_their_run(draw, series):
    with pytest.raises(TypeError, match=r"must be a dict .*, such as \{'run': .*\}, got "):
        draw(series)


@pytest.mark.parametrize("limit", [np.array([1.0, 1.5]), [1.0, 1.5], "1.0", True])
def test_a_limit_of_curves_is_a_number(limit):
    for given, name in ((limit, "limit"), ({"a": limit}, "limit of 'a'")):
        with pytest.raises(
            TypeError, match=rf"^{name} must be a number, got .*; plots\.norms_over"
        ):
            plots.norm_curves({"a": [1.0, 2.0]}, limit=given)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("values", ["log.csv", ["a", "b"], [[1.0], [2.0, 3.0]], {"a": 1.0}])
def test_curves_are_of_real_numbers(values):
    with pytest.raises(TypeError, match=r"norms of 'a' must be real numbers in one axis, got "):
        plots.norm_curves({"a": values})
    with pytest.raises(TypeError, match=r"norms must be real numbers in one axis, got "):
        plots.norms_over_steps(values)
