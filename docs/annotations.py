"""Types of the reference as links: to `api/types.md`, and to the pages of other projects."""

import re
from collections.abc import Collection

TYPE = re.compile(r'<span title="(?P<path>[\w.]+)">(?P<name>\w+)</span>')
JAX = "https://docs.jax.dev/en/latest/_autosummary/{}.html"
NUMPY = "https://numpy.org/doc/stable/reference"
PYTHON = "https://docs.python.org/3/library/collections.abc.html#{}"
ELSEWHERE = {
    "jax.Array": JAX.format("jax.Array"),
    "optaxclip._base.types.ArrayLike": JAX.format("jax.typing.ArrayLike"),
    "optaxclip._base.types.HostArrayLike": f"{NUMPY}/typing.html#numpy.typing.ArrayLike",
    "numpy.ndarray": f"{NUMPY}/generated/numpy.ndarray.html",
    "optax.GradientTransformation": (
        "https://optax.readthedocs.io/en/latest/api/transformations.html"
        "#optax.GradientTransformation"
    ),
    "matplotlib.axes.Axes": (
        "https://matplotlib.org/stable/api/_as_gen/matplotlib.axes.Axes.html#matplotlib.axes.Axes"
    ),
    **{
        f"collections.abc.{name}": PYTHON.format(f"collections.abc.{name}")
        for name in ("Callable", "Mapping", "Sequence")
    },
}


def linked(page: str, types: str, names: Collection[str]) -> str:
    """The HTML of a page; `types` leads to the page that describes our types of these names."""

    def replaced(match: re.Match[str]) -> str:
        path, name = match["path"], match["name"]
        link = ELSEWHERE.get(path)
        if path.startswith("optaxclip.") and name in names:
            link = f"{types}#{name.lower()}"
        return f'<a href="{link}" title="{path}">{name}</a>' if link else match[0]

    return TYPE.sub(replaced, page)
