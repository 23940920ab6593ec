"""Hyperball: steps of fixed length along a sphere, instead of weight decay."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.states import Names, check_state, increased, registered_state
from optaxclip._base.trees import FlatTree, flatten, matching_params
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._border.crossing import Transformation, transformation
from optaxclip._engine.options import Options, PlaceOptions, takes
from optaxclip._engine.plan import Plan, plan_of
from optaxclip._engine.step import norms_of
from optaxclip.methods.moments import dense
from optaxclip.methods.spheres import steps_along
from optaxclip.methods.updates import leaves_apart
from optaxclip.thresholds.calling import checked_schedule
from optaxclip.thresholds.checks import checked_limit
from optaxclip.thresholds.fixed import ScalarOrSchedule


@registered_state
class HyperballState(NamedTuple):
    """State of `hyperball`.

    Attributes:
      steps: int32[], steps so far.
      radius: float32[matrices] (float64 if a parameter is float64), the norms that the matrices had
        at `init`, in the order of their names; `()` unless `radius="initial"`.
      names: the matrices' names in order; part of the structure, not arrays.
    """

    steps: Array
    radius: Array | tuple[()]
    names: Names


@takes(PlaceOptions)
def hyperball(
    learning_rate: ScalarOrSchedule,
    *,
    radius: Literal["initial", "current"] | ArrayLike = "initial",
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    eps: ArrayLike = 1e-12,
    **options: Unpack[PlaceOptions],
) -> Transformation[HyperballState]:
    """Keeps each matrix on a sphere, and makes the step's length a share of its radius.

    It must be the last stage of a chain, behind `optax.scale_by_adam` (AdamH) or Muon's direction
    (MuonH). It replaces the learning rate with its minus sign, and weight decay: neither may be in
    the chain. A matrix `W` for which the chain proposes the direction `u` becomes

        R * unit(W - learning_rate * R * unit(u)),  where unit(x) = x / sqrt(sum(abs(x)**2)).

    So each step is the same share of every matrix, whatever the direction's length, and no norm
    grows or shrinks during training. Hyperball is for matrices; train embeddings, biases and gains
    with another optimizer (`optax.partition`).

    Guarantees, with `radius="initial"` or a number and a learning rate up to 0.5: after every step
    the norm of a matrix is within a relative 1e-6 of its radius in float32, and within the rounding
    of its entries in a narrower dtype; neither error adds up over steps. A direction of zeros
    leaves its matrix as it is, bit for bit. A matrix of zeros has radius 0 and stays 0, unless the
    radius is a number: then its first step leads onto the sphere. So for matrices that begin at 0,
    such as LoRA's second matrix, pass a number, or use another optimizer. A direction that is not
    finite gives updates of NaN for its matrix alone. No intermediate norm overflows or underflows.

    Source: Wen et al., 2026, arXiv 2606.16899; used in Levanter, Paddle, Emerging-Optimizers and
    modded-nanogpt.

    Args:
      learning_rate: the step's length as a share of the radius, at least 0, or a schedule of it.
      radius: "initial" is the norm that each matrix had at `init`, which the state keeps; "current"
        is the norm that it has at this step, so that rounding errors add up; a number above 0 is
        the radius of all matrices.
      stacked: how many leading axes of each leaf stack separate matrices (layers, experts), each
        with its own radius, as in `optaxclip.scopes.leaf`; with None no axis does.
      eps: a direction with a norm of at most `eps` counts as zeros.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

    Returns:
      A transformation with a `HyperballState`. Its update needs the parameters, and returns what
      `optax.apply_updates` adds to them, computed in float32 (float64 for 64-bit leaves) and
      rounded once to the dtype of `u`. Integer and other leaves pass untouched.

    Raises:
      ValueError: for a learning rate, radius or `eps` that is negative, NaN or not a scalar; when
        used, for missing parameters, and for a leaf with fewer than two axes behind its stacked
        axes.
      TypeError: if one of them is not a number; when used, for a sparse leaf.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.hyperball(0.1)
      >>> params = jnp.array([[3.0, 0.0], [0.0, 4.0]])
      >>> direction = jnp.array([[0.0, 5.0], [0.0, 0.0]])
      >>> updates, state = tx.update(direction, tx.init(params), params)
      >>> print((params + updates).round(2))
      [[ 2.99 -0.5 ]
       [ 0.    3.98]]
      >>> print(state.radius)
      [5.]
      >>> adam_h = optax.chain(optax.scale_by_adam(), optaxclip.hyperball(0.01))
    """
    scope, checked = leaves_apart(stacked), Options.checked(**options)
    is_schedule = callable(learning_rate)
    rate = (checked_schedule if is_schedule else _checked_rate)(learning_rate, "learning_rate")
    fixed = None if isinstance(radius, str) else _checked_radius(radius)
    if isinstance(radius, str) and radius not in ("initial", "current"):
        raise ValueError(f"radius must be 'initial', 'current' or a number, got {radius!r}")
    keeps, eps = fixed is None and radius == "initial", checked_limit(eps, "eps")

    def grouped(tree: PyTree, argument: str, names: Names | None, size: int) -> Any:
        flat = dense(flatten(tree, argument), checked.name)
        plan = plan_of(flat, scope, checked, names, size)
        _refuse_vectors(flat, plan, checked.name)
        return flat, plan

    def init(params: PyTree) -> HyperballState:
        steps = jnp.zeros((), jnp.int32)
        flat, plan = grouped(devices.to_device(params), "params", None, 0)
        if not keeps:
            return HyperballState(steps, (), Names())
        norms = norms_of(flat, plan, checked.norm)
        return HyperballState(steps, norms, plan.grouping.names)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, HyperballState]:
        del extra_args
        if params is None:
            raise ValueError(
                f"{checked.name}: the step depends on the parameters; pass them: "
                "update(grads, state, params)"
            )
        has_memory = keeps or is_schedule
        state = init(params) if state is None and not has_memory else state
        check_state(state, HyperballState, checked.name, updates=updates)
        of_state = (state.names, state.radius.size) if keeps else (None, 0)
        flat, plan = grouped(updates, "updates", *of_state)
        weights = matching_params(flat, params, checked.name).measured_leaves()
        now = _checked_rate(rate(state.steps), "learning_rate") if is_schedule else rate
        operands = (weights, flat.measured_leaves(), state.radius if keeps else fixed, now, eps)
        leaves = steps_along(*operands, plan=plan)
        names = plan.grouping.names if keeps else Names()
        return flat.rebuild(leaves), HyperballState(increased(state.steps), state.radius, names)

    return transformation(init, update)


def _checked_rate(rate: Any, argument: str) -> Any:
    checked_limit(rate, argument, allow_any_number=True, schedule=True)
    if not isinstance(rate, jax.Array) and not 0 <= rate < math.inf:
        raise ValueError(
            f"{argument} must be at least 0 and finite, got {rate!r}; hyperball subtracts the "
            "direction itself, so leave out the sign, and optax.scale_by_learning_rate"
        )
    return rate


def _checked_radius(radius: Any) -> Any:
    checked_limit(radius, "radius", allow_any_number=True)
    if not isinstance(radius, jax.Array) and not 0 < radius < math.inf:
        raise ValueError(f"radius must be above 0 and finite, got {radius!r}")
    return radius


def _refuse_vectors(flat: FlatTree, plan: Plan, name: str) -> None:
    """Checks that each leaf is a matrix or a stack of matrices."""
    rows = zip(flat.names(), flat.measured_leaves(), plan.grouping.axes, strict=True)
    for path, leaf, axes in rows:
        if len(axes) < 2:
            stack = jnp.ndim(leaf) - len(axes)
            raise ValueError(
                f"{name}: leaf '{path}' of shape {jnp.shape(leaf)} is not a matrix"
                f"{f' behind {stack} stacked axes' if stack else ''}; train vectors, gains and "
                "embeddings with another optimizer, by optax.partition"
            )
