"""Types of arrays on the host."""

import sys

import numpy.typing

if sys.version_info >= (3, 12):
    from typing import TypeAliasType
else:
    from typing_extensions import TypeAliasType

ArrayLike = TypeAliasType("ArrayLike", numpy.typing.ArrayLike)
"""What NumPy takes for an array; a type of its own, because `help` shows its name alone."""
