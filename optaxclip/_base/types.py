"""Shared types: aliases, threshold rules, and the states of clipping."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy.typing
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.state import StaticNames, register_state

if sys.version_info >= (3, 12):
    from typing import TypeAliasType
else:
    from typing_extensions import TypeAliasType

ArrayLike = TypeAliasType("ArrayLike", jax.typing.ArrayLike)
"""Values that JAX accepts as arrays. It is an alias type so that `help` only shows its name."""

HostArrayLike = TypeAliasType("HostArrayLike", numpy.typing.ArrayLike)
"""Values that NumPy accepts as arrays, for functions that run on the host."""

PyTree: TypeAlias = Any
"""Any pytree of arrays."""

NormTree: TypeAlias = Any
"""The norms of all groups, float32 or wider.

A scalar for the whole tree, or an array `[groups]` for labels and leaves, ordered by name. For the
scopes `axes` and `unit`, a dict that maps leaf names to arrays.
"""

Path: TypeAlias = tuple[Any, ...]
"""The key path of a leaf, as returned by `jax.tree_util.tree_flatten_with_path`."""

AxisName: TypeAlias = str | Sequence[str] | None
"""The name of a mapped axis, or several names."""

NonFinite: TypeAlias = Literal["nan", "zero", "mask", "error"]


class Thresholds(NamedTuple):
    """Two norms per group. A group with a norm above `trigger` is clipped to `target`."""

    trigger: NormTree
    target: NormTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThresholdRule:
    """An `(init, update)` pair that computes thresholds from norms.

    A rule receives the norms of all groups as an array, `[]` for the scope `tree` and `[groups]`
    for other scopes, and returns thresholds of the same shape. Groups without leaves on the current
    step have the norm NaN.

    Plain functions are wrapped in `jax.tree_util.Partial`, so a rule is a pytree whose numbers are
    traced, and a new threshold does not recompile anything.

    Attributes:
      init: `init(norms) -> state`, where `norms` are zeros with the shape and dtype of the norms.
        The structure of the state must not depend on this shape.
      update: `update(norms, state, param_norms) -> (Thresholds, state)`.
      uses_params: If True, `update` receives the norms of the parameters, which are None by
        default.
    """

    init: Callable[[Array], PyTree]
    update: Callable[[Array, PyTree, Array | None], tuple[Thresholds, PyTree]]
    uses_params: bool = dataclasses.field(default=False, metadata={"static": True})

    def as_pytree(self) -> "ThresholdRule":
        """Wraps plain functions, so the rule can be an argument under `jit`."""
        init, update = (
            fn if isinstance(fn, Partial) else Partial(fn) for fn in (self.init, self.update)
        )
        return dataclasses.replace(self, init=init, update=update)


@register_state
class ClipInfo(NamedTuple):
    """The results of the most recent clipping step.

    All arrays are `[]` for the scope `tree`, and `[names]` for other scopes, with one element per
    group. The scopes `axes` and `unit`, which can have very many groups, have one element per leaf,
    from the group with the largest ratio of norm to threshold. Note that `clip_tree` returns
    float64 instead of float32 for trees with float64 leaves.

    Attributes:
      name: The name of the transformation, as a tuple of length one. It is static, like `names`.
      names: The names of the elements, in order.
      norm: float32, the norm before clipping.
      threshold: float32, the norm above which the group is clipped.
      factor: float32, the factor by which the group was multiplied.
      fraction: float32, the fraction of groups above their thresholds on this step.
      num_clipped: int32, the number of steps with a group above its threshold.
      num_nonfinite: int32, the number of steps with a non-finite group.
    """

    name: StaticNames
    names: StaticNames
    norm: Array
    threshold: Array
    factor: Array
    fraction: Array
    num_clipped: Array
    num_nonfinite: Array


@register_state
class ClipState(NamedTuple):
    """The state of a clipping transformation.

    Attributes:
      steps: int32[], the number of steps so far.
      rule: The state of the threshold rule.
      info: The results of the most recent step.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    rule: PyTree
    info: ClipInfo
