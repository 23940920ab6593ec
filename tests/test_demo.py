"""The demo: what it prints and draws, and that clipping helps."""

import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import demo

Figure = pytest.importorskip("matplotlib.figure").Figure
CLIPPED = [name for name in demo.METHODS if name != demo.UNCLIPPED]


@pytest.fixture
def small(monkeypatch):
    """A network that is soon trained."""
    for name, value in {"LENGTH": 20, "BATCH": 2, "HIDDEN": 8, "HELD_OUT_WINDOWS": 2}.items():
        monkeypatch.setattr(demo, name, value)


def trained(name, steps, seed=0):
    corpus = demo.encode(demo.help_topics())
    return demo.train(corpus, demo.METHODS[name](demo.sgd(steps)), steps, seed)


def test_demo_is_short():
    assert len(Path(demo.__file__).read_text("utf-8").splitlines()) <= 250


@pytest.mark.usefixtures("small")
def test_demo_prints_table_and_draws_picture(capsys, tmp_path):
    out = tmp_path / "made" / "for it"
    options = ["--steps", "13", "--methods", "clip_by_norm", "adagc"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        demo.main([*options, "--out", str(out)])
    first, header, *rows, last = capsys.readouterr().out.splitlines()
    assert (first, header) == ("13 steps with each method:", demo.HEADER)
    names = [demo.UNCLIPPED, "clip_by_norm", "adagc"]
    assert [row[:22].strip() for row in rows] == names
    assert rows[0].split()[-1] == "0%"
    assert last == f"picture: {out / demo.PICTURE}"
    assert (out / demo.PICTURE).read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.usefixtures("small")
def test_train_records_incomplete_last_part():
    history = trained("clip_by_norm", 13)
    assert [len(x) for x in history] == [13, 13, 13, 3]


def test_row_names_first_nonfinite_step():
    norm = np.array([30.0, 2.0, np.nan, 1.0])
    history = demo.History(norm, norm, norm > 1, np.array([3.0, 2.0, np.nan]))
    cells = ["zclip", "diverged", "2", "30", "50%"]
    assert demo.row("zclip", history).split() == [*cells, "non-finite", "from", "step", "3", "on"]


def test_draw_places_steps_and_threshold():
    norms = np.linspace(1, 3, 40)
    history = demo.History(norms, norms, norms > 1, np.ones(5))
    figure = Figure(layout="constrained")
    demo.draw({demo.UNCLIPPED: history, "clip_by_global_norm": history}, figure.subplots(1, 2))
    left, right = (ax.lines[0].get_xydata().tolist() for ax in figure.axes)
    # Losses are drawn at the number of steps before them, norms at the last step of their tens.
    assert [x for x, _ in left] == [0, 10, 20, 30, 40]
    assert right == [[step, norms[step - 1]] for step in (10, 20, 30, 40)]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [demo.UNCLIPPED, "clip_by_global_norm", "threshold 1"]


@pytest.mark.slow
def test_clipping_rescues_demo(monkeypatch):
    for name, value in {"LENGTH": 80, "BATCH": 4, "HELD_OUT_WINDOWS": 8}.items():
        monkeypatch.setattr(demo, name, value)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain, clipped = (trained(name, 60) for name in (demo.UNCLIPPED, "clip_by_global_norm"))
    assert np.isnan(plain.held_out[-1])
    assert np.isfinite(clipped.loss).all()
    assert clipped.held_out[-1] < np.nanmin(plain.held_out) - 1
    same = slice(0, np.flatnonzero(clipped.clipped)[0])
    np.testing.assert_array_equal(plain.loss[same], clipped.loss[same])
    assert not plain.clipped.any()


def test_methods_bound_explosion_at_first_step():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 1e6 * x, params)

    @jax.jit
    def explode():
        clips = {name: demo.METHODS[name](demo.optax.identity()) for name in CLIPPED}
        return {
            name: clip.update(grads, clip.init(params), params)[0] for name, clip in clips.items()
        }

    for name, updates in explode().items():
        assert jnp.abs(updates["w"]).max() <= 1.0, name


def test_rare_characters_share_number():
    text = "".join(map(chr, range(300, 500))) + "a" * 1800
    corpus = demo.encode(text)
    assert corpus.train.max() == demo.SYMBOLS - 1
    assert (corpus.train == 0).sum() == 200 - (demo.SYMBOLS - 2)
    assert len(corpus.held_out) == demo.HELD_OUT_FRACTION * len(text)


@pytest.mark.parametrize(
    "options", ["--steps 0", "--steps 1.5", "--methods magic", "--color", "--text {short}"]
)
def test_demo_rejects_wrong_options(options, tmp_path, capsys):
    (tmp_path / "short").write_text("too short")
    with pytest.raises(SystemExit) as stopped:
        demo.main(options.format(short=tmp_path / "short").split())
    assert stopped.value.code == 2
    assert capsys.readouterr().out == ""


def test_git_ignores_picture():
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("no repository")
    subprocess.run(["git", "-C", root, "check-ignore", "-q", demo.PICTURE], check=True)
