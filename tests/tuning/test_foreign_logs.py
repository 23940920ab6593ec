"""Logs of other projects: their formats, the column that is taken, and how fast they are read."""

import json
import warnings

import numpy as np
import pytest

from optaxclip import tuning
from optaxclip.__main__ import main
from optaxclip.tuning.files import parse_norms

NORMS = np.exp(0.1 * np.random.default_rng(0).normal(size=60)).round(4)
NORMS[[20, 40]] = 20.0, np.nan
LOGGED = [
    {"epoch": 0.1 * i, "grad_norm": x, "learning_rate": 5e-05, "loss": 2.0, "step": 10 * i}
    for i, x in enumerate(NORMS.tolist())
]


def trainer_state():
    """As Transformers writes it: evaluations amid the steps, a summary at the end."""
    log = list(LOGGED)
    log.insert(30, {"epoch": 0.5, "eval_loss": 2.5, "eval_runtime": 1.5, "step": 300})
    log.append({"epoch": 1.0, "total_flos": 1e15, "train_loss": 2.2, "train_runtime": 9.0})
    control = {"args": {"should_log": False}, "attributes": {}}
    state = {"best_metric": None, "epoch": 1.0, "global_step": 60, "log_history": log}
    state |= {"stateful_callbacks": {"TrainerControl": control}, "trial_params": None}
    return json.dumps(state, indent=2, sort_keys=True) + "\n"


def printed(as_text=False):
    """What `Trainer` prints, in the newest versions with numbers as text."""
    text = "Some weights were not initialized: ['a', 'b']\n{'lr': None}\n"
    for i, row in enumerate(LOGGED):
        shown = {key: f"{x:.6g}" if as_text else x for key, x in row.items()}
        text += f"\r  {i}%|#    | {i}/60 [00:01<00:09,  8.1it/s]{shown}\x1b[A\n"
    return text + "{'train_runtime': 9.0, 'train_loss': 2.2, 'epoch': 1.0}\n"


def megatron():
    text = "building GPT model ...\n > number of parameters: 1234\n"
    for i, x in enumerate(NORMS):
        text += (
            f" [2026-09-14 15:08:34.201] iteration {i:8d}/  500 | consumed samples: {8 * i:12d} | "
            f"elapsed time per iteration (ms): 62.3 | learning rate: 1.2E-04 | lm loss: 6.4E+00 | "
            f"grad norm: {x:.4f} | params norm: 2241.466 | number of nan iterations:   0 |\n"
        )
    return text


def llm_c():
    lines = [
        f"step {i:5d}/60 | loss 6.40 (+nanz)| norm {x:.4f} (+0.21z)| lr 1.2e-04 | 62.3 ms | 8 tok/s"
        for i, x in enumerate(NORMS)
    ]
    return "\n".join(["+-----+", "| device | A100 |", *lines])


def torchtitan():
    lines = [
        f"[rank0]:2026-09-14 15:08:34,201 - root - INFO - \x1b[31mstep: {i:2}  \x1b[32mloss:  8.1  "
        f"\x1b[33mgrad_norm: {x:7.4f}  \x1b[34mmemory:  0.5GiB(1.2%)  tps: 1,234\x1b[39m"
        for i, x in enumerate(NORMS)
    ]
    return "\n".join(["[rank0]:2026-09-14 15:08:33 - root - INFO - Starting job", *lines])


def of_absl():
    lines = [f"I0914 15:08:34.2 140 train.py:50] {json.dumps({'train': row})}" for row in LOGGED]
    return "\n".join(["I0914 15:08:33.1 140 train.py:9] JAX 0.10", *lines])


def chart(*runs, metric="train/grad_norm"):
    """As Weights & Biases exports a chart: three columns a run, quoted, with blank cells."""
    parts = ("", "__MIN", "__MAX")
    header = ["Step", *(f"{run} - {metric}{part}" for run in runs for part in parts)]
    lines = [header]
    for i, x in enumerate(NORMS):
        lines.append([i, *(y for _ in runs for y in (x, x / 2, 2 * x))])
        lines.append([i + 0.5, *([""] * 3 * len(runs))])
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


def with_index(name, metric):
    lines = [f"{i},{i},{x}" for i, x in enumerate(NORMS)]
    return "\n".join([f"{name},step,{metric}", *lines])


FORMATS = {
    "trainer_state.json": (trainer_state(), "grad_norm"),
    "printed dicts": (printed(), "grad_norm"),
    "printed dicts of text": (printed(as_text=True), "grad_norm"),
    "Megatron": (megatron(), "grad norm"),
    "llm.c": (llm_c(), "norm"),
    "torchtitan": (torchtitan(), "grad_norm"),
    "JSON behind a logger's time": (of_absl(), "train.grad_norm"),
    "one chart": (chart("lr=0.1, run/1.5"), "lr=0.1, run/1.5 - train/grad_norm"),
    "an index": (with_index("", "value"), "value"),
    "an index that was read": (with_index("Unnamed: 0", "value"), "value"),
    "logfmt": ("\n".join(f"t=1 grad_norm={x} loss=2" for x in NORMS), "grad_norm"),
    "tensors": ("\n".join(f"{{'norm': tensor({x}), 'b': 1}}" for x in NORMS), "norm"),
    "redirected by PowerShell": (megatron(), "grad norm"),
}
FORMATS["one chart"] = (chart("lr=0.1 run/1.5"), "lr=0.1 run/1.5 - train/grad_norm")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_of_other_projects(kind, tmp_path, capsys):
    text, column = FORMATS[kind]
    encoding = "utf-16" if "PowerShell" in kind else "utf-8"
    (tmp_path / "log").write_bytes(text.encode(encoding))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = tuning.suggest(tmp_path / "log")
    np.testing.assert_array_equal(found.norms, NORMS)
    is_tenth = '"step": 10' in text or "'step': 10" in text or "'step': '10'" in text
    assert (found.steps[20], found.spikes.tolist()) == ((200, [200]) if is_tenth else (20, [20]))
    tenth = (
        "the log has one of 10 steps, and shows no spike of the others: optaxclip.monitor.record"
    )
    assert any(doubt.startswith(tenth) for doubt in found.doubts) == is_tenth
    assert found.column == column
    assert main(["suggest", str(tmp_path / "log")]) == 0
    assert f" steps of the column {column!r}, 1 of them not finite" in capsys.readouterr().out
    named = parse_norms(text.encode(), column, "log")
    np.testing.assert_array_equal(named.norms, NORMS)


def test_a_last_line_that_was_cut_off_is_left_out():
    for text in (printed().split("{'train_runtime'")[0], of_absl()):
        whole = text.rstrip("\x1b[A\n")
        for end in (1, 3, 40):
            found = parse_norms(whole[:-end].encode(), None, "log").norms
            np.testing.assert_array_equal(found, NORMS[:-1])


PLAIN = [
    (["step", "loss", "grad_norm", "param_norm"], "grad_norm"),
    (["grad norm", "params norm", "weight_norm"], "grad norm"),
    (["norm", "layer_norm_scale"], "norm"),
    (["Grad Norm", "layers/0/grad_norm", "layers/1/grad_norm"], "Grad Norm"),
    (["train/grad_norm", "train/grad_norm_clipped", "train/loss"], "train/grad_norm"),
    (["grad_norm", "grad_norm_max", "num_grad_norms"], "grad_norm"),
    (["optim/total_grad_norm", "optim/update_norm"], "optim/total_grad_norm"),
    (["grad_2.0_norm_total", "grad_2.0_norm/w", "grad_2.0_norm/b"], "grad_2.0_norm_total"),
    (["gnorm", "wps", "loss"], "gnorm"),
    (["loss", "record/norm", "clip/norm", "clip/threshold", "skip/norm"], "record/norm"),
    (["train/record/norm", "train/clip/norm"], "train/record/norm"),
    (["clip_by_global_norm/norm", "clip_by_global_norm/threshold"], "clip_by_global_norm/norm"),
    (["Step", "Wall time", "Value"], "Value"),
    (["_step", "_runtime", "_timestamp", "value"], "value"),
    (["actor/grad_norm", "critic/grad_norm", "norm"], None),
    (["a - grad_norm", "b - grad_norm"], None),
]


@pytest.mark.parametrize(("names", "column"), PLAIN, ids=lambda x: x[0] if type(x) is list else "")
def test_the_column_that_is_plainly_the_norm(names, column):
    for text in (
        ",".join(names) + "\n" + ",".join(map(str, range(len(names)))),
        json.dumps(dict(zip(names, range(len(names)), strict=True))),
    ):
        if column is None:
            with pytest.raises(ValueError, match="log has several columns: choose one of") as said:
                parse_norms(text.encode(), None, "log")
            assert f"{names[:2]}" in str(said.value)
        else:
            found = parse_norms(text.encode(), None, "log")
            assert (found.name, found.norms.tolist()) == (column, [names.index(column)])


def test_a_null_is_a_norm_that_is_not_finite():
    text = '{"norm": 1.0, "threshold": null}\n{"norm": null}\n{"loss": 2.0}'
    np.testing.assert_array_equal(parse_norms(text.encode(), None, "log").norms, [1.0, np.nan])
    with pytest.raises(ValueError, match="the column 'threshold' is empty"):
        parse_norms(text.encode(), "threshold", "log")


@pytest.mark.parametrize("text", ["note,norm\nlr=1,2.5\nlr=2,3.5\n", "lr=1,norm\n1,2.5\n2,3.5\n"])
def test_csv_with_named_numbers_in_it_is_csv(text):
    assert parse_norms(text.encode(), "norm", "log").norms.tolist() == [2.5, 3.5]


def test_nothing_is_read_from_a_part_of_a_number():
    for cell in ("1,234.5", "12ms", "1.2.3", "0x1", "1e", "nans"):
        lines = f"norm: {cell}\nnorm: 2.5\n"
        assert parse_norms(lines.encode(), None, "log").norms.tolist() == [2.5]


@pytest.mark.parametrize(
    ("text", "norms"),
    [
        # Weights & Biases draws means, minima and maxima of what has any name.
        ("Step,run - value,run - value__MIN,run - value__MAX\n1,1.5,1,2\n2,2.5,2,3\n", [1.5, 2.5]),
        ("phase,value\nwarm,1.5\nwarm,2.5\n", [1.5, 2.5]),
        # Cells, of which each row has one that names a number.
        ("grad_norm,note\n1.5,lr: 0.1\n2.5,lr: 0.2\n", [1.5, 2.5]),
        # A line of words may hold what is no JSON; only one that begins as JSON must be JSON.
        ('a {"norm": 1.5}\nb {"norm" 7\nc {"norm": 2.5}\n', [1.5, 2.5]),
        ('{"tests": [{"norm": 7}], "log": [{"norm": 1.5}, {"norm": 2.5}]}', [1.5, 2.5]),
    ],
)
def test_what_holds_the_norms_is_found_beside_what_does_not(text, norms):
    assert parse_norms(text.encode(), None, "log").norms.tolist() == norms
