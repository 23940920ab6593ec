"""Logs that are damaged or were cut: messages name the file, and what is whole is read."""

import io
import json

import numpy as np
import pytest
from event_files import tensorboard
from hypothesis import given, settings
from hypothesis import strategies as st
from test_foreign_logs import FORMATS

from optaxclip.__main__ import main
from optaxclip.tuning.files import parse_norms, read_norms

DEEP = 20_000
LONG = "9" * 200_000
BROKEN = {
    "deep lists": (
        "[" * DEEP + "]" * DEEP,
        "nested too deeply to be a log: write a flat object for each step",
    ),
    "deep objects": ('{"a":' * DEEP + "1" + "}" * DEEP, "nested too deeply"),
    "a deep last line": ('{"norm": 1}\n' + '{"a":' * DEEP, "nested too deeply"),
    "a long cell": (
        f"norm,loss\n{LONG},1\n",
        "is damaged: field larger than field threshold (131072)",
    ),
    "a quote that is not closed": (f'norm\n1\n"2\n{LONG}', "delete what is damaged, or copy"),
    "zeros": ("\0" * 999, "log holds zero bytes in place of text: copy the file anew"),
    "zeros inside": ("norm\n1\n" + "\0" * 999 + "\n2\n", "log holds zero bytes"),
    "a state that was cut": (FORMATS["trainer_state.json"][0][:2000], "copy the file anew"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_named(kind, tmp_path, monkeypatch, capsys):
    text, reason = BROKEN[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text(text)
    with pytest.raises(SystemExit):
        main(["suggest", "log"])
    said = capsys.readouterr().err
    assert reason in said
    assert len(said) < 300
    assert len(said.splitlines()) == 1


def test_what_can_be_read_of_a_broken_log_is_read():
    found = parse_norms(f'{{"norm": 1}}\n{{"norm": {LONG}}}\n'.encode(), None, "log").norms
    np.testing.assert_array_equal(found, [1.0, np.inf])
    zeros = b"norm\n1\n2\n" + bytes(999)  # the machine went down while the file grew
    assert parse_norms(zeros, None, "log").norms.tolist() == [1.0, 2.0]
    letter = "norm,note\n1,a\n2,é".encode()
    assert parse_norms(letter[:-1], "norm", "log").norms.tolist() == [1.0, 2.0]


@pytest.mark.slow
def test_an_event_file_of_zeros_is_named(tmp_path, capsys):
    tensorboard()
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(bytes(999))
    for given_path, reason in ((tmp_path, "does not begin as an event file"), (path, "zero bytes")):
        with pytest.raises(SystemExit):
            main(["suggest", str(given_path)])
        said = capsys.readouterr().err
        assert f"{path}" in said
        assert reason in said


def test_a_damaged_number_in_an_event_file_is_named():
    with pytest.raises(ValueError, match="log is damaged: a number of 'norm' has 3 bytes; copy"):
        parse_norms(event_file(of_tensor=3), None, "log")


def test_an_event_file_with_another_beginning_is_named(tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(bytes(99))
    with pytest.raises(ValueError, match=r"tfevents.1 is damaged: it does not begin as an event"):
        read_norms(tmp_path)


def test_a_long_line_without_numbers_is_searched_quickly():
    for piece in ("a", "a ", "'a", "a:", "a |", "{", '{"', "[", "1"):
        with pytest.raises(ValueError, match="log"):
            parse_norms(f"x\n{piece * 100_000}\nx".encode(), "norm", "log")
    for name in ("g_", "grad norm ", "norm_", " - ", "a."):
        with pytest.raises(ValueError, match="log"):
            parse_norms(f"{name * 10_000},step\nx,x\n".encode(), None, "log")


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_numbers_of_an_event_file_may_be_listed():
    event_pb2 = tensorboard().proto.event_pb2
    records = [event_pb2.Event(file_version="brain.Event:2")]
    for dtype, field in ((1, "float_val"), (2, "double_val"), (3, "int_val")):
        event = event_pb2.Event(step=dtype)
        tensor = event.summary.value.add(tag="norm").tensor
        tensor.dtype = dtype
        getattr(tensor, field).append(dtype)
        records.append(event)
    data = b"".join(as_record(event.SerializeToString()) for event in records)
    assert parse_norms(data, None, "log").norms.tolist() == [1.0, 2.0]


def event_file(of_tensor=8):
    event_pb2 = tensorboard().proto.event_pb2
    data = b""
    for step in range(5):
        event = event_pb2.Event(step=step)
        if step == 0:
            event.file_version = "brain.Event:2"
        elif step % 2:
            event.summary.value.add(tag="norm", simple_value=2.0)
        else:
            value = event.summary.value.add(tag="norm")
            value.tensor.dtype = step // 2
            value.tensor.tensor_content = np.ones(1, ("<f4", "<f8")[step // 4]).tobytes()[
                :of_tensor
            ]
        record = event.SerializeToString()
        data += len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4)
    return data


WHOLE = [text.encode()[:3000] for text, _ in FORMATS.values()] + [
    saved(np.ones(20)),
    saved(np.ones(3, [("norm", float), ("loss", "i4", 2)])),
    json.dumps([{"norm": 1.5, "a": {"b": [1, "c", None, True]}}] * 3).encode(),
    b"step;grad_norm\n1;1,5\n2;2.5\n",
]
BITS = [bytes([i]) for i in range(256)]
BITS += [
    b"\n",
    b"\r",
    b",",
    b"{",
    b"}",
    b'"',
    b"'",
    b"[",
    b"nan",
    b"-inf",
    b"1e999",
    b"null",
    b"\0" * 9,
]


@st.composite
def mutated(draw):
    data = draw(st.sampled_from([*WHOLE, event_file()]))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.sampled_from([0, 1, 1, 2, 40, len(data)]))
        data = (
            data[:start] + b"".join(draw(st.lists(st.sampled_from(BITS), max_size=3))) + data[end:]
        )
    return data


@settings(max_examples=300, deadline=None)
@given(mutated() | st.binary(max_size=99), st.sampled_from([None, "norm"]))
def test_whatever_is_in_a_file_there_is_a_column_or_a_message(data, column):
    try:
        found = parse_norms(data, column, "some/log").norms
    except ValueError as error:
        said = str(error)
    else:
        said = "some/log"
        assert (found.dtype, found.ndim) == (np.float64, 1)
        assert found.size
    assert "some/log" in said
    assert len(said) < 2000


NORMS = np.linspace(1.0, 2.0, 12)


@pytest.mark.parametrize("lost", [3, 7, 20])
def test_an_event_file_that_was_cut_off_leaves_the_next_one_whole(lost, tmp_path):
    for run in (0, 1):  # the first is killed, the second goes on in the same folder
        with tensorboard().SummaryWriter(str(tmp_path), filename_suffix=f".{run}") as writer:
            for step in range(5 * run, 5 * run + 5):
                writer.add_scalar("norm", step, step)
    first = min(tmp_path.iterdir(), key=lambda path: path.suffix)
    first.write_bytes(first.read_bytes()[:-lost])
    assert read_norms(tmp_path).norms.tolist() == [0, 1, 2, 3, *range(5, 10)]


def as_record(data):
    return len(data).to_bytes(8, "little") + bytes(4) + data + bytes(4)


def test_records_that_are_no_events():
    event_pb2 = tensorboard().proto.event_pb2
    first, second = event_pb2.Event(file_version="brain.Event:2"), event_pb2.Event(step=1)
    second.summary.value.add(tag="norm", simple_value=2.0)
    start, norm = (as_record(event.SerializeToString()) for event in (first, second))
    broken = as_record(bytes(20))
    assert parse_norms(start + norm + broken, None, "events").norms.tolist() == [2.0]
    with pytest.raises(ValueError, match=r"events is damaged: record 2 of 3 is no event \(.*copy"):
        parse_norms(start + broken + norm, None, "events")


@pytest.mark.parametrize(
    "end", ["12", "12,1", "12,1,1e", "12,1,1e-", "12,1,-", "12,1,N", "12,1,-in"]
)
def test_a_last_row_that_was_cut_off_is_left_out(end):
    rows = "step,norm,loss\n" + "\n".join(f"{i},{norm},1.5" for i, norm in enumerate(NORMS))
    np.testing.assert_array_equal(
        parse_norms(f"{rows}\n{end}".encode(), "norm", "log").norms, NORMS
    )


def test_a_last_row_that_is_whole_is_read():
    rows = "step,norm,note\n0,1.0,a\n1,2.0,"
    for end in ("", "\n", "b", "b\n", "-\n", "\n2\n"):
        assert parse_norms((rows + end).encode(), "norm", "log").norms.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match='has "1e-" in row 1, which is not a number'):
        parse_norms(b"norm\n1e-\n", None, "log")


SIGNS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
"""At these `str.splitlines` splits, but neither JSON lines nor CSV."""


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_lines_end_at_line_breaks_alone(line_break):
    table = ["norm,text", *(f"{norm},a{SIGNS}b" for norm in NORMS)]
    objects = [json.dumps({"norm": x, "text": "a\u2028\x85b"}, ensure_ascii=False) for x in NORMS]
    for lines in (table, objects):
        found = parse_norms(line_break.join(lines).encode(), "norm", "log").norms
        np.testing.assert_array_equal(found, NORMS)
