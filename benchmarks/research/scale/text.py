"""Text that Python and its packages ship: sources and documentation, as bytes.

Files come in the order of their names' digests, so that each part of the text has something of
every package, and the same packages give the same text. One file in 16 is held out.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ENDS = (".py", ".rst", ".md", ".txt")
SYMBOLS = 256
LARGEST = 100_000
"""Of a file in bytes; what is larger is a table that a program wrote."""
HELD_OUT = 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Text(NamedTuple):
    """Bytes to train on, those of other files, and a digest of both."""

    train: Bytes
    held_out: Bytes
    digest: str


def folders() -> list[Path]:
    """Of Python's own library and of the installed packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def read(size: int, roots: Sequence[Path] | None = None) -> Text:
    """The first files with `size` bytes together, or all if there are fewer.

    Raises:
      FileNotFoundError: there are not enough to hold some out.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left, seen = size, set()
    for _, path in sorted(_named(folders() if roots is None else roots)):
        content = path.read_bytes()
        known = hashlib.sha256(content).digest()
        if known in seen or not 0 < len(content) <= LARGEST:
            continue
        seen.add(known)  # packages bring copies of each other's files
        parts[known[0] % HELD_OUT == 0].append(content)
        left -= len(content)
        if left <= 0:
            break
    if not all(parts):
        raise FileNotFoundError(f"the folders have too few files that end with {', '.join(ENDS)}")
    train, held_out = (b"".join(part) for part in parts)
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:8]
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), digest)


def _named(roots: Sequence[Path]) -> Iterator[tuple[bytes, Path]]:
    """Files with the digests of their names in their folders."""
    for root in roots:
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in ("site-packages", "__pycache__")]
            for name in names:
                # A project that is installed from its checkout has its path in such a file.
                if name.endswith(ENDS) and not name.startswith("__editable__"):
                    path = Path(folder, name)
                    inside = path.relative_to(root).as_posix()
                    yield hashlib.sha256(inside.encode()).digest(), path


def windows(text: Bytes, starts: np.ndarray, length: int) -> Bytes:
    """uint8[..., length], one from each start."""
    return text[starts[..., None] + np.arange(length)]
