"""The rows of logs: what is a norm, which step it is of, and which rows count."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
from event_files import tensorboard

from optaxclip import plots, tuning
from optaxclip.__main__ import main
from optaxclip.tuning.files import parse_norms, read_norms

NORMS = np.exp(0.1 * np.random.default_rng(0).normal(size=200)).round(4)
NORMS[150] = 30.0


def rows(line, steps=range(200), ranks=1):
    """A line for each step, and for each of the processes that print it."""
    return "\n".join(line.format(s=s, x=NORMS[s], r=r) for s in steps for r in range(ranks))


def read(text, column=None):
    return parse_norms(text.encode(), column, "log")


def suggestion(text, tmp_path):
    (tmp_path / "log").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tuning.suggest(tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (rows("step {s}, loss: {x}"), r"no column looks like a gradient norm; pass column=NAME if"),
        ("accuracy\n" + rows("{x}"), r"no column looks like .* one of \['accuracy'\]"),
        ("loss,accuracy\n" + rows("{x},{x}"), r"no column looks like .* \['loss', 'accuracy'\]"),
        ("a_norm,b_norm\n1,2", r"choose one of \['a_norm', 'b_norm'\], as column='a_norm'"),
        (rows("{{'loss': {x}, 'grad_norm': None}}"), "the column 'grad_norm' is empty; the col"),
        (rows("step: {s} loss: {x} grad_norm: None"), "the column 'grad_norm' is empty; the col"),
        ("grad_norm,loss\n" + rows("None,{x}"), "the column 'grad_norm' is empty; the col"),
        ("key,value,step\n" + rows("loss,1,{s}\nlr,{x},{s}"), r"no column looks .*'loss', 'lr'\]"),
        ("run,key,value\n" + rows("a,norm,1\nb,norm,{x}"), r"choose one of \['a - norm', 'b - n"),
    ],
)
def test_what_is_no_norm_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        read(text)


def test_the_command_says_how_to_choose(tmp_path, capsys):
    (tmp_path / "log").write_text("loss,accuracy\n" + rows("{x},{x}"))
    with pytest.raises(SystemExit):
        main(["suggest", str(tmp_path / "log")])
    assert "; pass --column NAME if it is one of ['loss', 'acc" in capsys.readouterr().err


OF_STEPS = {
    "a column": "step,grad_norm\n" + rows("{s},{x}"),
    "spaces": "step  grad_norm loss\n" + rows("  {s}   {x}  2.0 "),
    "a comment with names": "# by hand\n# step grad_norm\n" + rows("{s} {x}"),
    "comments": "# by hand\nstep,grad_norm\n# more\n" + rows("{s},{x}"),
    "words and numbers": rows("[{s}/200] step {s} grad_norm {x} loss 2.0"),
    "a step without a sign": rows("step {s}, grad_norm: {x}"),
    "a long table": "run,key,value,step\n" + rows("a,loss,9,{s}\na,grad_norm,{x},{s}"),
    "a long table of objects": rows(
        '{{"tag": "loss", "value": 9, "step": {s}}}\n'
        '{{"tag": "train/grad_norm", "value": {x}, "step": {s}}}'
    ),
    "objects in objects": rows('{{"eval": {{"step": 7}}, "train": {{"step": {s}, "norm": {x}}}}}'),
    "two objects in a line": rows('{{"step": {s}, "loss": 9}} {{"step": {s}, "grad_norm": {x}}}'),
    "eight processes": rows("[{r}] step: {s} grad_norm: {x}", ranks=8),
    "a restart": "step,norm\n" + rows("{s},9", range(99, 180)) + "\n" + rows("{s},{x}"),
    "a shorter run after a longer one": (
        "step,norm\n" + rows("{s},9") + "\n" + rows("{s},8") + "\n1000,7\n" + rows("{s},{x}")
    ),
    "epochs": "epoch,step,norm\n" + rows("{s}e-2,{s},{x}"),
}


@pytest.mark.parametrize("kind", OF_STEPS)
def test_each_step_of_a_log_counts_once(kind):
    found = read(OF_STEPS[kind])
    np.testing.assert_array_equal(found.norms, NORMS)
    assert found.steps.tolist() == [*range(200)]
    again = {"eight processes": 1400, "a restart": 81, "a shorter run after a longer one": 401}
    assert found.again == again.get(kind, 0)


def test_steps_that_begin_anew_in_each_epoch_are_all_read():
    found = read(
        "epoch,iter,norm\n" + "\n".join(f"{e},{i},{e}.{i}" for e in (0, 1) for i in (1, 2))
    )
    assert (found.norms.tolist(), found.steps, found.again) == ([0.1, 0.2, 1.1, 1.2], None, 0)


def test_steps_are_those_of_the_log(tmp_path):
    tenth = "step,norm\n" + "\n".join(f"{10 * s},{x}" for s, x in enumerate(NORMS))
    found = suggestion(tenth, tmp_path)
    assert found.spikes.tolist() == json.loads(json.dumps(found.to_dict()))["spikes"] == [1500]
    assert "1 spikes from 30 to 30" in str(found)
    assert found.doubts[0].startswith("the log has one of 10 steps, and shows no spike of the oth")
    assert "keeps the norm of every step" in str(found).splitlines()[1]
    pytest.importorskip("matplotlib")
    lines = {line.get_label(): line for line in plots.norms_over_steps(found).lines}
    assert lines["above the threshold (1)"].get_xdata().tolist() == [1500]
    bars = plots.norm_histogram(found).get_legend_handles_labels()[1]
    assert "spikes (1)" in bars
    # Without a column of steps they are the rows, from 0.
    found = suggestion("norm\n" + rows("{x}"), tmp_path)
    assert (found.spikes.tolist(), found.doubts) == ([150], ())
    lines = {line.get_label(): line for line in plots.norms_over_steps(found).lines}
    assert lines["above the threshold (1)"].get_xdata().tolist() == [150]
    assert plots.norms_over_steps(NORMS, 3.0).lines[0].get_xdata()[0] == 0


def test_rows_that_were_left_out_are_counted(tmp_path):
    found = suggestion(OF_STEPS["eight processes"], tmp_path)
    assert (found.again, found.to_dict()["again"], len(found.norms)) == (1400, 1400, 200)
    assert "200 steps of the column 'grad_norm' (1400 rows of steps that came again" in str(found)


def test_event_files_of_a_run_that_began_again(tmp_path):
    for run, steps in (0, range(180)), (1, range(100, 200)):
        folder = str(tmp_path / "runs" / "a")
        with tensorboard().SummaryWriter(folder, filename_suffix=f".{run}") as writer:
            for step in steps:
                writer.add_scalar("norm", NORMS[step] if run or step < 100 else 9.0, 10 * step)
    found = read_norms(tmp_path / "runs" / "a")
    np.testing.assert_array_equal(found.norms, np.float32(NORMS))
    assert (found.steps.tolist(), found.again) == ([*range(0, 2000, 10)], 80)
    with pytest.raises(ValueError, match=r"but its folders do: pass one of \['.*runs/a'\]"):
        read_norms(tmp_path)


def test_whoever_reads_the_output_may_stop(tmp_path):
    (tmp_path / "log").write_text("norm\n" + rows("{x}"))
    command = [sys.executable, "-m", "optaxclip", "suggest", str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141
