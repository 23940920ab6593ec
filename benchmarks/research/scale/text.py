"""Reads source code and documentation of Python and installed packages as bytes.

Files are sorted by the digests of their names, so that all parts of the text mix packages, and the
same packages produce the same text. One file in 16 is held out.
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
"""The maximum bytes of a file. Larger files are generated tables."""
HELD_OUT = 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Text(NamedTuple):
    """Training bytes, held-out bytes, and a digest of both."""

    train: Bytes
    held_out: Bytes
    digest: str


def list_folders() -> list[Path]:
    """Returns the folders of the standard library and of installed packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def read(size: int, roots: Sequence[Path] | None = None) -> Text:
    """Reads files until their total size is `size` bytes.

    Raises:
      FileNotFoundError: If there are too few files.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left, seen = size, set()
    for _, path in sorted(_list_files(list_folders() if roots is None else roots)):
        content = path.read_bytes()
        known = hashlib.sha256(content).digest()
        if known in seen or not 0 < len(content) <= LARGEST:
            continue
        seen.add(known)  # Packages contain copies of files of other packages.
        parts[known[0] % HELD_OUT == 0].append(content)
        left -= len(content)
        if left <= 0:
            break
    if not all(parts):
        raise FileNotFoundError(f"the folders have too few files that end with {', '.join(ENDS)}")
    train, held_out = (b"".join(part) for part in parts)
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:8]
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), digest)


def _list_files(roots: Sequence[Path]) -> Iterator[tuple[bytes, Path]]:
    """Yields files with the digests of their relative paths."""
    for root in roots:
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in ("site-packages", "__pycache__")]
            for name in names:
                # Such files contain the local path of a project in editable mode.
                if name.endswith(ENDS) and not name.startswith("__editable__"):
                    path = Path(folder, name)
                    inside = path.relative_to(root).as_posix()
                    yield hashlib.sha256(inside.encode()).digest(), path


def extract_windows(text: Bytes, starts: np.ndarray, length: int) -> Bytes:
    """Returns the windows at the starts, uint8[..., length]."""
    return text[starts[..., None] + np.arange(length)]
