"""Shared types: threshold rules, and the states and records of clips."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.state import StaticNames, register_state

if sys.version_info >= (3, 12):
    from typing import TypeAliasType
else:
    from typing_extensions import TypeAliasType

ArrayLike = TypeAliasType("ArrayLike", jax.typing.ArrayLike)
"""What JAX takes for an array; a type of its own, because `help` shows its name alone."""

PyTree: TypeAlias = Any
"""Any pytree of arrays."""

NormTree: TypeAlias = Any
"""The norms of all groups, float32 or wider.

One scalar for the whole tree; `[groups]`, in the order of their names, for labels and leaves; a
dict from leaf name to array for the scopes `axes` and `unit`.
"""

Path: TypeAlias = tuple[Any, ...]
"""A leaf's key path, as `jax.tree_util.tree_flatten_with_path` gives it."""

AxisName: TypeAlias = str | Sequence[str] | None
"""The name of a mapped axis, or several names."""

NonFinite: TypeAlias = Literal["nan", "zero", "mask", "error"]


class Thresholds(NamedTuple):
    """Two norms for each group: if its norm is above `trigger`, it is clipped to `target`."""

    trigger: NormTree
    target: NormTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThresholdRule:
    """A threshold rule: an `(init, update)` pair, like Optax's own.

    A rule gets the norms of all groups in one array, `[]` for the scope `tree` and `[groups]` for
    other scopes. A group without leaves at this step has the norm NaN. The rule returns thresholds of
    the same shape.

    `init` and `update` are `jax.tree_util.Partial`s (plain functions are wrapped), so a rule is a
    pytree and its numbers are traced: another threshold does not compile anything again.

    Attributes:
      init: `init(norms) -> state`; `norms` are zeros of the shape and dtype that norms have. The
        state's structure must be the same for every shape of norms.
      update: `update(norms, state, param_norms) -> (Thresholds, state)`.
      uses_params: whether `update` needs the norms of the parameters; they are None otherwise.
    """

    init: Callable[[Array], PyTree]
    update: Callable[[Array, PyTree, Array | None], tuple[Thresholds, PyTree]]
    uses_params: bool = dataclasses.field(default=False, metadata={"static": True})

    def as_pytree(self) -> "ThresholdRule":
        """The rule with plain functions wrapped, so that it can be an argument under `jit`."""
        init, update = (
            fn if isinstance(fn, Partial) else Partial(fn) for fn in (self.init, self.update)
        )
        return dataclasses.replace(self, init=init, update=update)


@register_state
class ClipInfo(NamedTuple):
    """What a clip did at the last step.

    Every array is `[]` for the scope `tree`, and `[entries]` for other scopes, with one entry for
    each group. Scopes with very many groups (`axes`, `unit`) have one entry for each leaf: its
    norm, threshold and factor are those of the leaf's group with the largest ratio of norm to threshold.
    For a tree with float64 leaves, `clip_tree` returns float64 instead of float32.

    Attributes:
      name: the transformation's name, as a tuple of one.
      names: the entries' names in order. Like `name`, they are part of the structure, not arrays.
      norm: float32, the norm before clipping.
      threshold: float32, the norm above which the group is clipped.
      factor: float32, what the group was multiplied by.
      fraction: float32, the share of the entry's groups above their threshold at this step.
      num_clipped: int32, steps so far at which a group of this entry was above its threshold.
      num_nonfinite: int32, steps so far at which a group of this entry was not finite.
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
    """State of a clipping transformation.

    Attributes:
      steps: int32[], steps so far.
      rule: the threshold rule's own state.
      info: what the last step did.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    rule: PyTree
    info: ClipInfo
