"""Clipping of singular values: a function of each matrix's spectrum, not one factor for a group."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

import optaxclip._base.devices as devices
import optaxclip.nonfinite as policies
from optaxclip._base.arguments import check_state, whole
from optaxclip._base.counters import increased
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import (
    accumulation_dtype,
    known_size,
    match_weak_type,
    safe_divide,
)
from optaxclip._base.transformation import Transformation
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import ClipInfo, ClipState, NonFinite, PyTree, Threshold
from optaxclip._engine.checks import among_known
from optaxclip._engine.clip import clip_by
from optaxclip._engine.placement import grouped, on_explicit_mesh, run
from optaxclip._engine.record import updated_info
from optaxclip._engine.step import limits_of, report
from optaxclip.methods.moments import dense, wide_dtype
from optaxclip.methods.singular_values import RESPONSES, Mode, Prepared, clipped, largest
from optaxclip.methods.updates import leaves_apart
from optaxclip.thresholds.fixed import ScalarOrSchedule, as_limit, at_step, rule_for


def clip_by_spectral_norm(
    c: ScalarOrSchedule,
    mode: Mode = "soft",
    *,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    iterations: int = 10,
    nonfinite: NonFinite = "nan",
    name: str = "clip_by_spectral_norm",
) -> Transformation[ClipState]:
    """Clips the singular values of every matrix, on gradients or after the optimizer.

    The singular vectors stay. "soft" makes `s / sqrt(1 + (s / c)**2)` of a singular value `s`,
    below `c` always, "hard" makes `min(s, c)` of it, and gives back bit for bit a matrix that has
    none above `c`. Vectors and scalars are clipped by their L2 norm in the same way. A leaf of
    more than two axes is taken as a matrix `[all but the last, last]`, as convolutions are laid
    out; leading axes that `stacked` counts are matrices of their own.

    It takes matrix products alone, in float32 (float64 for 64-bit leaves) of full precision, and no
    decomposition. Beside NumPy's SVD the error is below 1e-3 of the result's largest singular value
    where the matrix's is up to 1e4 times `c` (2e-3 where half of 512 are that large, as float32 has
    no more digits), and below 5e-5 to 100 times `c`. For a matrix
    `[m, n]` with `m <= n` an iteration takes two products with `[m, n]` and four with `[m, m]`, and
    "hard" two and 29 more at the end, where Muon takes 5 times two and one. On a CPU it takes about
    twice as long as Muon for a square matrix (`optax.contrib.scale_by_muon`), "hard" about three
    times; with 5 iterations as long as Muon (`benchmarks/spectral.py`).

    Source: SPECTRA, 2026, arXiv 2603.14315 (mlolab/llm-spectral-clipping); for the hard form
    NVIDIA-NeMo/Emerging-Optimizers.

    Args:
      c: the largest singular value.
      mode: "soft" or "hard".
      stacked: how many leading axes of each leaf stack separate tensors, as in
        `optaxclip.scopes.leaf`; none if None.
      iterations: of Newton-Schulz; 10 reach singular values of 1e4 times `c`, 5 those of 100 times
        `c`. Static, also in `optax.inject_hyperparams`.
      nonfinite: the policy for tensors that are not finite.
      name: the name in messages and in `optaxclip.monitor`.

    Returns:
      A transformation with a `ClipState`; in its record `norm` is the largest singular value, found
      from below to a few per cent, and `factor` what that was multiplied by. Its update gives a
      tree of the shapes, dtypes and weak types of the gradients. Under `jit` leaves may be split
      over devices.

    Raises:
      ValueError: for a limit that is negative, NaN or not a scalar, an unknown mode or policy, or
        `iterations` below 1; when used, for leaves that are split inside of `shard_map` or `pmap`.
      TypeError: for a limit that is no number; when used, for a sparse leaf.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = jnp.array([[3.0, 0.0, 0.0], [0.0, 4.0, 3.0]])  # singular values 5 and 3
      >>> tx = optaxclip.clip_by_spectral_norm(4.0, "hard")
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates)
      [[3.  0.  0. ]
       [0.  3.2 2.4]]
      >>> soft = optaxclip.clip_by_spectral_norm(1.0).update(grads, None)[0]
      >>> for row in soft.tolist():
      ...     print(row)
      [0.948683, 0.0, 0.0]
      [0.0, 0.784465, 0.588348]
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {list(get_args(Mode))}, got {mode!r}")
    limit, scope = as_limit(c, "c"), leaves_apart(stacked)
    policy = policies.as_policy(nonfinite)
    how = _How(mode, whole(iterations, 1, "iterations"), policy, name)
    like, raises = clip_by(scope, limit, name=name), policy == "error"

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        del params, extra_args
        flat = dense(flatten(updates, "updates"), name)
        _refuse_parts(flat, name)
        state = like.init(updates) if state is None else state
        check_state(state, ClipState, name)
        grouping = among_known(grouped(scope, flat), state.info, name)
        grouping = dataclasses.replace(grouping, in_one_array=False)
        rule = rule_for(limit, grouping.names, grouping.layout)
        leaves, rule_state, info = run(
            _on_any_mesh,
            [jnp.asarray(leaf) for leaf in flat.picked()],
            at_step(rule, state.rule),
            state.rule,
            state.info,
            grouping=grouping,
            how=dataclasses.replace(how, leaves=tuple(flat.names())) if raises else how,
            # In eager mode `checkify` raises at once, which a compiled call would not let it.
            inline=raises,
        )
        return flat.rebuild(leaves), ClipState(increased(state.steps), rule_state, info)

    return Transformation(like.init, update)


@dataclasses.dataclass(frozen=True)
class _How:
    """What is done to singular values; static under `jit`."""

    mode: Mode
    iterations: int
    nonfinite: NonFinite
    name: str
    leaves: tuple[str, ...] = ()


def _refuse_parts(flat: FlatTree, name: str) -> None:
    """Raises where a leaf may be a part of a matrix.

    Raises:
      ValueError: inside of a manual region, but for leaves that are known to be the same on all
        devices.
    """
    manual = devices.manual_axes()
    for leaf, path in zip(flat.picked(), flat.names(), strict=True):
        if manual and (not devices.tracks(manual) or devices.varying_axes(leaf)):
            raise ValueError(
                f"{name}: leaf '{path}' may be a part of a matrix that is split over the devices "
                f"along {sorted(manual)}, and singular values are those of a whole one; clip "
                "outside of shard_map or pmap, or gather it (jax.lax.all_gather) and use "
                "shard_map(check_vma=True)"
            )


def _on_any_mesh(
    leaves: list[Array], *operands: Any, grouping: Grouping, how: _How
) -> tuple[list[Array], PyTree, ClipInfo]:
    def out_specs(grouping: Grouping) -> PyTree:
        return list(grouping.specs or ()), *jax.tree.map(lambda _: PartitionSpec(), operands[1:])

    steps = functools.partial(_steps, how=how)
    return on_explicit_mesh(steps, out_specs, leaves, grouping)(leaves, *operands)


def _steps(
    leaves: list[Array],
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    *,
    grouping: Grouping,
    how: _How,
) -> tuple[list[Array], PyTree, ClipInfo]:
    """Measure, limit, clip, record."""
    stacks = [x.ndim - len(axes) for x, axes in zip(leaves, grouping.axes, strict=True)]
    measured = [_measured(x, stack, how) for x, stack in zip(leaves, stacks, strict=True)]
    norms = _of_groups([norm for norm, _ in measured], grouping, jnp.float32)
    bad = _of_groups([flags for _, flags in measured], grouping, jnp.bool_)
    if how.nonfinite == "error":
        report(bad, grouping, how.name, how.leaves)
    _, limits, rule_state = limits_of(rule, rule_state, norms, None, grouping)
    rows = zip(leaves, stacks, grouping.by_leaf(limits), strict=True)
    results = [_clipped(*row, how) for row in rows]
    factors = [_factor(*row, how) for row in zip(norms, limits, bad, strict=True)]
    return results, rule_state, updated_info(info, grouping, norms, limits, factors, bad)


def _of_groups(arrays: list[Array], grouping: Grouping, missing: Any) -> list[Array]:
    """Arrays of leaves in the order of the groups; zeros of a dtype for groups without leaves."""
    return [
        arrays[group.members[0]] if group.members else jnp.zeros(group.shape, missing)
        for group in grouping.groups
    ]


# Compiled by themselves so that each is traced once for leaves alike.
@functools.partial(jax.jit, static_argnames=("stack", "how"))
def _measured(x: Array, stack: int, how: _How) -> tuple[Array, Array]:
    """The largest singular values of a leaf's matrices, and which are not finite."""
    axes, real = tuple(range(stack, x.ndim)), accumulation_dtype(x.dtype)
    finite = jnp.isfinite(x)
    bad = ~jnp.all(finite, axes)
    if known_size(x.size) == 0:
        return jnp.zeros(bad.shape, real), bad
    norm = _each(stack, lambda matrix: largest(Prepared.of(matrix)))(_matrices(x, stack))
    if how.nonfinite != "mask":
        worst = jnp.max(jnp.where(finite, 0, jnp.abs(x)).astype(real), axes, initial=0)
        norm = jnp.where(bad, worst, norm)
    return norm, bad


@functools.partial(jax.jit, static_argnames=("stack", "how"))
def _clipped(x: Array, stack: int, limits: Array, how: _How) -> Array:
    """A leaf whose matrices have their singular values clipped."""
    if known_size(x.size) == 0:
        return x
    clip_one = functools.partial(clipped, mode=how.mode, iterations=how.iterations)
    limits = limits.astype(accumulation_dtype(x.dtype))
    result = _each(stack, clip_one)(_matrices(x, stack), limits).reshape(x.shape).astype(x.dtype)
    if how.nonfinite != "mask":
        bad = ~jnp.all(jnp.isfinite(x), tuple(range(stack, x.ndim)), keepdims=True)
        result = jnp.where(bad, jnp.asarray(_replacement(how)).astype(x.dtype), result)
    return match_weak_type(result, x)


def _matrices(x: Array, stack: int) -> Array:
    """`[*stack, rows, columns]` in a dtype to compute with; a row for what has no more axes.

    What is not finite becomes 0.
    """
    wide = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)).astype(wide_dtype(x.dtype))
    *front, last = x.shape[stack:] or (1,)
    return wide.reshape(*x.shape[:stack], math.prod(front), last)


def _each(stack: int, fn: Callable[..., Array]) -> Callable[..., Array]:
    """`fn` of one matrix for all of a stack."""
    return functools.reduce(lambda fn, _: jax.vmap(fn), range(stack), fn)


def _factor(norm: Array, limit: Array, bad: Array, how: _How) -> Array:
    new = RESPONSES[how.mode](norm, limit.astype(norm.dtype), limit.astype(norm.dtype))
    factor = safe_divide(new, norm, 1)
    return factor if how.nonfinite == "mask" else jnp.where(bad, _replacement(how), factor)


def _replacement(how: _How) -> float:
    return 0.0 if how.nonfinite == "zero" else math.nan
