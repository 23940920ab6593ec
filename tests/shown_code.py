"""The code that README and the site show, to be run as a reader would."""

import contextlib
import re
import tempfile
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]


def blocks(page, language="python"):
    """The blocks of a Markdown page, from its path in the repository."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def block_with(page, marker):
    """The one block of text on a page that holds these words: code that needs more around it."""
    (block,) = (block for block in blocks(page, "text") if marker in block)
    return block


def run(block, page, **namespace):
    """What a block leaves behind, run beside these names alone, with a reader's settings.

    What it writes goes to a folder of its own.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        exec(compile(block, str(page), "exec"), namespace)
    return namespace
