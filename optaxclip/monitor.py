"""What the clips did: read it from the optimizer's state, log it, keep a history of norms.

Every clip and every skip keeps a record of its last step in its own state, wherever that is held:
in `chain`, `masked`, `partition`, `MultiSteps`, `apply_if_finite`, `inject_hyperparams`, a Flax
`TrainState`, an `nnx.Optimizer`, lists, dicts. (`clip` and `clip_by_value` have no norm and keep no
record.) For a log, `scalars` makes flat numbers of the records::

  for name, value in monitor.scalars(opt_state).items():
      writer.add_scalar(name, value, step)              # TensorBoard
  wandb.log(monitor.scalars(opt_state), step)           # Weights & Biases
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.tree_util import GetAttrKey, keystr

import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_state, whole
from optaxclip._base.counters import increased
from optaxclip._base.transformation import Transformation
from optaxclip._base.trees import flatten
from optaxclip._base.types import ClipInfo, ClipState, Path, PyTree
from optaxclip._engine.step import run_norms
from optaxclip.methods.skips import SkipState
from optaxclip.norms import Norm, as_norm


class RecordState(NamedTuple):
    """State of `record`.

    Attributes:
      count: int32[], steps so far.
      name: the transformation's name, as the only key of a dict of nothing.
      names: the norms' names in order, as the keys of a dict of nothing.
      ring: float32[window] or, per leaf, float32[window, leaves]; step n is in row `n % window`.
    """

    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    name: dict[str, tuple[()]]
    names: dict[str, tuple[()]]
    ring: Array


def read(opt_state: PyTree) -> dict[str, ClipInfo]:
    """What every clip and every skip in an optimizer's state did at the last step.

    It only looks: no computation, no transfer, and it works under `jit` too.

    Args:
      opt_state: any pytree that holds the state: the state itself, a `TrainState`, an
        `nnx.Optimizer` (but not `nnx.state(optimizer)`, of which Flax has made nameless dicts).

    Returns:
      A dict in the order of the state, a skip before what it wraps. A key is the path in the state
      and the transformation's name: `0/clip_by_global_norm` for `opt_state[0]`,
      `inner_state/1/clip_by_norm` for `opt_state.inner_state[1]`. The path makes it unique, with or
      without `name=`, and it is the same at every step. (Should dict keys with a `/` make two keys
      equal, all paths are in Python's notation: `['a/b'][0]/clip_by_norm`.)

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for key, info in read(opt_state).items():
      ...     print(key, info.norm, info.factor)
      0/clip_by_global_norm 5.0 0.2
    """
    found = _find(opt_state, ClipState, SkipState)
    return {key: ClipInfo(*map(_unboxed, state.info)) for key, state in found.items()}


def scalars(opt_state: PyTree) -> dict[str, float]:
    """The records as flat numbers with stable names, ready for a log.

    The n-th clip in the order of `read` gives `clip/n/norm` and so on, the n-th skip `skip/n/norm`:

      name             | of   | what                                       | of many entries
      -----------------|------|--------------------------------------------|-----------------
      norm             | both | the norm before clipping                   | of the worst one
      limit            | both | the norm above which something is done     | of the worst one
      factor           | both | what the gradient was multiplied by        | of the worst one
      clipped_fraction | clip | the share of all steps so far with a clip  | the mean
      num_nonfinite    | both | steps so far with a norm not finite        | the largest
      num_skipped      | skip | steps so far that were skipped             |

    The worst entry is the one with the largest ratio of norm to limit; a norm that is not finite
    and a limit of 0 are worse than anything. States under `vmap` count as more entries. Before the
    first step the limit is inf, and that of `skip_nonfinite` always.

    The host waits for the step that made the state, then for one `jax.device_get` of six arrays a
    clip, however many leaves it has. Nothing is computed on the device, so that one process of
    many may call it alone.

    Args:
      opt_state: as in `read`.

    Returns:
      A dict from name to Python float; empty where there are no clips.

    Raises:
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for name, value in scalars(opt_state).items():
      ...     print(f"{name} {value:.1f}")
      clip/0/norm 5.0
      clip/0/limit 1.0
      clip/0/factor 0.2
      clip/0/clipped_fraction 1.0
      clip/0/num_nonfinite 0.0
    """
    states = _find(opt_state, ClipState, SkipState).values()
    numbers = {"clip": itertools.count(), "skip": itertools.count()}
    flat = {}
    for arrays in _to_host([_wanted(state) for state in states], "scalars"):
        kind = "skip" if "num_skipped" in arrays else "clip"
        prefix = f"{kind}/{next(numbers[kind])}"
        flat |= {f"{prefix}/{name}": float(x) for name, x in _summary(arrays).items()}
    return flat


def record(
    window: int = 1000,
    per_leaf: bool = False,
    *,
    norm: str | Norm = "l2",
    name: str = "record",
) -> Transformation[RecordState]:
    """Keeps the norms of the last steps on the device; the updates pass through untouched.

    First in a chain it records the raw gradients' norms, those that are not finite too; inside a
    skip, only those of the steps that were taken. Nothing is sent to the host until `history` asks;
    it works under `jit`, in `scan` and under `vmap`.

    Args:
      window: how many steps to keep.
      per_leaf: whether each leaf has a norm of its own (NaN where the leaf is None at a step); else
        the whole tree has one.
      norm: the norm, as in `optaxclip.clip_by`.
      name: what it is called in messages, and in `history` to choose among several.

    Returns:
      A transformation with a `RecordState`, whose update returns the very updates that it is given.

    Raises:
      ValueError: if `window` is less than 1, or for an unknown norm.
      TypeError: if `window` is no int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optax.chain(record(window=2), optaxclip.clip_by_global_norm(1.0))
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 2.0, 3.0):
      ...     updates, state = tx.update(jnp.array([0.0, size]), state)
      >>> print(history(state))
      [2. 3.]
    """
    window = whole(window, 1, "window")
    measure, scope = as_norm(norm), scopes.leaf() if per_leaf else scopes.tree()

    def init(params: PyTree) -> RecordState:
        names = scope(flatten(params, "params")).names
        ring = jnp.zeros((window, len(names)) if per_leaf else window, jnp.float32)
        return RecordState(jnp.zeros((), jnp.int32), {name: ()}, dict.fromkeys(names, ()), ring)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, RecordState]:
        del params, extra_args
        state = init(updates) if state is None else state
        check_state(state, RecordState, name)
        flat = flatten(updates, "updates")
        grouping = scope(flat).among(state.names) if per_leaf else scope(flat)
        if len(grouping.names) > len(state.names):
            unknown = sorted(set(grouping.names) - set(state.names))
            raise ValueError(f"{name}: the params given to init did not have the leaves {unknown}")
        norms = run_norms(flat.picked(), grouping, measure)
        count, ring = _written(state.count, state.ring, norms)
        return updates, state._replace(count=count, ring=ring)

    return Transformation(init, update)


def history(opt_state: PyTree, name: str | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The norms that `record` kept, the oldest first.

    Args:
      opt_state: any pytree that holds the state, as in `read`.
      name: which record, where there are several: the `name=` that it was given.

    Returns:
      float32[steps], or float32[steps, leaves] of `record(per_leaf=True)`, with a column for each
      of `history_names`: all steps so far, or the last `window` of them. In NumPy, after one
      `jax.device_get`.

    Raises:
      ValueError: if no record has the name, or several have.
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = record(per_leaf=True)
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(history_names(state), history(state))
      ('b', 'w') [[2. 5.]]
    """
    state = _only_record(opt_state, name)
    count, ring = _to_host((_unboxed(state.count), _unboxed(state.ring)), "history")
    if np.ndim(count):
        one = "jax.tree.map(lambda x: x[0], opt_state)"
        raise ValueError(f"history takes one state, got {count.size} under vmap; pass {one}")
    # The oldest row of a full ring is the one to be written next.
    return np.roll(ring[:count], -(count % len(ring)), axis=0)


def history_names(opt_state: PyTree, name: str | None = None) -> tuple[str, ...]:
    """The names of the norms in `history`: those of the leaves, or `("tree",)`.

    Args:
      opt_state: as in `history`.
      name: as in `history`.

    Returns:
      A tuple with a name for each column of `history`.

    Raises:
      ValueError: if no record has the name, or several have.
    """
    return tuple(_only_record(opt_state, name).names)


def _walk(tree: PyTree, kinds: tuple[type, ...], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All states of the given kinds, with their paths; those inside of a skip come after it."""
    stop = (*kinds, SkipState)
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, stop))
    for rest, node in pairs:
        if isinstance(node, kinds):
            yield (*path, *rest), node
        if isinstance(node, SkipState):
            yield from _walk(node.inner_state, kinds, (*path, *rest, GetAttrKey("inner_state")))


def _find(tree: PyTree, *kinds: type) -> dict[str, Any]:
    """The states of the given kinds under their keys."""
    found = list(_walk(tree, kinds))
    by_key = {
        f"{keystr(path, simple=True, separator='/')}/{_name(node)}".removeprefix("/"): node
        for path, node in found
    }
    if len(by_key) == len(found):
        return by_key
    return {f"{keystr(path)}/{_name(node)}": node for path, node in found}


def _name(state: Any) -> str:
    return next(iter(state.name if isinstance(state, RecordState) else state.info.name))


def _only_record(opt_state: PyTree, name: str | None) -> RecordState:
    records = _find(opt_state, RecordState)
    fitting = [state for state in records.values() if name in (None, _name(state))]
    if len(fitting) == 1:
        return fitting[0]
    which = "" if name is None else f" named {name!r}"
    raise ValueError(
        f"the state must hold one record{which}, it holds {len(fitting)}; all its records: "
        f"{list(records)}. Give each record its own name=, and history the one that you want"
    )


def _unboxed(value: Any) -> Any:
    """The array itself, of one in a box, as the fields of states in an `nnx.Optimizer` are."""
    leaves = jax.tree.leaves(value)
    return leaves[0] if len(leaves) == 1 else value


def _to_host(arrays: PyTree, caller: str) -> PyTree:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        raise TypeError(
            f"monitor.{caller} needs numbers, and under jit, vmap or grad there are none yet: call "
            "it on the state that the compiled step returns; monitor.read works inside"
        )
    return jax.device_get(arrays)


def _wanted(state: ClipState | SkipState) -> dict[str, Any]:
    """What `_summary` needs, still on the device."""
    of_info = ("norm", "limit", "factor", "num_clipped", "num_nonfinite")
    wanted = {field: getattr(state.info, field) for field in of_info}
    own = "num_skipped" if isinstance(state, SkipState) else "count"
    return {key: _unboxed(x) for key, x in (wanted | {own: getattr(state, own)}).items()}


def _summary(of: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The numbers of one clip or skip, from what `_wanted` says."""
    # The appended entry is never the worst, but where there is no other.
    norm, limit, factor = (
        np.append(of[field], nothing).astype(np.float64)
        for field, nothing in (("norm", 0.0), ("limit", np.inf), ("factor", 1.0))
    )
    usable = (limit > 0) & np.isfinite(norm)
    with np.errstate(over="ignore"):
        ratio = np.divide(norm, limit, out=np.full(norm.shape, np.inf), where=usable)
    worst = np.argmax(ratio)
    summary = {"norm": norm[worst], "limit": limit[worst], "factor": factor[worst]}
    if "count" in of:
        steps = np.maximum(of["count"], 1)
        entries = of["num_clipped"].reshape(*steps.shape, -1)
        summary["clipped_fraction"] = np.sum(entries / steps[..., None]) / max(entries.size, 1)
    summary["num_nonfinite"] = np.max(of["num_nonfinite"], initial=0)
    return summary | ({"num_skipped": np.max(of["num_skipped"])} if "num_skipped" in of else {})


@jax.jit
def _written(count: Array, ring: Array, norms: Array) -> tuple[Array, Array]:
    """The ring with one more row."""
    rows = len(ring)
    return increased(count, period=rows), ring.at[count % rows].set(norms.astype(ring.dtype))
