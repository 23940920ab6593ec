"""Types of arrays on the host."""

import sys

import numpy.typing

if sys.version_info >= (3, 12):
    from typing import TypeAliasType
else:
    from typing_extensions import TypeAliasType

ArrayLike = TypeAliasType("ArrayLike", numpy.typing.ArrayLike)
"""Values that NumPy accepts as arrays; an alias type, because `help` then shows only its name."""
