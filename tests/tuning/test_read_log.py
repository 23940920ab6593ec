"""`read_log`: formats of logs, choice of the column, steps. All logs are made up."""

import io
import json
import sys

import numpy as np
import pytest

from optaxclip import tuning

pytest.importorskip("pandas")


def read(text, column=None, **options):
    return tuning.read_log(io.StringIO(text), column, **options).to_dict()


STATE = {
    "best_metric": None,
    "log_history": [
        {"step": 10, "grad_norm": 1.5, "loss": 3.0},
        {"step": 10, "eval_loss": 2.0},
        {"step": 20, "grad_norm": 2.5, "loss": 3.0},
    ],
    "stateful_callbacks": {"control": {"args": {"grad_norm": 1.0}}},
}
SWIN = "[2030-01-01 net] (main.py 9): INFO Train: [1/300][%d/390]\teta 0:22:23 lr 0.1\t"
MMENGINE = "01/02 11:32:38 - mmengine - INFO - Epoch(train) [%d][  50/100]  lr: 1.9e-03  eta: 1 day"
MEGATRON = " iteration  %d/  90 | samples:   8 | loss: 1.2E+1 | grad norm: %g | nan: 0 |\n"
FAIRSEQ = '2030-01-01 12:00 | INFO | train_inner | {"epoch": 1, "update": 0.01, "loss": "12.3", '
TITAN = "[rank0]:2030-01-01 - root - INFO - \x1b[31mstep: %d  \x1b[32mloss:  8.1  \x1b[33m"
TABLE = "------------\n| grad_norm  | %g |\n| param_norm | 227  |\n| step  | %.2e |\n------------\n"

# Each log has the norms 1.5 and 2.5 at these steps.
FORMATS = {
    "CSV": ("step,loss,grad_norm\n10,2.5,1.5\n20,2.4,2.5\n", (10, 20)),
    "TSV with blanks": ("step\tloss\tGrad Norm\n5\t2.5\t1.5\n6\t2.5\t\n7\t2\t2.5", (5, 7)),
    "one column": ("grad_norm\n1.5\n2.5", (0, 1)),
    "numbers alone": ("1.5\n2.5", (0, 1)),
    "spaced table": ("step loss  grad_norm\n1 2.0  1.5\n2 2.0  2.5", (1, 2)),
    "Markdown": (
        "# Run\n\n| Step | Loss | Grad Norm |\n|---:|:---:|---|\n| 5 | 2 | 1.5 |\n| 6 | 2 | 2.5 |",
        (5, 6),
    ),
    "MLflow": ("key,value,step\nloss,9,1\ngrad_norm,1.5,1\nloss,8,2\ngrad_norm,2.5,2", (1, 2)),
    "Lightning": (
        "epoch,grad_2.0_norm_total,step,train_loss\n0,1.5,49,\n0,,49,2.0\n0,2.5,99,\n0,,99,1.9",
        (49, 99),
    ),
    "W&B export": (
        '"Step","r 7 - train/grad_norm","r 7 - train/grad_norm__MIN","r 7 - train/grad_norm__MAX"\n'
        '"1","1.5","1.5","1.5"\n"2","","",""\n"3","2.5","2.5","2.5"',
        (1, 3),
    ),
    "RLlib": (
        "training_iteration,info\n1,\"{'learner': {'a': {'grad_gnorm': 1.5, 'lr': 0.1}}}\"\n"
        "2,\"{'learner': {'a': {'grad_gnorm': np.float32(2.5), 'lr': 0.1}}}\"",
        (1, 2),
    ),
    "TensorBoard CSV": ("Wall time,Step,Value\n17.5,100,1.5\n18.5,200,2.5", (100, 200)),
    "TensorBoard JSON": ("[[17.5, 100, 1.5], [18.5, 200, 2.5]]", (100, 200)),
    "Hugging Face state": (json.dumps(STATE, indent=1), (10, 20)),
    "Hugging Face prints": (
        "Loading: 100%|####| 30/30 [00:01<00:00]\n"
        "  1%|#   | 20/2353 [00:11<12:01]{'loss': 4.1, 'grad_norm': 1.5, 'epoch': 0.1}\n"
        "  2%|#   | 40/2353 [00:21<12:01]{'loss': 4.1, 'grad_norm': '2.5', 'epoch': 0.1}\n",
        (20, 40),
    ),
    "TRL": (
        '{"loss": 3.1, "grad_norm": 1.5, "epoch": 0.1}\n{"eval_loss": 3.0, "epoch": 0.1}\n'
        '{"loss": 3.1, "grad_norm": 2.5, "epoch": 0.2}\n{"loss": 3.1, "gra',
        (0, 1),
    ),
    "ms-swift": (
        '{"grad_norm": 1.5, "global_step/max_steps": "10/438"}\n'
        '{"grad_norm": 2.5, "global_step/max_steps": "20/438"}',
        (10, 20),
    ),
    "nested JSON lines": (
        '{"train": {"grad_norm": 1.5}, "step": 1}\n{"train": {"grad_norm": 2.5}, "step": 2}',
        (1, 2),
    ),
    "JSON in lines": (
        'I0914 15:08 train.py:50] {"train": {"grad_norm": 1.5, "step": 1}}\n'
        'I0914 15:08 train.py:50] {"train": {"grad_norm": 2.5, "step": 2}}',
        (1, 2),
    ),
    "Swin": (
        f"{SWIN % 0}grad_norm 1.5 (1.5)\tmem 8947MB\n{SWIN % 10}grad_norm 2.5 (2.0)\tmem 8947MB",
        (390, 400),
    ),
    "mmengine": (
        "01/02 11:32:17 - mmengine - WARNING - nothing\n"
        f"{MMENGINE % 1}  grad_norm: 1.5  loss: 1.1\n{MMENGINE % 2}  grad_norm: 2.5  loss: 1.1",
        (50, 150),
    ),
    "timm": (
        "Train: 0 [  50/1251 (  4%)]  Loss: 6.9 (6.9)  grad_norm: 1.5 (1.5)  LR: 1.0e-04\n"
        "Train: 1 [   0/1251 (  0%)]  Loss: 6.9 (6.9)  grad_norm: 2.5 (2.5)  LR: 1.0e-04",
        (50, 1251),
    ),
    "Megatron": (
        f"{MEGATRON % (1, 1.5)}[Rank 3] memory (MB) | allocated: 17.5 |\n{MEGATRON % (2, 2.5)}",
        (1, 2),
    ),
    "fairseq": (
        f'{FAIRSEQ}"gnorm": "1.5", "num_updates": "100"}}\n'
        f'{FAIRSEQ}"gnorm": "2.5", "num_updates": "200"}}',
        (100, 200),
    ),
    "old fairseq": (
        "| epoch 001:  100 / 1000 loss=12.3, ppl=9.1, num_updates=101, lr=0.1, gnorm=1.5, clip=1\n"
        "| epoch 001:  200 / 1000 loss=12.3, ppl=9.1, num_updates=201, lr=0.1, gnorm=2.5, clip=1",
        (101, 201),
    ),
    "nanoGPT": (
        "using fused AdamW: True\nstep     0 | loss: 10.9 | lr 8.3e-07 | norm: 1.5 | dt: 23.5ms\n"
        "step     1 | loss: 10.9 | lr 8.3e-07 | norm: 2.5 | dt: 23.5ms | tok/sec: 9.5",
        (0, 1),
    ),
    "llm.c": (
        "step    1/60 | loss 6.40 (+nanz)| norm 1.5 (+0.21z)| lr 1.2e-04 | 62.3 ms | 8 tok/s\n"
        "step    2/60 | loss 6.40 (+nanz)| norm 2.5 (+0.21z)| lr 1.2e-04 | 62.3 ms | 8 tok/s",
        (1, 2),
    ),
    "torchtitan": (
        f"{TITAN % 1}grad_norm: 1.5  \x1b[34mmemory:  0.5GiB(1.2%)\x1b[39m\n"
        f"{TITAN % 2}grad_norm: 2.5  \x1b[34mmemory:  0.5GiB(1.2%)\x1b[39m",
        (1, 2),
    ),
    "verl": (
        "\x1b[36m(main pid=9)\x1b[0m step:0 - critic/kl:0.000 - actor/grad_norm:1.5 - lr:0.1\n"
        "\x1b[36m(main pid=9)\x1b[0m step:1 - critic/kl:0.000 - actor/grad_norm:2.5 - lr:0.1",
        (0, 1),
    ),
    "Coqui": (
        "\x1b[1m   --> STEP: 24/36 -- GLOBAL_STEP: 125\x1b[0m\n     | > loss_0: 3.0  (3.4)\n"
        "     | > grad_norm: 1.5  (2.7)\n\n\x1b[1m   --> STEP: 13/36 -- GLOBAL_STEP: 150\x1b[0m\n"
        "     | > loss_0: 3.0  (3.4)\n     | > grad_norm: 2.5  (2.7)\n",
        (125, 150),
    ),
    "key-value tables": (TABLE % (1.5, 4480) + TABLE % (2.5, 4490), (4480, 4490)),
    "logfmt": ("t=7 grad_norm=1.5 loss=2\nt=8 grad_norm=tensor(2.5) loss=2", (0, 1)),
    "parts of numbers": ("norm: 1.5\nnorm: 12ms\nnorm: 1.2.3\nnorm: 1,234.5\nnorm: 2.5", (0, 1)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_read_log_reads_format(name):
    text, steps = FORMATS[name]
    assert read(text) == dict(zip(steps, (1.5, 2.5), strict=True))


@pytest.mark.parametrize(
    ("names", "column"),
    [
        (["step", "loss", "grad_norm", "param_norm", "max_grad_norm"], "grad_norm"),
        (["grad_norm", "grad_norm_clipping", "config.grad_norm", "num_grad_norms"], "grad_norm"),
        (["Grad Norm", "layers/0/grad_norm", "layers/1/grad_norm"], "Grad Norm"),
        (["norm", "layer_norm_scale", "weight_norm"], "norm"),
        (["optim/total_grad_norm", "optim/update_norm"], "optim/total_grad_norm"),
        (["train/grad_norm", "train/grad_norm_clipped", "train/loss"], "train/grad_norm"),
        (["loss", "record/norm", "clip/norm", "clip/threshold"], "record/norm"),
        (["clip_by_global_norm/norm", "clip_by_global_norm/threshold"], "clip_by_global_norm/norm"),
        (["_step", "_runtime", "_timestamp", "train/gnorm"], "train/gnorm"),
        (["step", "param_norm", "loss"], None),
        (["step", "max_grad_norm"], None),
        (["step", "grad_norm_clipping"], None),
        (["step", "normalized_score"], None),
        (["step", "config.grad_norm"], None),
        (["step", "params/norm"], None),
        (["step", "grad_norm_loss"], None),
        (["actor/grad_norm", "critic/grad_norm", "norm"], None),
        (["epoch", "grad_norm_avg", "grad_norm_val"], None),
        (["a - grad_norm", "b - grad_norm"], None),
    ],
    ids=lambda names: ",".join(names) if isinstance(names, list) else "",
)
def test_read_log_chooses_column(names, column):
    csv = f"{','.join(names)}\n" + "".join(
        ",".join(f"{row}.{i}" for i in range(len(names))) + "\n" for row in (1, 2)
    )
    rows = csv.splitlines()[1:]
    lines = "\n".join(json.dumps(dict(zip(names, row.split(","), strict=True))) for row in rows)
    for text in (csv, lines):
        if column is not None:
            assert [*read(text).values()] == [x + names.index(column) / 10 for x in (1, 2)]
            continue
        with pytest.raises(ValueError, match="pass column=") as error:
            read(text)
        norms = [name for name in names if "norm" in name]
        assert any(f"'{name}'" in str(error.value) for name in norms)
        assert [*read(text, norms[0]).values()] == [x + names.index(norms[0]) / 10 for x in (1, 2)]


# Words in names of settings, of other norms, and of other facts about norms. A rename must not
# change them, because they are in the logs of other programs.
SETTING_WORDS = [
    *("max", "min", "clip", "clipping", "clipped", "limit", "threshold"),
    *("param", "params", "parameter", "parameters", "weight", "weights", "update", "updates"),
    *("normalized", "num", "ratio", "batch", "layer", "coef", "std", "var", "after", "post"),
]
SETTING_GROUPS = ["config", "args", "hparams", "hyperparams", *SETTING_WORDS[7:15]]


@pytest.mark.parametrize(
    "column",
    [
        *(f"{word}_grad_norm" for word in SETTING_WORDS),
        *(f"grad_norm_{word}" for word in SETTING_WORDS),
        *(f"{group}{dot}grad_norm" for group in SETTING_GROUPS for dot in "/."),
    ],
)
def test_read_log_rejects_settings(column):
    with pytest.raises(ValueError, match="no column of the log looks like gradient norms; pass"):
        read(f"step,loss,{column}\n1,2.0,1.5\n2,2.0,2.5")


def test_read_log_rejects_wrong_columns():
    with pytest.raises(
        ValueError, match=r"has no column 'norm'; use one of \['grad_norm', 'step'\]"
    ):
        read("step,grad_norm\n1,2\n2,3", "norm")
    with pytest.raises(ValueError, match=r"column 'grad_norm' of .*, but row 2 contains '1,5'; "):
        read("step;grad_norm\n1;2\n2;1,5\n3;4\n4;5\n5;6\n6;7")
    for text, said in {"it is a story": "contains no name/value pairs", "": "is empty"}.items():
        with pytest.raises(ValueError, match=f"^the log {said}; "):
            read(text)


def test_read_log_keeps_nonfinite_norms():
    found = read('{"grad_norm": null}\n{"loss": 1}\n{"grad_norm": NaN}\n{"grad_norm": 1.5}')
    np.testing.assert_array_equal([*found.values()], [np.nan, np.nan, 1.5])
    found = read("step,grad_norm\n1,nan\n2,\n3,inf\n4,1.5")
    np.testing.assert_array_equal([*found.values()], [np.nan, np.inf, 1.5])
    assert [*found] == [1, 3, 4]


def test_read_log_replaces_steps_after_restart():
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 4.0), (3, 5.0), (4, 6.0)]
    csv = "step,grad_norm\n" + "\n".join(f"{step},{norm}" for step, norm in rows)
    lines = "\n".join(f"step {step}/90 done: grad norm = {norm}" for step, norm in rows)
    for text in (csv, lines):
        assert read(text) == {1: 1.0, 2: 4.0, 3: 5.0, 4: 6.0}


def test_read_log_counts_steps_across_epochs():
    rows = [f"{epoch},{step},1.5" for epoch in (0, 1) for step in (10, 20, 30)]
    assert [*read("epoch,iter,grad_norm\n" + "\n".join(rows))] == [10, 20, 30, 50, 60, 70]


def test_read_log_uses_pattern():
    text = "it 5 gn 1.5\nit 6 gn 2.5"
    found = read(text, pattern=r"it (?P<step>\d+) gn (?P<grad_norm>\S+)")
    assert found == {5: 1.5, 6: 2.5}
    found = read("gn~1.5;it~5\ngn~2.5;it~6", "gn", pattern=r"(?P<name>\w+)~(?P<value>[\d.]+)")
    assert found == {5: 1.5, 6: 2.5}


def test_read_log_reads_files(tmp_path):
    np.save(tmp_path / "norms.npy", np.float32([1.5, 2.5]))
    assert [*tuning.read_log(tmp_path / "norms.npy")] == [1.5, 2.5]
    text, _ = FORMATS["Megatron"]
    (tmp_path / "log.txt").write_bytes(text.encode("utf-16"))  # as PowerShell redirects
    assert tuning.read_log(tmp_path / "log.txt").to_dict() == {1: 1.5, 2: 2.5}


def test_read_log_reads_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    tensorboardx = pytest.importorskip("tensorboardX")
    with tensorboardx.SummaryWriter(str(tmp_path / "run")) as writer:
        for step in (1, 2):
            writer.add_scalar("train/grad_norm", step + 0.5, 10 * step)
            writer.add_scalar("train/loss", 9.0, 10 * step)
    series = tuning.read_log(tmp_path)
    assert series.to_dict() == {10: 1.5, 20: 2.5}
    assert series.name == "train/grad_norm"
    assert [*tuning.read_log(tmp_path / "run", "train/loss")] == [9.0, 9.0]
    with pytest.raises(ValueError, match="has no column 'a'; use one of"):
        tuning.read_log(tmp_path, "a")


def test_read_log_feeds_suggest():
    norms = np.exp(0.2 * np.random.default_rng(0).normal(size=300))
    norms[200] = 20.0
    text = "step,grad_norm\n" + "\n".join(f"{5 * i},{norm}" for i, norm in enumerate(norms))
    found = tuning.suggest(tuning.read_log(io.StringIO(text)))
    assert found.spikes.tolist() == [1000]
    assert found.warnings == ()
    assert any("the log has one of 5 steps" in note for note in found.notes)


def test_read_log_names_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'pip install "optaxclip\[logs\]"'):
        tuning.read_log("log.csv")
