"""Reads the most recent results of clipping stages, skip wrappers and records from a state."""

import functools
import json
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
import optaxclip.monitor._find_states as find_states
from optaxclip._backend.global_view import put_on_device
from optaxclip._base.types import ClipInfo, PyTree
from optaxclip._base.validation import check_bool, check_int, short_repr
from optaxclip.monitor._summary import (
    NUMBERS,
    OF_ALL,
    ClipRecord,
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
    """The records by key. You can also index it with the end of a key if the end is unique."""

    def __missing__(self, end: str) -> ClipInfo:
        fitting = [key for key in self if key.endswith(f"/{end}")]
        if len(fitting) == 1:
            return self[fitting[0]]
        matches = f"{end!r} matches {len(fitting) or 'none'}"
        raise KeyError(f"key must match exactly one of {list(self)}, but {matches}")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, ClipInfo]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(key), info) for key, info in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], infos: Any) -> "Records":
        return cls(zip(keys, infos, strict=True))


def read(opt_state: PyTree) -> Records:
    """Returns the most recent results of all clipping stages and skip wrappers in a state.

    It computes nothing and sends nothing to the host, so you can also call it under `jit`.

    Args:
      opt_state: Any pytree that contains the state, such as the state itself, a `TrainState`, or an
        `nnx.Optimizer`. In `nnx.state(optimizer)` and the result of
        `flax.serialization.to_state_dict`, Flax keeps no names, so all transformations are called
        "clip" or "skip".

    Returns:
      A dict that maps keys to `ClipInfo`. A skip wrapper comes before the stages that it wraps. If
      it checks the loss, it has a second record, in which `norm` is the loss, and the key ends with
      `/loss`.

      Keys consist of a path and the name of the transformation, such as `0/clip_by_global_norm` for
      `opt_state[0]`. They are unique and are the same on all steps. To index the dict, you can use
      the end of a key if it is unique, as in `read(state)["clip_by_global_norm"]`. If dict keys
      with a `/` make two paths equal, all paths use Python's notation, as in
      `['a/b'][0]/clip_by_norm`.

    Raises:
      ValueError: If no stage or wrapper in the state keeps a record.
      KeyError: If the dict is indexed with a string that is not the end of exactly one key.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for key, info in read(opt_state).items():
      ...     print(key, info.norm, info.factor)
      0/clip_by_global_norm 5.0 0.2
    """
    # A box of an `nnx.Optimizer` is not an array, so the fields of the records are unboxed.
    places, infos = [], []
    for path, state in find_states.records(opt_state, "read"):
        places.append((path, (find_states.name_of(state),)))
        infos.append(state.info)
        if isinstance(state, SkipState) and state.loss:
            places.append((path, (find_states.name_of(state), "loss")))
            infos.append(state.loss.info)
    rows = zip(find_states.unique_keys(places), infos, strict=True)
    return Records({key: ClipInfo(*map(find_states.unbox, info)) for key, info in rows})


def metrics(
    opt_state: PyTree,
    prefix: str = "",
    *,
    since: PyTree | None = None,
    top: int = 0,
    per_group: bool = False,
) -> dict[str, Array]:
    """Returns the records as a flat dict of scalars, also inside the compiled step.

    Names have the form `clip_by_global_norm/threshold`. If a transformation clips labeled groups
    (the scopes `group` and `muon`), the label follows, as in `clip_by_group_norm/norm/actor`.

      number           | of   | meaning                                    | of several groups
      -----------------|------|--------------------------------------------|------------------
      norm             | both | the norm before clipping                   | the worst group
      threshold        | both | the norm above which the rule acts         | the worst group
      factor           | both | the factor applied to the gradient         | the worst group
      clipped_norm     | both | norm * factor, the norm after clipping     | the worst group
      clipped_fraction | clip | num_clipped / steps                        | the largest
      num_clipped      | clip | the number of steps with clipping          | the largest
      num_nonfinite    | both | the number of steps with a non-finite norm | the largest
      num_skipped      | skip | the number of skipped steps                | the largest
      loss             | skip | the loss, if it is checked                 | furthest above
      loss_threshold   | skip | the threshold of the loss                  | furthest above
      loss_scale       | skip | the scale for the next step (`scale_loss`) | the smallest
      steps            | clip | the number of steps                        | the largest
      learning_rate    |      | the value in `optax.inject_hyperparams`    | the largest

    By default, one number represents all leaves, units, groups, or states under `vmap`. The worst
    group has the largest ratio of norm to threshold. A non-finite norm or a threshold of 0 is
    always the worst. The threshold is infinite before the first step, and always for
    `skip_nonfinite`.

    `learning_rate` has no transformation's name before it. `noise_scale` has the numbers `scale`,
    `signal`, and `variance`. `record` has `steps` and its statistics, the largest over all leaves
    or layers. They are NaN after a step that a surrounding wrapper skipped.

    `histogram` has `steps` and numbers for the step that it counted most recently.
    `median_exponent` is the exponent k of the bin from 2**k to 2**(k + 1) that contains the median
    of the nonzero elements. `low_exponent` and `high_exponent` are the same for the 5% and 95%
    quantiles. `zero_fraction` is the fraction of zeros. `num_infinite` and `num_nan` are counts of
    at most 2**31 - 1. Unknown numbers are NaN.

    Names are the same on all steps. If several transformations have the same name, numbers are
    appended, as in `clip_by_norm_1/norm`. Use `name=` to choose different names.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      prefix: A prefix for all names, such as "train/".
      since: An earlier state of the same optimizer, or its `counts`. Restricts counts and
        `clipped_fraction` to later steps, because over all steps, the fraction hardly changes late
        in a run. If there were no later steps, the fraction is 0. If `since` is the later state,
        for example after a rollback, the fraction is NaN and `steps` is negative.
      top: The number of worst leaves or groups to return. Their names have the form
        `clip_by_norm/top/0/norm`, and the worst group is first. A record ranks groups by the norm
        or, if it has none, by the first of its statistics in the table of `record`. The position
        `clip_by_norm/top/0/index` refers to `read(state)["clip_by_norm"].names`, or to
        `history_names(state)` for a record. `scalars` returns the name itself.
      per_group: If True, leaves, layers, and groups have separate numbers, as in
        `clip_by/norm/layers/00`. There can be very many.

    Returns:
      A dict that maps names to float32[], or int32[] for counts. Nothing is sent to the host.

    Raises:
      ValueError: If the state has no record, `histogram`, or `noise_scale`, if `since` does not
        match the state or contains deleted arrays, if `top` is negative, or if `top` is used and
        nothing in the state has several leaves or groups.
      TypeError: If `prefix` is not a string, or if `top` is not an int.

    Example:
      >>> import jax, jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_group_norm(1.0, {"actor": "actor", "critic": "critic"})
      >>> grads = {"actor": jnp.array([3.0, 4.0]), "critic": jnp.array([0.5])}
      >>> step = jax.jit(lambda state: metrics(tx.update(grads, state)[1], "train/"))
      >>> print(step(tx.init(grads))["train/clip_by_group_norm/norm/actor"])
      5.0
    """
    return _read_numbers(opt_state, prefix, since, top, per_group, "metrics", on_host=False)


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

    The host waits for the step that computes the state and for one `jax.device_get`, which
    transfers at most seven small arrays per transformation. Nothing is computed on the device, so
    one of several processes can call `scalars` alone.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      prefix: A prefix for all names, such as "train/".
      since: An earlier state or its `counts`, as in `metrics`.
      top: The number of worst leaves or groups to return, as in `metrics`.
      per_group: If True, leaves, layers, and groups have separate numbers.

    Returns:
      A dict that maps names to Python floats. If `top` is used, `.../top/0/name` is the name of the
      leaf, a string that you can log to TensorBoard with `add_text`.

    Raises:
      ValueError: If `metrics` raises it, or if `top` is used and the state has lost the names of
        its leaves.
      TypeError: If `metrics` raises it, or if called under `jit`, `vmap` or `grad`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5]), "v": jnp.array([2.0])}
      >>> _, opt_state = tx.update(grads, tx.init(grads))
      >>> found = scalars(opt_state, top=1)
      >>> print(found["clip_by_norm/clipped_fraction"], found["clip_by_norm/top/0/name"])
      1.0 w
    """
    return _read_numbers(opt_state, prefix, since, top, per_group, "scalars", on_host=True)


def _read_numbers(
    opt_state: PyTree,
    prefix: str,
    since: PyTree | None,
    top: int,
    per_group: bool,
    caller: str,
    *,
    on_host: bool,
) -> dict[str, Any]:
    """Returns the numbers as Python values on the host, or as arrays on the device."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'train/', got {prefix!r}")
    check_bool(per_group, "per_group")
    check_int(top, 0, "top")
    states = loggable_records(opt_state, caller)
    found = {name: record_of(state) for name, state in states.items()}
    labels = {name: _labels_of(states[name], x, per_group) for name, x in found.items()}
    arrays = found, counts_until(found, since), find_states.learning_rates(opt_state)
    if top and not any(map(has_elements, found.values())):
        raise ValueError(
            f"top must be 0 unless a stage or record has several leaves or groups, got {top}; "
            "add monitor.record(scope=scopes.leaf()) to the chain"
        )
    # One transfer for all arrays, because transfers to the host wait for the device. The arrays can
    # also be in the memory of the host, for example with an offloaded optimizer state.
    found, earlier, rates = (
        find_states.fetch_to_host(arrays, caller) if on_host else put_on_device(arrays)
    )
    compute, xp = (summarize, np) if on_host else (_summarize_on_device, jnp)
    flat: dict[str, Any] = {}
    for name, state in states.items():
        front, ends = f"{prefix}{name}", [f"/{label}" for label in labels[name]] or [""]
        with_labels = bool(labels[name])
        numbers = compute(found[name], earlier.get(name, {}), with_labels=with_labels, top=top)
        # `jit` sorts its results by name, so use the order of NUMBERS.
        for field in (field for field in NUMBERS if field in numbers):
            suffixes = [""] if field in OF_ALL else ends
            flat |= {f"{front}/{field}{x}": numbers[field][i] for i, x in enumerate(suffixes)}
        for i, worst in enumerate(numbers.get("top", ())):
            # Names are strings, so compiled functions can only return positions.
            if not on_host:
                flat[f"{front}/top/{i}/index"] = worst["index"]
            elif names := names_of(state):
                flat[f"{front}/top/{i}/name"] = names[int(worst["index"])]
            else:
                raise find_states.names_lost_error(f"the state of {find_states.name_of(state)}")
            flat |= {
                f"{front}/top/{i}/{field}": worst[field] for field in NUMBERS if field in worst
            }
    # Under `vmap`, the states can have several learning rates.
    flat |= {f"{prefix}{name}": xp.max(xp.asarray(rate)) for name, rate in rates.items()}
    if not on_host:
        return flat
    return {name: x if isinstance(x, str) else float(x) for name, x in flat.items()}


def _labels_of(state: Recorded, record: LogRecord, per_group: bool) -> tuple[str, ...]:
    """Returns the names of the elements with separate numbers, or an empty tuple."""
    names = names_of(state)
    if names.is_user_label or not per_group:
        return tuple(names) if names.is_user_label else ()
    if not has_elements(record):
        return tuple(names) if isinstance(record, HistogramRecord) else ()
    values = record.norm if isinstance(record, ClipRecord) else record.last
    if not names and any(x.size for x in jax.tree.leaves(values)):
        raise find_states.names_lost_error(f"the state of {find_states.name_of(state)}")
    return tuple(names)


@functools.partial(jax.jit, static_argnames=("with_labels", "top"), inline=True)
def _summarize_on_device(
    record: LogRecord, earlier: dict[str, Any], with_labels: bool, top: int
) -> Summary:
    # The arrays can be traced, or sharded by seeds over an explicit mesh.
    record, earlier = jax.tree.map(meshes.replicate, (record, earlier))
    return summarize(record, earlier, with_labels, top)


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

    NaN and infinities are written as null, because JSON cannot represent them. To read a file of
    such lines, use `optaxclip.tuning.read_log` or `python -m optaxclip suggest`.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      since: An earlier state or its `counts`, as in `metrics`.
      top: The number of worst leaves or groups to include, as in `scalars`.
      per_group: If True, leaves, layers, and groups have separate numbers.
      more: Other values of the step, written before the scalars. They can be numbers, arrays with
        one element, strings, bools, or None.

    Returns:
      A JSON object without line breaks.

    Raises:
      ValueError: If `scalars` raises it, or if `more` contains the name of a scalar.
      TypeError: If `scalars` raises it, or if a value has an unsupported type.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> _, opt_state = tx.update(jnp.array([3.0, jnp.inf]), tx.init(jnp.zeros(2)))
      >>> print(json_line(opt_state, step=7, loss=0.5)[:60])
      {"step": 7, "loss": 0.5, "clip_by_global_norm/norm": null, "
    """
    found = _read_numbers(opt_state, "", since, top, per_group, "json_line", on_host=True)
    if twice := sorted(found.keys() & more.keys()):
        raise ValueError(f"more must not contain the name of a scalar, got {twice[0]!r}; rename it")
    whole = {name: _plain(value, name) for name, value in (more | found).items()}
    return json.dumps(whole, allow_nan=False)


def _plain(value: Any, name: str) -> str | float | None:
    """Converts a value to a type that JSON supports."""
    if not isinstance(value, Tracer) and np.shape(value) == () and hasattr(value, "item"):
        value = value.item()
    # JSON has no NaN and no infinities.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{name} must be a number, a string, a bool, or None, got {short_repr(value)} of type "
        f"{type(value).__name__}"
    )
