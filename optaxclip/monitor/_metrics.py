"""What the clips, skips and records in a state did or measured at the last step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.memory as memory
from optaxclip._base.types import ClipInfo, PyTree
from optaxclip._base.validation import check_bool, check_int, short_repr
from optaxclip.monitor._find_states import (
    fetch_to_host,
    learning_rates,
    name_of,
    names_lost_error,
    records,
    unbox,
    unique_keys,
)
from optaxclip.monitor._summary import (
    NUMBERS,
    OF_ALL,
    Recorded,
    Summary,
    has_entries,
    labels_of,
    loggable_records,
    names_of,
    subtract_counts,
    summary,
    summary_on_device,
)
from optaxclip.transforms.skip import SkipState


@jax.tree_util.register_pytree_with_keys_class
class Records(dict[str, ClipInfo]):
    """The records under their keys; the end of a key is enough if only one key has that end."""

    def __missing__(self, end: str) -> ClipInfo:
        fitting = [key for key in self if key.endswith(f"/{end}")]
        if len(fitting) == 1:
            return self[fitting[0]]
        which = "several keys end with it" if fitting else "no key is it or ends with it"
        raise KeyError(f"{end!r}: {which}; the keys are {list(self)}")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, ClipInfo]], tuple[str, ...]]:
        """The records as children, in their order."""
        return [(jax.tree_util.DictKey(key), info) for key, info in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], infos: Any) -> "Records":
        """The records under their keys, from what `tree_flatten_with_keys` took apart."""
        return cls(zip(keys, infos, strict=True))


def read(opt_state: PyTree) -> Records:
    """What every clip and every skip in an optimizer's state did at the last step.

    Nothing is computed and nothing is sent to the host, so it works under `jit` too.

    Args:
      opt_state: any pytree that holds the state: the state itself, a `TrainState`, an
        `nnx.Optimizer`; also `nnx.state(optimizer)` and `flax.serialization.to_state_dict`, in
        which Flax keeps no names: there transformations are called "clip" and "skip".

    Returns:
      A dict in the order of the state, with a skip before the states that it wraps. The last part
      of a key is enough if it is unique: `read(state)["clip_by_global_norm"]`. A key is the path in
      the state and the transformation's name: `0/clip_by_global_norm` for `opt_state[0]`,
      `inner_state/1/clip_by_norm` for `opt_state.inner_state[1]`. The path makes each key unique,
      with or without `name=`, and keys are the same at every step. (Should dict keys with a `/`
      make two keys equal, all paths are in Python's notation: `['a/b'][0]/clip_by_norm`.) A skip
      that judges the loss has a second entry, under its key with `/loss` behind it, in which `norm`
      is the loss.

    Raises:
      ValueError: if there is no clip and no skip that keeps a record.
      KeyError: from the dict, for what is no key and not the end of exactly one; it lists the keys.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for key, info in read(opt_state).items():
      ...     print(key, info.norm, info.factor)
      0/clip_by_global_norm 5.0 0.2
      >>> print(read(opt_state)["clip_by_global_norm"].norm)
      5.0
    """
    places, infos = [], []
    for path, state in records(opt_state, "read"):
        places.append((path, (name_of(state),)))
        infos.append(state.info)
        if isinstance(state, SkipState) and state.loss:
            places.append((path, (name_of(state), "loss")))
            infos.append(state.loss.info)
    rows = zip(unique_keys(places), infos, strict=True)
    return Records({key: ClipInfo(*map(unbox, info)) for key, info in rows})


def metrics(
    opt_state: PyTree,
    prefix: str = "",
    *,
    since: PyTree | None = None,
    top: int = 0,
    per_group: bool = False,
) -> dict[str, Array]:
    """The records as a flat dict of scalars; it works inside of the compiled step too.

    A name is made of the transformation's name, the kind of number, and the label if it is a clip
    by labels: `clip_by_global_norm/threshold`, `clip_by_group_norm/norm/actor`.

      number           | of   | what                                       | of many entries
      -----------------|------|--------------------------------------------|-----------------
      norm             | both | the norm before clipping                   | of the worst one
      threshold            | both | the norm above which something is done     | of the worst one
      factor           | both | what the gradient was multiplied by        | of the worst one
      clipped_norm     | both | norm * factor, the norm that went on       | of the worst one
      clipped_fraction | clip | num_clipped / steps                        | the largest
      num_clipped      | clip | steps so far with a clip                   | the largest
      num_nonfinite    | both | steps so far with a norm not finite        | the largest
      num_skipped      | skip | steps so far that were skipped             | the largest
      loss, loss_threshold | skip | the loss and its threshold, where it is judged | furthest above
      loss_scale       | skip | of `scale_loss`: that of the next step     | the smallest
      steps            | clip | steps so far                               | the largest
      learning_rate    |      | what `optax.inject_hyperparams` keeps      | the largest

    The numbers of `noise_scale` are `scale`, `signal` and `variance`. The numbers of `record` are
    its statistics of the last step, of leaves or layers the largest, and `steps`. Those of
    `histogram` are of the last step that it counted, of all leaves together: `median_exponent`, the
    k of the bin, 2**k to 2**(k + 1), in which the median of the entries other than 0 lies, and
    `low_exponent` and `high_exponent`, those of their quantiles of 5 % and 95 %; `zero_fraction`;
    `num_infinite` and `num_nan`, how many entries are infinite or NaN, at most 2**31 - 1; and
    `steps`. NaN stands for what is unknown before, and for the exponents if no entry other than 0
    is finite. A tree without leaves has no exponents. The numbers of a `record` inside a skip are
    NaN after a skipped step.

    `learning_rate` stands alone, without a transformation's name. It is the rate of the last step,
    if `optax.inject_hyperparams` keeps it under this name; of several, the second and later ones
    get a number behind it.

    Late in a run the share of all steps so far hardly moves. With `since`, the share and all counts
    are of the steps after an earlier state; all other numbers are still of the last step. If there
    was no step between the two states, the share is 0. If `since` is the later one, as after a roll
    back, the share is NaN and `steps` is below 0.

    With `top`, each clip and record that has several leaves or groups shows numbers of the worst of
    them too, the worst first: `clip_by_norm/top/0/norm`, `threshold`, `factor` and `clipped_norm`,
    and all statistics of a record, `record/top/0/share`. A record sorts them by their norms, or, if
    it keeps none, by the first of its statistics in the order of its table. `record/top/0/index`
    says which leaf it is: its name is `history_names(state)[index]`, for a clip
    `read(state)["clip_by_norm"].names[index]`. `scalars` gives the name itself, as
    `record/top/0/name`. If there are fewer leaves than `top`, there are fewer numbers.

    Each label has numbers of its own (scopes `group` and `muon`). With `per_group`, so has each
    leaf, and each layer of a stack: `clip_by/norm/layers/00`. Otherwise there may be very many
    leaves, units, or states under `vmap`, so one number stands for all of them. The worst entry is
    the one with the largest ratio of norm to threshold, of equal ones (to rounding) the first; a
    norm that is not finite and a threshold of 0 are worse than all others. The threshold is inf
    before the first step, and always for `skip_nonfinite`.

    The names depend on the transformations alone and are the same at every step. If several
    transformations share a name, the second and later ones, in the order of `read`, get a number
    behind it: `clip_by_norm_1/norm`. Give them names of their own with `name=`.

    Args:
      opt_state: as in `read`.
      prefix: the beginning of all names, such as "train/".
      since: an earlier state of the same optimizer, or `counts` of it: only later steps are
        counted. None counts from the first step. Between two logs keep `counts`, because a step
        that takes the state as a donated argument deletes it.
      top: how many of the worst leaves or groups to show.
      per_group: whether each leaf, layer or group has numbers of its own.

    Returns:
      A dict from name to float32[], or int32[] for counts. Nothing is sent to the host.

    Raises:
      ValueError: if there is no clip and no skip that keeps a record, nor a `record`, `histogram`
        or `noise_scale`; if `since` holds no records, records of another optimizer, or deleted
        arrays; if `top` is below 0, or given where nothing in the state has several leaves or
        groups.
      TypeError: if `prefix` is not a string, or `top` not an int.

    Example:
      >>> import jax, jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_group_norm(1.0, {"actor": "actor", "critic": "critic"})
      >>> params = {"actor": jnp.zeros(2), "critic": jnp.zeros(1)}
      >>> @jax.jit
      ... def step(grads, state):
      ...     updates, state = tx.update(grads, state)
      ...     return updates, state, metrics(state, "train/")
      >>> grads = {"actor": jnp.array([3.0, 4.0]), "critic": jnp.array([0.5])}
      >>> _, _, found = step(grads, tx.init(params))
      >>> print(found["train/clip_by_group_norm/norm/actor"])
      5.0
    """
    found = loggable_records(opt_state, "metrics")
    labels = _labels(found, per_group)
    numbers = _check_records(subtract_counts(found, since), top), learning_rates(opt_state)
    arrays, rates = memory.put_on_device(numbers)
    rows = zip(arrays, labels, strict=True)
    summaries = [
        summary_on_device(*numbers, with_labels=bool(names), top=top) for numbers, names in rows
    ]
    rates = {name: jnp.max(jnp.asarray(rate)) for name, rate in rates.items()}
    return _flatten_names(found, summaries, labels, rates, prefix)


@overload
def scalars(
    opt_state: PyTree,
    prefix: str = "",
    *,
    since: PyTree | None = None,
    top: Literal[0] = 0,
    per_group: bool = False,
) -> dict[str, float]: ...
@overload
def scalars(
    opt_state: PyTree,
    prefix: str = "",
    *,
    since: PyTree | None = None,
    top: int,
    per_group: bool = False,
) -> dict[str, Any]: ...
def scalars(
    opt_state: PyTree,
    prefix: str = "",
    *,
    since: PyTree | None = None,
    top: int = 0,
    per_group: bool = False,
) -> dict[str, Any]:
    """The numbers of `metrics` as Python floats on the host, ready for a log.

    The host waits for the step that made the state, and then for one `jax.device_get`. It gets six
    arrays for each clip, however many leaves the clip has; five for a skip, or seven if it judges
    the loss; six for a `scale_loss`; three for a `noise_scale`; two for a `histogram`; and for a
    `record` its `steps` and one array for each statistic. Nothing is computed on the device, so
    one of several processes may call `scalars` alone.

    Args:
      opt_state: as in `read`.
      prefix: as in `metrics`.
      since: as in `metrics`.
      top: as in `metrics`.
      per_group: as in `metrics`.

    Returns:
      A dict from name to Python float. With `top`, `.../top/0/name` is the leaf's name, a string,
      which TensorBoard takes by `add_text`.

    Raises:
      ValueError: as `metrics`; with `top` also for a state that has lost the names of its leaves.
      TypeError: as `metrics`, and under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for name, value in scalars(opt_state).items():
      ...     print(f"{name} {value:.1f}")
      clip_by_global_norm/norm 5.0
      clip_by_global_norm/threshold 1.0
      clip_by_global_norm/factor 0.2
      clip_by_global_norm/clipped_norm 1.0
      clip_by_global_norm/clipped_fraction 1.0
      clip_by_global_norm/num_clipped 1.0
      clip_by_global_norm/num_nonfinite 0.0
      clip_by_global_norm/steps 1.0
      >>> tx = optaxclip.clip_by_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5]), "v": jnp.array([2.0])}
      >>> found = scalars(tx.update(grads, tx.init(grads))[1], top=2)
      >>> for i in range(2):
      ...     print(found[f"clip_by_norm/top/{i}/name"], found[f"clip_by_norm/top/{i}/norm"])
      w 5.0
      v 2.0
    """
    return scalars_on_host(opt_state, prefix, since, top, per_group, "scalars")


def scalars_on_host(
    opt_state: PyTree, prefix: str, since: PyTree | None, top: int, per_group: bool, caller: str
) -> dict[str, Any]:
    """What `scalars` gives; messages name the `caller`."""
    found = loggable_records(opt_state, caller)
    labels = _labels(found, per_group)
    numbers = _check_records(subtract_counts(found, since), top), learning_rates(opt_state)
    arrays, rates = fetch_to_host(numbers, caller)
    rows = zip(arrays, labels, strict=True)
    summaries = [summary(*numbers, with_labels=bool(names), top=top) for numbers, names in rows]
    rates = {name: np.max(rate) for name, rate in rates.items()}
    numbers = _flatten_names(found, summaries, labels, rates, prefix, of_entries=_name)
    return {name: x if isinstance(x, str) else float(x) for name, x in numbers.items()}


Numbers: TypeAlias = list[tuple[dict[str, Any], dict[str, Any]]]


def _check_records(numbers: Numbers, top: int) -> Numbers:
    """The numbers of all records; `top` needs some that have entries."""
    if check_int(top, 0, "top") and not any(has_entries(kept) for kept, _ in numbers):
        raise ValueError(
            f"top={top} asks for the worst leaves or groups, and no clip or record in the state "
            "has numbers of several: put monitor.record(scope=scopes.leaf()) in front of the clip"
        )
    return numbers


def _labels(found: Mapping[str, Recorded], per_group: bool) -> list[tuple[str, ...]]:
    """For each record, the entries that have numbers of their own."""
    check_bool(per_group, "per_group")
    return [labels_of(state, per_group) for state in found.values()]


def _index(state: Recorded, index: Any) -> dict[str, Any]:
    """The index of an entry, for use inside of compiled functions."""
    del state
    return {"index": index}


def _name(state: Recorded, index: Any) -> dict[str, Any]:
    """The name of an entry, which only the host can show."""
    names = names_of(state)
    if not names:
        raise names_lost_error(f"{name_of(state)} has lost the names of its leaves")
    return {"name": names[int(index)]}


def _flatten_names(
    states: Mapping[str, Recorded],
    summaries: Sequence[Summary],
    labels: Sequence[tuple[str, ...]],
    rates: Mapping[str, Any],
    prefix: str,
    of_entries: Callable[[Recorded, Any], dict[str, Any]] = _index,
) -> dict[str, Any]:
    """Numbers under their names."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'train/', got {prefix!r}")
    flat = {}
    for (name, state), numbers, entries in zip(states.items(), summaries, labels, strict=True):
        ends = [f"/{entry}" for entry in entries] or [""]
        for field in (field for field in NUMBERS if field in numbers):
            column, of_each = numbers[field], [""] if field in OF_ALL else ends
            flat |= {f"{prefix}{name}/{field}{x}": column[i] for i, x in enumerate(of_each)}
        for i, few in enumerate(numbers.get("top", ())):
            entry = of_entries(state, few["index"]) | {x: few[x] for x in NUMBERS if x in few}
            flat |= {f"{prefix}{name}/top/{i}/{field}": x for field, x in entry.items()}
    return flat | {f"{prefix}{name}": rate for name, rate in rates.items()}


def json_line(
    opt_state: PyTree,
    /,
    *,
    since: PyTree | None = None,
    top: int = 0,
    per_group: bool = False,
    **more: Any,
) -> str:
    """What `scalars` gives, as one line of valid JSON.

    JSON has no name for NaN and infinities, so they are written as null.
    `optaxclip.tuning._read_log` and `python -m optaxclip suggest` read a file of such lines, and
    take a norm that is null for one that was not finite. The host waits for the device, as in
    `scalars`.

    Args:
      opt_state: as in `read`.
      since: as in `metrics`.
      top: as in `scalars`.
      per_group: as in `metrics`.
      more: what else belongs to the step; it comes before the scalars: numbers, arrays of one
        number, strings, bools or None.

    Returns:
      A JSON object, without a line break.

    Raises:
      ValueError: as `scalars`, and if a name in `more` is the name of a scalar.
      TypeError: as `scalars`, and for a value of another type.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> _, opt_state = tx.update(jnp.array([3.0, jnp.inf]), tx.init(jnp.zeros(2)))
      >>> line = json_line(opt_state, step=7, loss=0.5)
      >>> print(line.split(", ")[:3])
      ['{"step": 7', '"loss": 0.5', '"clip_by_global_norm/norm": null']
    """
    found = scalars_on_host(opt_state, "", since, top, per_group, "json_line")
    if twice := sorted(found.keys() & more.keys()):
        raise ValueError(f"{twice[0]!r} is the name of a scalar: give what is passed another one")
    whole = {name: _plain(value, name) for name, value in (more | found).items()}
    return json.dumps(whole, allow_nan=False)


def _plain(value: Any, name: str) -> str | float | None:
    """A value as JSON has it."""
    if not isinstance(value, Tracer) and np.shape(value) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{name} must be a number, a string, a bool or None, got {short_repr(value)} of type "
        f"{type(value).__name__}"
    )
