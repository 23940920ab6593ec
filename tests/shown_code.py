"""The code that README and the site show, to be run as a reader would."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]


def blocks(page):
    """The Python blocks of a Markdown page, from its path in the repository."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def run(block, page):
    """What a block leaves behind, run by itself with a reader's settings, not ours."""
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(block, str(page), "exec"), namespace)
    return namespace
