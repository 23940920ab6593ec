"""Reads the results of clips, skips and records at the last step from a state."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import put_on_device
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
    ClipRecord,
    Counts,
    HistogramRecord,
    LogRecord,
    Recorded,
    Summary,
    counts_until,
    has_elements,
    loggable_records,
    names_of,
    record_of,
    summarize,
)
from optaxclip.transforms.skip import SkipState


@jax.tree_util.register_pytree_with_keys_class
class Records(dict[str, ClipInfo]):
    """The records by key. It can also be indexed with the end of a key if this end is unique."""

    def __missing__(self, end: str) -> ClipInfo:
        fitting = [key for key in self if key.endswith(f"/{end}")]
        if len(fitting) == 1:
            return self[fitting[0]]
        matches = f"{len(fitting)} matches"
        raise KeyError(f"key must match exactly one of {list(self)}, got {end!r} with {matches}")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, ClipInfo]], tuple[str, ...]]:
        """Returns the records as children, in their order."""
        return [(jax.tree_util.DictKey(key), info) for key, info in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], infos: Any) -> "Records":
        """Rebuilds the records from the output of `tree_flatten_with_keys`."""
        return cls(zip(keys, infos, strict=True))


def read(opt_state: PyTree) -> Records:
    """Returns the results of all clips and skips in an optimizer's state at the last step.

    The function computes nothing and sends nothing to the host, so you can also use it under `jit`.

    Args:
      opt_state: Any pytree that contains the state, such as the state itself, a `TrainState` or an
        `nnx.Optimizer`. It can also be `nnx.state(optimizer)` or the result of
        `flax.serialization.to_state_dict`. Flax keeps no names in these two, so transformations are
        called "clip" and "skip" there.

    Returns:
      A dict in the order of the state, with a skip before the states that it wraps. A key consists
      of the path in the state and the transformation's name: `0/clip_by_global_norm` for
      `opt_state[0]`, `inner_state/1/clip_by_norm` for `opt_state.inner_state[1]`. You can use only
      the last part of a key if it is unique: `read(state)["clip_by_global_norm"]`. The path makes
      keys unique, with or without `name=`, and keys are the same at all steps. (If dict keys with a
      `/` would make two keys equal, all paths use Python's notation: `['a/b'][0]/clip_by_norm`.)
      A skip that checks the loss has a second record under its key followed by `/loss`. The `norm`
      of this record is the loss.

    Raises:
      ValueError: If no clip or skip in the state keeps a record.
      KeyError: If the dict is indexed with a string that is neither a key nor the end of exactly
        one key. The message lists the keys.

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
    # A box of an `nnx.Optimizer` is not an array, so the fields of the records are unboxed.
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
    """Returns the records as a flat dict of scalars, also inside the compiled step.

    A name consists of the transformation's name, the kind of number and, if the transformation
    clips by labels, the label: `clip_by_global_norm/threshold`, `clip_by_group_norm/norm/actor`.

      number           | of   | meaning                                    | of many elements
      -----------------|------|--------------------------------------------|-----------------
      norm             | both | the norm before clipping                   | of the worst
      threshold        | both | the norm above which the rule acts         | of the worst
      factor           | both | the factor applied to the gradient         | of the worst
      clipped_norm     | both | norm * factor, the norm after clipping     | of the worst
      clipped_fraction | clip | num_clipped / steps                        | the largest
      num_clipped      | clip | steps so far with clipping                 | the largest
      num_nonfinite    | both | steps so far with a non-finite norm        | the largest
      num_skipped      | skip | steps so far that were skipped             | the largest
      loss             | skip | the loss, if it is checked                 | furthest above
      loss_threshold   | skip | the threshold of the loss                  | furthest above
      loss_scale       | skip | for `scale_loss`, that of the next step    | the smallest
      steps            | clip | steps so far                               | the largest
      learning_rate    |      | the value in `optax.inject_hyperparams`    | the largest

    The numbers of `noise_scale` are `scale`, `signal` and `variance`. The numbers of `record` are
    its statistics of the last step (the largest over leaves or layers) and `steps`.

    The numbers of `histogram` describe the last step that it counted, over all leaves.
    `median_exponent` is the k of the bin, 2**k to 2**(k + 1), that contains the median of the
    nonzero elements. `low_exponent` and `high_exponent` are the same for their 5% and 95%
    quantiles. `zero_fraction` is the fraction of zeros. `num_infinite` and `num_nan` count the
    elements that are infinite or NaN, up to 2**31 - 1. `steps` is included too. Values that are not
    known yet are NaN, and so are the exponents if no nonzero element is finite. A tree without
    leaves has no exponents. The numbers of a `record` inside a skip are NaN after a skipped step.

    `learning_rate` has no transformation's name before it. It is the learning rate of the last
    step, if `optax.inject_hyperparams` keeps it under this name. If there are several, the second
    and later names end with a number.

    The fraction over all steps hardly changes late in a run. You can use `since` to restrict the
    fraction and all counts to the steps after an earlier state. The remaining numbers still
    describe the last step. If there was no step between the two states, the fraction is 0. If
    `since` is the later state, for example after a rollback, the fraction is NaN and `steps` is
    negative.

    You can use `top` to add the numbers of the worst leaves or groups, the worst first. For a clip,
    these are `clip_by_norm/top/0/norm`, `threshold`, `factor` and `clipped_norm`, and for a record
    all of its statistics, `record/top/0/share`. A record sorts its groups by their norms, or
    without norms by the first of its statistics in the order of its table. `record/top/0/index`
    identifies the leaf. Its name is `history_names(state)[index]`, or
    `read(state)["clip_by_norm"].names[index]` for a clip. `scalars` returns the name itself as
    `record/top/0/name`. There are fewer numbers for trees with fewer leaves than `top`.

    Labels have separate numbers (scopes `group` and `muon`). You can use `per_group` to also get
    separate numbers for leaves and for the layers of a stack: `clip_by/norm/layers/00`. By default,
    one number represents all of them, because there can be very many leaves, units, or states under
    `vmap`. The worst element has the largest ratio of norm to threshold. The first of several equal
    elements (up to rounding) is used. A non-finite norm or a threshold of 0 is always the worst.
    The threshold is inf before the first step, and always for `skip_nonfinite`.

    The names depend only on the transformations and are the same at all steps. If several
    transformations share a name, the second and later ones, in the order of `read`, end with a
    number: `clip_by_norm_1/norm`. Use `name=` to choose different names.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      prefix: The start of all names, such as "train/".
      since: An earlier state of the same optimizer, or its `counts`. Only later steps are counted.
        If None, counts from the first step. You should keep `counts` between two logs, because a
        step deletes a donated state.
      top: The number of worst leaves or groups to show.
      per_group: If True, leaves, layers and groups have separate numbers.

    Returns:
      A dict from name to float32[], or int32[] for counts. Nothing is sent to the host.

    Raises:
      ValueError: If no clip or skip in the state keeps a record and there is no `record`,
        `histogram` or `noise_scale`, if `since` contains no records, records of another optimizer
        or deleted arrays, if `top` is negative, or if `top` is used and nothing in the state has
        several leaves or groups.
      TypeError: If `prefix` is not a string, or if `top` is not an int.

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
    states, labels, on_device = _collect(opt_state, prefix, since, top, per_group, "metrics")
    # The arrays can be in the memory of the host, for example with an offloaded optimizer state.
    records, earlier, rates = put_on_device(on_device)
    summaries = {
        name: _summarize_on_device(
            record, earlier.get(name, {}), with_labels=bool(labels[name]), top=top
        )
        for name, record in records.items()
    }
    # Under `vmap`, the states can have several learning rates.
    rates = {name: jnp.max(jnp.asarray(rate)) for name, rate in rates.items()}
    return _flatten(states, summaries, labels, rates, prefix, with_names=False)


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
    """Returns the numbers of `metrics` as Python floats on the host, ready for a log.

    The host waits for the step that computes the state, and then for one `jax.device_get`. It
    transfers six arrays per clip, for any number of leaves, and five per skip, or seven if the skip
    checks the loss. It also transfers six arrays for a `scale_loss`, three for a `noise_scale`, two
    for a `histogram`, and the `steps` and one array per statistic for a `record`. Nothing is
    computed on the device, so one of several processes can call `scalars` alone.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      prefix: The start of all names, as in `metrics`.
      since: An earlier state or its `counts`, as in `metrics`.
      top: The number of worst leaves or groups to show, as in `metrics`.
      per_group: If True, leaves, layers and groups have separate numbers, as in `metrics`.

    Returns:
      A dict from name to Python float. With `top`, `.../top/0/name` is the leaf's name. It is a
      string, which you can log to TensorBoard with `add_text`.

    Raises:
      ValueError: If `metrics` raises it, or if `top` is used and the state has lost the names of
        its leaves.
      TypeError: If `metrics` raises it, or under `jit`, `vmap` or `grad`, where there are no
        numbers yet.

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
    """Returns the numbers of `scalars`, with the name of the `caller` in messages."""
    states, labels, on_device = _collect(opt_state, prefix, since, top, per_group, caller)
    # One transfer for all records, because transfers wait for the device.
    records, earlier, rates = fetch_to_host(on_device, caller)
    summaries = {
        name: summarize(record, earlier.get(name, {}), with_labels=bool(labels[name]), top=top)
        for name, record in records.items()
    }
    rates = {name: np.max(rate) for name, rate in rates.items()}
    numbers = _flatten(states, summaries, labels, rates, prefix, with_names=True)
    return {name: x if isinstance(x, str) else float(x) for name, x in numbers.items()}


Labels: TypeAlias = dict[str, tuple[str, ...]]
"""The labels with separate numbers, by the names of records."""


def _collect(
    opt_state: PyTree, prefix: str, since: PyTree | None, top: int, per_group: bool, caller: str
) -> tuple[dict[str, Recorded], Labels, tuple[dict[str, LogRecord], Counts, dict[str, Any]]]:
    """Returns the states and labels, and the records, earlier counts and rates to transfer."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'train/', got {prefix!r}")
    check_bool(per_group, "per_group")
    check_int(top, 0, "top")
    states = loggable_records(opt_state, caller)
    records = {name: record_of(state) for name, state in states.items()}
    labels = {name: _labels_of(states[name], x, per_group) for name, x in records.items()}
    earlier = counts_until(records, since)
    if top and not any(map(has_elements, records.values())):
        raise ValueError(
            f"top must be 0 if no clip or record has several leaves or groups, got {top}; insert "
            "monitor.record(scope=scopes.leaf()) before the clip"
        )
    return states, labels, (records, earlier, learning_rates(opt_state))


def _labels_of(state: Recorded, record: LogRecord, per_group: bool) -> tuple[str, ...]:
    """Returns the elements with separate numbers (labeled ones or all), or an empty tuple."""
    names = names_of(state)
    if names.is_user_label or not per_group:
        return tuple(names) if names.is_user_label else ()
    if not has_elements(record):
        return tuple(names) if isinstance(record, HistogramRecord) else ()
    values = record.norm if isinstance(record, ClipRecord) else record.last
    if not names and any(x.size for x in jax.tree.leaves(values)):
        raise names_lost_error(f"the state of {name_of(state)}")
    return tuple(names)


@functools.partial(jax.jit, static_argnames=("with_labels", "top"), inline=True)
def _summarize_on_device(
    record: LogRecord, earlier: dict[str, Any], with_labels: bool, top: int
) -> Summary:
    # The arrays can be traced, or sharded by seeds over an explicit mesh.
    record, earlier = jax.tree.map(meshes.replicate, (record, earlier))
    return summarize(record, earlier, with_labels, top)


def _flatten(
    states: Mapping[str, Recorded],
    summaries: Mapping[str, Summary],
    labels: Labels,
    rates: Mapping[str, Any],
    prefix: str,
    *,
    with_names: bool,
) -> dict[str, Any]:
    """Returns the numbers of all records by name."""
    flat = {}
    for name, state in states.items():
        numbers, ends = summaries[name], [f"/{label}" for label in labels[name]] or [""]
        # `jit` sorts its results by name, so use the order of NUMBERS.
        for field in (field for field in NUMBERS if field in numbers):
            suffixes = [""] if field in OF_ALL else ends
            flat |= {
                f"{prefix}{name}/{field}{x}": numbers[field][i] for i, x in enumerate(suffixes)
            }
        for i, worst in enumerate(numbers.get("top", ())):
            top = f"{prefix}{name}/top/{i}"
            # Names are strings, so compiled functions can only return indices.
            if not with_names:
                flat[f"{top}/index"] = worst["index"]
            elif names := names_of(state):
                flat[f"{top}/name"] = names[int(worst["index"])]
            else:
                raise names_lost_error(f"the state of {name_of(state)}")
            flat |= {f"{top}/{field}": worst[field] for field in NUMBERS if field in worst}
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
    """Returns the numbers of `scalars` as one line of valid JSON.

    JSON cannot represent NaN and infinities, so they are written as null.
    `optaxclip.tuning.read_log` and `python -m optaxclip suggest` read a file of such lines and
    treat a norm that is null as non-finite. The host waits for the device, as in `scalars`.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      since: An earlier state or its `counts`, as in `metrics`.
      top: The number of worst leaves or groups to show, as in `scalars`.
      per_group: If True, leaves, layers and groups have separate numbers, as in `metrics`.
      more: Other values of the step, written before the scalars. They can be numbers, arrays of one
        number, strings, bools or None.

    Returns:
      A JSON object, without a line break.

    Raises:
      ValueError: If `scalars` raises it, or if a name in `more` is the name of a scalar.
      TypeError: If `scalars` raises it, or if a value has another type.

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
        raise ValueError(f"more must not contain the name of a scalar, got {twice[0]!r}; rename it")
    whole = {name: _plain(value, name) for name, value in (more | found).items()}
    return json.dumps(whole, allow_nan=False)


def _plain(value: Any, name: str) -> str | float | None:
    """Converts a value to its JSON type."""
    if not isinstance(value, Tracer) and np.shape(value) == () and hasattr(value, "item"):
        value = value.item()
    # JSON has no NaN and no infinities.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{name} must be a number, a string, a bool or None, got {short_repr(value)} of type "
        f"{type(value).__name__}"
    )
