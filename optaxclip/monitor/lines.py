"""The scalars of an optimizer's state as a line for a log."""

import json
import math
from typing import Any

import numpy as np
from jax.core import Tracer

from optaxclip._base.arguments import short_repr
from optaxclip._base.types import PyTree
from optaxclip.monitor.reading import scalars_on_host


def json_line(
    opt_state: PyTree,
    /,
    *,
    since: PyTree | None = None,
    top: int = 0,
    entries: bool = False,
    **more: Any,
) -> str:
    """What `scalars` gives, as one line of valid JSON.

    JSON has no name for NaN and infinities, so they are written as null. `optaxclip.tuning.suggest`
    and `python -m optaxclip suggest` read a file of such lines, and take a norm that is null for
    one that was not finite. The host waits for the device, as in `scalars`.

    Args:
      opt_state: as in `read`.
      since: as in `metrics`.
      top: as in `scalars`.
      entries: as in `metrics`.
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
    found = scalars_on_host(opt_state, "", since, top, entries, "json_line")
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
