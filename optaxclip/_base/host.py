"""Types of arrays on the host."""

import sys

import numpy.typing

if sys.version_info >= (3, 12):
    from typing import TypeAliasType
else:
    from typing_extensions import TypeAliasType

ArrayLike = TypeAliasType("ArrayLike", numpy.typing.ArrayLike)
"""What NumPy takes for an array. `help` calls it by this name, and would write out all of it."""
