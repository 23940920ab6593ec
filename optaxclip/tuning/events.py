"""Reads scalars from TensorBoard's event files."""

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from optaxclip._base.optional_imports import install_command
from optaxclip.tuning.columns import Columns, Series

START = b"brain.Event:"
"""The first record of every event file holds this, within the file's first bytes."""
BEGINNING = 64
REMEDY = "copy the file anew, or take it out of its directory"


def scalars(files: dict[str, bytes]) -> Columns:
    """The scalars in the event files of one run, by tag, each with its step."""
    found: dict[str, list[tuple[int, float]]] = {}
    for source, data in files.items():
        for event in _events(data, source):
            for value in event.summary.value:
                number = _scalar(value, source)
                if number is not None:
                    found.setdefault(value.tag, []).append((event.step, number))
    columns: Columns = {}
    for tag, pairs in found.items():
        steps, values = zip(*pairs, strict=True)
        columns[tag] = Series(np.array(values), np.arange(len(steps)), np.array(steps))
    return columns


def _events(data: bytes, source: str) -> Iterator[Any]:
    """The events of one file; an incomplete last event is left out."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboardX.proto import event_pb2
    except ModuleNotFoundError as error:
        reads = f"which tensorboardX reads: {install_command('tensorboard')}"
        raise ValueError(f"{source} is an event file, {reads}") from error
    if len(data) >= BEGINNING and START not in data[:BEGINNING]:
        raise ValueError(f"{source} is damaged: it does not begin as an event file; {REMEDY}")
    records = [*_records(data)]
    for at, record in enumerate(records, start=1):
        try:
            yield event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
        except DecodeError as error:
            if at < len(records):
                raise ValueError(
                    f"{source} is damaged: record {at} of {len(records)} is no event ({error}); "
                    f"{REMEDY}"
                ) from error


def _records(data: bytes) -> Iterator[bytes]:
    """The data of all records. A record is a length, its checksum, the data, their checksum."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        start, end = at + 12, at + 12 + length
        if end + 4 > len(data):  # the run still writes the file, or was stopped
            return
        yield data[start:end]
        at = end + 4


def _scalar(value: Any, source: str) -> float | None:
    """The number of a summary: PyTorch writes it as a field, TensorFlow as a tensor."""
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor
    if not value.HasField("tensor") or math.prod(d.size for d in tensor.tensor_shape.dim) != 1:
        return None
    types = {1: ("<f4", tensor.float_val), 2: ("<f8", tensor.double_val)}
    if tensor.dtype not in types:
        return None
    dtype, listed = types[tensor.dtype]
    if listed:
        return float(listed[0])
    content = tensor.tensor_content
    if len(content) != np.dtype(dtype).itemsize:
        raise ValueError(
            f"{source} is damaged: a number of {value.tag!r} has {len(content)} bytes; {REMEDY}"
        )
    return float(np.frombuffer(content, dtype)[0])
