"""Norms from the files of loggers, and the command `suggest` on them."""

import io
import json
import re
import sys

import numpy as np
import pytest
from event_files import tensorboard

from optaxclip import tuning
from optaxclip.__main__ import main
from optaxclip.tuning.files import parse_norms, read_norms

NORMS = np.exp(0.1 * np.random.default_rng(0).normal(size=120)).round(4)
NORMS[[40, 80]] = 20.0, 30.0


def csv_text(delimiter=",", header=("step", "loss", "grad_norm")):
    rows = [header, *((i, 2.0, norm) for i, norm in enumerate(NORMS))]
    return "\n".join(delimiter.join(map(str, row)) for row in rows)


def json_lines(**more):
    return "\n".join(json.dumps({"step": i, "norm": x, **more}) for i, x in enumerate(NORMS))


TEXTS = {
    "csv": csv_text(),
    "semicolons": csv_text(";"),
    "tabs": csv_text("\t"),
    "TensorBoard's download": csv_text(header=("Wall time", "Step", "Value")),
    "byte order mark": "\ufeff" + csv_text(),
    "one number a line": "\n".join(map(str, NORMS)),
    "two columns": "\n".join(f"{i}, {x}" for i, x in enumerate(NORMS)),
    "JSON lines": json_lines(),
    "JSON lines with text": json_lines(name="run", ok=True, parts=[1]),
    "JSON lines with objects in them": "\n".join(
        json.dumps({"train": {"grad_norm": x, "step": i}}) for i, x in enumerate(NORMS)
    ),
    "JSON objects": json.dumps([{"norm": x} for x in NORMS], indent=1),
    "JSON numbers": json.dumps(NORMS.tolist()),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_every_kind_of_text(kind, tmp_path):
    path = tmp_path / "log"
    path.write_text(TEXTS[kind], encoding="utf-8")
    column = "1" if kind == "two columns" else None
    np.testing.assert_array_equal(read_norms(path, column).norms, NORMS)
    assert tuning.suggest(str(path), column=column).spikes.tolist() == [40, 80]


def test_rows_without_the_column_are_left_out():
    text = b'{"loss": 1.0}\n{"loss": 1.0, "norm": 2.0}\n\n{"norm": NaN}'
    np.testing.assert_array_equal(parse_norms(text, None, "log").norms, [2.0, np.nan])
    text = b"step,norm\n1,2.0\n2,\n3,inf\n4"
    np.testing.assert_array_equal(parse_norms(text, None, "log").norms, [2.0, np.inf])


@pytest.mark.parametrize(
    ("array", "column"),
    [
        (NORMS, None),
        (np.stack([NORMS + 1, NORMS], axis=1), "1"),
        (np.array([*zip(NORMS + 1, NORMS, strict=True)], [("loss", float), ("norm", float)]), None),
    ],
    ids=["norms", "a column for each leaf", "fields"],
)
def test_arrays_of_numpy(array, column, tmp_path):
    np.save(tmp_path / "norms.npy", array)
    np.testing.assert_array_equal(read_norms(tmp_path / "norms.npy", column).norms, NORMS)


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


WRONG_NORMS = "step;loss;grad_norm\n0;1.0;{}\n1;1.0;{}"
REFUSED = {
    "decimal commas": (
        WRONG_NORMS.format("1.5", "3,14"),
        "'grad_norm' has decimal commas (3,14 in row 2); write numbers with a point",
    ),
    "no names, commas": ("1;3,14\n2;2,71", "several columns"),
    "a word": (
        WRONG_NORMS.format("1.5", "lost"),
        """has "lost" in row 2, which is not a number; the columns""",
    ),
    "only words": (
        "word\nnone\n",
        """the column 'word' has "none" in row 1, which is not a number""",
    ),
    "nothing in it": ("norm,loss\n,1\n,2", "the column 'norm' is empty"),
    "a list": ('{"loss": 1.0, "norm": [1.0, 2.0]}', "has [1.0, 2.0] in row 1"),
    "true": ('[{"norm": 1.5}, {"norm": true}]', "has true in row 2, which is not a number"),
    "text in an object": ('{"a": {"norm": "no"}}', "'a.norm' has \"no\" in row 1"),
    "pickled": (saved(np.array([None])), "not an array of numbers that np.save wrote"),
    "cut short": (saved(NORMS)[:-5], "not an array of numbers that np.save wrote"),
    "complex": (saved(NORMS + 0j), "has the dtype complex128"),
    "an empty array": (saved(NORMS[:0]), "the column '0' is empty"),
    "three axes": (saved(NORMS.reshape(2, 3, 20)), "has the shape (2, 3, 20); save one axis"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_column_is_refused_with_the_reason(kind):
    data, reason = REFUSED[kind]
    data = data.encode() if isinstance(data, str) else data
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_norms(data, None, "log")


def test_for_a_column_that_is_there_no_other_name_is_proposed():
    with pytest.raises(ValueError, match=r"has \"x\" in row 1, .* are \['norms'\]$"):
        parse_norms(b"norm,norms\nx,1\ny,2", "norm", "log")
    with pytest.raises(ValueError, match=r"is not there; .*; did you mean 'norms'\?$"):
        parse_norms(b"norm,norms\nx,1\ny,2", "norma", "log")


def test_of_many_columns_a_message_lists_ten():
    layers = [f"layer_{i}/weight" for i in range(300)]
    names = [*layers, "encoder/norm", "decoder/norm"]
    text = "\n".join(",".join(row) for row in (names, ["1.0"] * len(names))).encode()
    with pytest.raises(ValueError, match="several columns") as caught:
        parse_norms(text, None, "log")
    listed = ["encoder/norm", "decoder/norm", *layers[:8]]
    assert str(caught.value).endswith(f"choose one of {listed[:2]}, as column='encoder/norm'")
    with pytest.raises(ValueError, match="is not there; ") as caught:
        parse_norms(text, "encoder/nrom", "log")
    said = f"numbers are {listed} and 292 more; did you mean 'encoder/norm'?"
    assert str(caught.value).endswith(said)


@pytest.fixture
def events(tmp_path):
    with tensorboard().SummaryWriter(str(tmp_path / "events")) as writer:
        writer.add_text("note", "no number")
        for step in reversed(range(len(NORMS))):
            writer.add_scalar("clip_by_global_norm/norm", NORMS[step], step)
            writer.add_scalar("loss", 1.0, step)
    return tmp_path / "events"


def test_event_files(events):
    (path,) = events.iterdir()
    for source in (path, events):
        np.testing.assert_array_equal(read_norms(source).norms, NORMS.astype(np.float32))
    assert read_norms(events, "loss").norms.tolist() == [1.0] * len(NORMS)
    path.write_bytes(path.read_bytes()[:-3])  # the writer was stopped in the middle of a record
    assert len(read_norms(path, "loss").norms) == len(NORMS) - 1


def test_event_files_of_tensorflow():
    event_pb2 = tensorboard().proto.event_pb2
    data = b""
    for step in range(-1, 3):
        event = event_pb2.Event(step=max(step, 0))
        if step < 0:
            event.file_version = "brain.Event:2"
        else:
            value = event.summary.value.add(tag="norm")
            value.tensor.dtype = 1 + step % 2
            value.tensor.tensor_content = np.array(step, ("<f4", "<f8")[step % 2]).tobytes()
            several = event.summary.value.add(tag="norm").tensor  # a histogram, for example
            several.tensor_shape.dim.add(size=2)
            several.dtype, several.tensor_content = 1, np.full(2, 7, "<f4").tobytes()
        record = event.SerializeToString()
        data += len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4)
    assert parse_norms(data, None, "events").norms.tolist() == [0.0, 1.0, 2.0]


def run(capsys, *args):
    assert main(["suggest", *map(str, args)]) == 0
    return capsys.readouterr()


@pytest.mark.slow
def test_the_command_prints_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "log.csv").write_text(csv_text())
    picture = tmp_path / "norms.png"
    printed = run(capsys, tmp_path / "log.csv", "--plot", picture)
    assert printed.out == f"{tuning.suggest(tmp_path / 'log.csv')}\npicture: {picture}\n"
    assert printed.err == ""
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    printed = run(capsys, tmp_path / "log.csv", "--json", "--plot", picture)
    assert json.loads(printed.out)["threshold"] == tuning.suggest(NORMS).threshold
    assert printed.err == f"picture: {picture}\n"


def test_a_picture_without_a_suffix_is_png(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "log.csv").write_text(csv_text())
    printed = run(capsys, tmp_path / "log.csv", "--plot", tmp_path / "norms")
    picture = tmp_path / "norms.png"
    assert printed.out.endswith(f"picture: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_command_as_json_from_the_input(capsys, monkeypatch):
    class Stdin:
        class buffer:  # noqa: N801
            read = staticmethod(TEXTS["JSON lines"].encode)

    monkeypatch.setattr("sys.stdin", Stdin)
    expected = tuning.suggest(NORMS).to_dict() | {"column": "norm"}
    assert json.loads(run(capsys, "-", "--json").out) == expected


def test_the_help_has_examples(capsys):
    for command in ("suggest", "sweep"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"examples:\n  python -m optaxclip {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("missing.csv", "cannot read missing.csv: No such file"),
        ("directory", "directory holds no TensorBoard event file"),
        (
            "binary",
            "binary must be CSV, JSON lines, a TensorBoard event file or an array of np.save",
        ),
        ("empty", "empty holds no numbers"),
        ("broken", "broken: not JSON lines: Expecting ':' delimiter in line 3"),
        (
            "log.csv --column norm",
            "column 'norm' is not there; the columns with numbers are ['grad_norm', 'step', ",
        ),
        (
            "several",
            "several has several columns: choose one of ['a_norm', 'b_norm'], as --column 'a_norm'",
        ),
        ("few", "norms must hold at least 10"),
        ("log.csv --plot missing/x.png", "cannot write to missing/x.png: No such file"),
        ("log.csv --plot directory", "directory is a directory: pass directory/norms.png"),
        ("log.csv --plot x.nothing", "cannot write x.nothing: Format 'nothing' is not supported"),
        ("", "FILE"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, tmp_path, monkeypatch, args, reason):
    monkeypatch.chdir(tmp_path)
    files = {
        "log.csv": csv_text(),
        "empty": "",
        "broken": '{"norm": 1.0}\n\n{"norm"\n{"norm": 2.0}',
        "several": "a_norm,b_norm\n1,2",
        "few": "norm\n1\n2",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "directory").mkdir()
    with pytest.raises(SystemExit) as stopped:
        main(["suggest", *args.split()])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert len(printed.err.splitlines()) == 1
    assert reason in printed.err


def test_integers_beyond_floats_are_infinite():
    lines = [f'{{"norm": {x}}}' for x in ("1", "9" * 400, "-" + "9" * 400, "9" * 5000)]
    found = parse_norms("\n".join(lines).encode(), None, "log").norms
    np.testing.assert_array_equal(found, [1.0, np.inf, -np.inf, np.inf])
    found = parse_norms(f"norm\n1\n{'9' * 400}".encode(), None, "log").norms
    np.testing.assert_array_equal(found, [1.0, np.inf])


@pytest.mark.parametrize(
    "text",
    [
        "norm,step,norm\n1,2,3\n4,5,6",
        '{"norm": 1, "step": 2, "norm": 3}\n{"norm": 4, "step": 5}',
        '{"norm": 1, "step": 2}\n{"norm": 3, "step": 4, "norm": 5}',
        '{"a.norm": 1, "a": {"norm": 2}, "step": 3}',
    ],
)
def test_two_columns_of_one_name_are_refused(text):
    with pytest.raises(ValueError, match=r"norm' is there more than once: give each its own name"):
        parse_norms(text.encode(), None, "log")
    assert parse_norms(text.encode(), "step", "log").norms.size


def test_a_last_line_that_was_cut_off_is_left_out():
    whole = json_lines()
    for end in (1, 3, len(whole.splitlines()[-1]) - 1):
        cut = whole[:-end].encode()
        np.testing.assert_array_equal(parse_norms(cut, "norm", "log").norms, NORMS[:-1])
    lines = whole.splitlines()
    lines[70] = lines[70][:-1]
    with pytest.raises(ValueError, match=r"not JSON lines: .* in line 71"):
        parse_norms("\n".join(lines).encode(), "norm", "log")
    with pytest.raises(ValueError, match=r"not JSON lines: .* in line 1"):
        parse_norms(b'{"norm": 1', "norm", "log")
    with pytest.raises(ValueError, match=r"not JSON lines: .* in line 3"):
        parse_norms(b'[\n{"norm": 1},\n{"norm"\n', "norm", "log")


def test_a_picture_without_matplotlib_is_refused_before_the_log_is_read(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["suggest", "missing.csv", "--plot", "norms.png"])
    assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, events):
    monkeypatch.setitem(sys.modules, "tensorboardX.proto", None)
    with pytest.raises(ValueError, match=r"pip install .*\[tensorboard\]"):
        read_norms(events)
