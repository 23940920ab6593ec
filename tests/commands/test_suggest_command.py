"""The command `suggest`."""

import io
import json
import sys

import numpy as np
import pytest

from optaxclip.__main__ import main

pytest.importorskip("pandas")


@pytest.fixture
def log(tmp_path):
    norms = np.exp(0.2 * np.random.default_rng(0).normal(size=200))
    norms[100] = 20.0
    rows = [f"{step},{norm},{norm / 2}" for step, norm in enumerate(norms)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["step,grad_norm,other_norm", *rows]))
    return path


def test_suggest_command_prints_suggestion(log, capsys, monkeypatch):
    assert main(["suggest", str(log)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("threshold ")
    assert "the norms are from 'grad_norm'" in printed
    monkeypatch.setattr(sys, "stdin", io.StringIO(log.read_text()))
    assert main(["suggest", "-", "--column", "other_norm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["column"], found["spikes"]) == ("other_norm", [100])


def test_suggest_command_draws_picture(log, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["suggest", str(log), "--plot", str(tmp_path / "norms")]) == 0
    assert (tmp_path / "norms.png").stat().st_size > 10_000
    assert "plot: " in capsys.readouterr().out


def test_suggest_command_explains_wrong_input(log, capsys):
    log.write_text(log.read_text().replace("grad_norm,other_norm", "a/grad_norm,b/grad_norm"))
    for args, message in (
        ([str(log)], "pass --column 'a/grad_norm' or another of"),
        ([f"{log}.txt"], "cannot read"),
        ([str(log), "--column", "norm"], "has no column 'norm'; use one of"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["suggest", *args])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
