"""Logs of runs that were stopped or still write: where lines and records end, what is left out."""

import json

import numpy as np
import pytest

from optaxclip.tuning.files import parse_norms, read_norms

NORMS = np.linspace(1.0, 2.0, 12)


@pytest.mark.parametrize("lost", [3, 7, 20])
def test_an_event_file_that_was_cut_off_leaves_the_next_one_whole(lost, tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    for run in (0, 1):  # the first is killed, the second goes on in the same folder
        with tensorboard.SummaryWriter(str(tmp_path), filename_suffix=f".{run}") as writer:
            for step in range(5 * run, 5 * run + 5):
                writer.add_scalar("norm", step, step)
    first = min(tmp_path.iterdir(), key=lambda path: path.suffix)
    first.write_bytes(first.read_bytes()[:-lost])
    assert read_norms(tmp_path).norms.tolist() == [0, 1, 2, 3, *range(5, 10)]


def as_record(data):
    return len(data).to_bytes(8, "little") + bytes(4) + data + bytes(4)


def test_records_that_are_no_events():
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
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
