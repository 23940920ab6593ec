"""TensorFlow's clipping functions, with their names and meaning, for any pytree.

They are pure functions. Leaves may be `None`, scalars, Python floats, NumPy arrays, of size zero,
complex, or `BCOO` (TensorFlow's `IndexedSlices`), and a tree may be empty; an integer, a bool or a
PRNG key raises `TypeError`. In eager mode each call runs one compiled function, which is cached.
A table in `docs/coming.md` has the results that differ from TensorFlow's on purpose.

`clip_cotangent`, which TensorFlow does not have, clips within a backward pass.
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

import optaxclip._border.devices as devices
import optaxclip.methods.elementwise as elementwise
import optaxclip.scopes as scopes
from optaxclip._base.arguments import as_axis_names, holds_arrays, short
from optaxclip._base.trees import data_of, flatten, per_leaf, with_data
from optaxclip._base.types import ArrayLike, AxisName, ClipInfo, Limits, NonFinite, PyTree
from optaxclip._border.cotangents import Back, of_one_example, with_cotangent
from optaxclip._engine.clip import clip_tree, group_norms
from optaxclip.nonfinite import as_policy
from optaxclip.norms import Norm, average_l2
from optaxclip.thresholds.checks import checked_limit
from optaxclip.thresholds.fixed import given


def global_norm(
    tree: PyTree, *, norm: str | Norm = "l2", axis_name: AxisName = None, specs: PyTree = None
) -> Array:
    """The norm of all leaves together.

    The norm is summed in float32 or wider, and no intermediate overflows: it is infinite only if
    the true norm is, and NaN only if an entry is. Its derivative at a zero tree is 0.

    Args:
      tree: a pytree of floating or complex arrays.
      norm: "l2", "l1", "linf", "rms", "mean_abs", "average_l2", or a norm from `optaxclip.norms`.
      axis_name: the mapped axes over which all leaves are split; see `optaxclip.clip_by`.
      specs: how the leaves are split over devices; see `optaxclip.clip_by`.

    Returns:
      float32[] (float64[] for 64-bit leaves); 0 for an empty tree.

    Raises:
      TypeError: if a leaf is an integer, a bool or a PRNG key, or not an array.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = {"w": jnp.full(4, 300, jnp.float16), "b": None}
      >>> print(optaxclip.ops.global_norm(grads))
      600.0
    """
    _check(tree)
    options = {"axis_name": axis_name, "specs": specs}
    found: Any = group_norms(tree, scope=scopes.tree(), norm=norm, **options)
    chex.assert_shape(found, ())
    return found


def clip_by_value(tree: PyTree, clip_value_min: ArrayLike, clip_value_max: ArrayLike) -> PyTree:
    """Clips each entry to `[clip_value_min, clip_value_max]`.

    NaN stays NaN, and infinite entries become the bounds. A complex entry keeps its phase, and its
    modulus becomes at most `clip_value_max`. If the minimum is above the maximum, entries become
    the minimum, as in TensorFlow.

    Args:
      tree: a pytree of arrays; integer leaves are allowed if both bounds are integers.
      clip_value_min: a scalar, or an array that broadcasts to every leaf.
      clip_value_max: a scalar, or an array that broadcasts to every leaf.

    Returns:
      A tree of the same structure, shapes, dtypes and weak types.

    Raises:
      TypeError: for a bound that is not a number, an integer leaf with a floating bound, a bool or
        PRNG-key leaf, or something that is not an array.
      ValueError: for a bound that does not broadcast to the shape of a leaf.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> print(optaxclip.ops.clip_by_value(jnp.array([-5.0, 2.0, 6.0]), -4.4, 4.4))
      [-4.4  2.   4.4]
    """
    _check_order(tree, clip_value_min, clip_value_max)
    low = elementwise.checked_bound(clip_value_min, "clip_value_min")
    high = elementwise.checked_bound(clip_value_max, "clip_value_max")
    are_integers = all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in (low, high))
    homes, integers = devices.memories(tree), "measure" if are_integers else "error"
    flat = flatten(devices.to_device(tree), "tree", integers=integers)
    clamped = elementwise.clamp(flat, low, high, ("clip_value_min", "clip_value_max"))
    return _as_came(devices.moved(clamped, homes), tree)


def clip_by_norm(
    tree: PyTree,
    clip_norm: ArrayLike,
    axes: int | Sequence[int] | None = None,
    *,
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> PyTree:
    """Scales each leaf down to an L2 norm of at most `clip_norm`.

    Args:
      tree: a pytree of floating or complex arrays.
      clip_norm: a scalar; a negative one acts as 0, NaN makes every entry NaN.
      axes: the axes over which a norm is taken; all axes if None.
      axis_name: as in `global_norm`.
      specs: as in `global_norm`.

    Returns:
      A tree of the same structure, shapes, dtypes and weak types. Leaves at or below the limit come
      back bit for bit, and a leaf whose norm is not finite becomes all NaN.

    Raises:
      TypeError: if a leaf is an integer, a bool or a PRNG key, or not an array.
      ValueError: if `clip_norm` is not a scalar, or a leaf lacks one of the axes.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> x = jnp.array([[-3.0, 0.0, 0.0], [4.0, 0.0, 3.0]])
      >>> print(optaxclip.ops.clip_by_norm(x, 4.0, axes=0))
      [[-2.4  0.   0. ]
       [ 3.2  0.   3. ]]
    """
    scope = scopes.leaf() if axes is None else scopes.axes(axes)
    return _clip(tree, clip_norm, scope=scope, axis_name=axis_name, specs=specs)[0]


def clip_by_average_norm(
    tree: PyTree, clip_norm: ArrayLike, *, axis_name: AxisName = None, specs: PyTree = None
) -> PyTree:
    """Scales each leaf down to an average norm of at most `clip_norm`.

    The average norm is the L2 norm divided by the number of entries (not the root mean square).

    Args:
      tree: a pytree of floating or complex arrays.
      clip_norm: a scalar; a negative one acts as 0, NaN makes every entry NaN.
      axis_name: as in `global_norm`.
      specs: as in `global_norm`.

    Returns:
      As `clip_by_norm`.

    Raises:
      TypeError: as in `clip_by_norm`.
      ValueError: if `clip_norm` is not a scalar.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> x = jnp.array([[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
      >>> print(optaxclip.ops.clip_by_average_norm(x, 0.8))
      [[-2.88  0.    0.  ]
       [ 3.84  0.    0.  ]]
    """
    options = {"norm": average_l2, "axis_name": axis_name, "specs": specs}
    return _clip(tree, clip_norm, scope=scopes.leaf(), **options)[0]


def clip_by_global_norm(
    tree: PyTree,
    clip_norm: ArrayLike,
    use_norm: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> tuple[PyTree, Array]:
    """Scales all leaves together down to an L2 norm of at most `clip_norm`.

    Source: Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063.

    Args:
      tree: a pytree of floating or complex arrays.
      clip_norm: a scalar; a negative one acts as 0, NaN makes every entry NaN.
      use_norm: the norm of the tree, if the caller knows it; it is then not computed.
      axis_name: as in `global_norm`.
      specs: as in `global_norm`.

    Returns:
      The tree, of the same structure, shapes, dtypes and weak types, and the norm before clipping,
      float32[] (float64[] for 64-bit leaves). If the norm is at or below the limit the leaves come
      back bit for bit; if it is not finite all of them are NaN.

    Raises:
      TypeError: if a leaf is an integer, a bool or a PRNG key, or not an array.
      ValueError: if `clip_norm` or `use_norm` is not a scalar.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = {"w": jnp.array([[-2.0, 0.0], [4.0, 0.0]]), "b": jnp.array([1.0, -2.0])}
      >>> clipped, norm = optaxclip.ops.clip_by_global_norm(grads, 4.0)
      >>> print(clipped["w"].round(3), norm)
      [[-1.6  0. ]
       [ 3.2  0. ]] 5.0
    """
    options = {"use_norm": use_norm, "axis_name": axis_name, "specs": specs}
    clipped, info = _clip(tree, clip_norm, scope=scopes.tree(), **options)
    return clipped, info.norm


def clip_cotangent(
    x: PyTree,
    *,
    clip_norm: ArrayLike | None = None,
    clip_value: ArrayLike | None = None,
    axes: int | Sequence[int] | None = None,
    nonfinite: NonFinite = "nan",
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> PyTree:
    """Returns `x` as it is, and clips the cotangent that comes back through it.

    The cotangent is the derivative of the loss with respect to this `x`. In a recurrent network, a
    deep unrolled solver or a router, this function clips it before it goes further back and grows;
    a clip of gradients acts only after all cotangents have been added up::

      def step(h, x):
          h = jnp.tanh(h @ w + x)
          return ops.clip_cotangent(h, clip_norm=1.0), h

    Each leaf is clipped by itself, as by `clip_by_norm`, because cotangents of different leaves may
    come at different times. To give several leaves one norm, concatenate them first. Under `vmap`
    each example is clipped by itself; to share a norm over the batch, name the axis in `axis_name`.
    Under `vmap` inside `shard_map` say by `axis_name=()` that the devices have different examples,
    or name the axes over which parts of an example are split: without it, a `ValueError` says so.
    JAX adds up the cotangents of an `x` that is the same on all devices before they are clipped.
    A cotangent is scaled as its loss is: if the loss is a mean over `n` examples, it is `1 / n` of
    the example's own. A loss scale multiplies it; multiply the limit by that scale too.

    In forward mode (`jax.jvp`, `jax.jacfwd`) the function is the identity. Derivatives of a
    gradient, in either mode, are derivatives of the clipped gradient. All this holds inside of
    `scan`, `cond`, `jax.checkpoint` and `shard_map` too.

    Source: Graves, 2013, arXiv 1308.0850, section 2.1, where the derivatives with respect to the
    inputs of LSTM layers are clipped by value.

    Args:
      x: a pytree of arrays. `None`, integer, bool and PRNG-key leaves have no cotangent, and pass;
        for a `BCOO` leaf, the cotangent of the stored entries is clipped.
      clip_norm: the largest L2 norm of a leaf's cotangent, a scalar; a negative one acts as 0, NaN
        makes every entry NaN.
      clip_value: in place of `clip_norm`, the largest absolute value of an entry, a scalar;
        negative and NaN as for `clip_norm`. Infinite entries become the bounds, and NaN stays.
      axes: the axes over which a norm is taken; all axes if None.
      nonfinite: with `clip_norm`, what becomes of a cotangent whose norm is not finite: "nan",
        "zero", "mask" or "error", as in `optaxclip.StageOptions`.
      axis_name: with `clip_norm`, as in `global_norm`.
      specs: with `clip_norm`, as in `global_norm`: a pytree prefix of `x`.

    Returns:
      `x`: the same structure, values, shapes, dtypes and weak types. Cotangents keep shape and
      dtype too; those at or below the limit stay bit for bit.

    Raises:
      TypeError: if a leaf is not an array, or a limit is not a number.
      ValueError: unless just one of `clip_norm` and `clip_value` is given; if it is not a scalar;
        for a leaf that lacks one of the axes; for an option of `clip_norm` beside `clip_value`; in
        the backward pass under `vmap` inside `shard_map`, without `axis_name=` and `specs=`.

    Example:
      >>> import jax, jax.numpy as jnp, optaxclip
      >>> def loss(h):
      ...     for _ in range(8):
      ...         h = optaxclip.ops.clip_cotangent(10.0 * h, clip_norm=1.0)
      ...     return h.sum()
      >>> print(jax.grad(loss)(jnp.array([0.6, 0.8])).round(3))
      [7.071 7.071]
    """
    if (clip_norm is None) == (clip_value is None):
        given = "neither" if clip_norm is None else "both"
        raise ValueError(f"pass either clip_norm or clip_value to clip_cotangent, got {given}")
    options = {"nonfinite": as_policy(nonfinite), "axis_name": as_axis_names(axis_name)}
    flat = flatten(x, "x")
    if clip_norm is not None:
        limit, scope = _scalar(clip_norm, "clip_norm"), scopes.leaf()
        if axes is not None:
            scope = scopes.axes(axes)
            scope(flat)  # refuses axes that a leaf lacks
        specs_of = [None] * len(flat.measured) if specs is None else per_leaf(specs, flat, "specs")
        rows = zip(flat.names(), specs_of, strict=True)
        backs = [functools.partial(_clip_leaf, *row, scope=scope, **options) for row in rows]
    else:
        limit, backs = _scalar(clip_value, "clip_value"), [_clip_entries] * len(flat.measured)
        options |= {"axes": axes, "specs": specs, "nonfinite": None if nonfinite == "nan" else ""}
        unused = [name for name, value in options.items() if value is not None]
        if unused:
            raise ValueError(f"{', '.join(unused)} can be passed with clip_norm alone")

    def passed(leaf: Any, back: Back) -> Any:
        return with_data(leaf, with_cotangent(jnp.asarray(data_of(leaf)), back, limit))

    return flat.rebuild(list(map(passed, flat.measured_leaves(), backs)))


def _clip_leaf(leaf: str, specs: PyTree, cotangent: Array, limit: Array, **options: Any) -> Array:
    if specs is None and options["axis_name"] is None:
        cotangent = of_one_example(cotangent, "clip_cotangent")
    named = {"specs": None if specs is None else {leaf: specs}, "name": "clip_cotangent"}
    rule = given(Limits(limit, limit))
    return clip_tree({leaf: cotangent}, rule, **named, **options)[0][leaf]


def _clip_entries(cotangent: Array, limit: Array) -> Array:
    return elementwise.clamp(flatten(cotangent, "x"), None, limit, ("clip_value", "clip_value"))


def _clip(tree: PyTree, clip_norm: ArrayLike, **options: Any) -> tuple[PyTree, ClipInfo]:
    _check(tree)
    _check_order(tree, clip_norm)
    limit = _scalar(clip_norm, "clip_norm")
    clipped, info = clip_tree(tree, given(Limits(limit, limit)), **options)
    return _as_came(clipped, tree), info


def _as_came(clipped: PyTree, tree: PyTree) -> PyTree:
    """`clipped`; in a trace, its leaves are asserted to have the shapes and dtypes of `tree`."""
    found, structure = jax.tree.flatten(clipped)
    # Not in eager mode, where this check would take as long as the clip.
    if any(isinstance(leaf, Tracer) for leaf in found):
        leaves = structure.flatten_up_to(tree)
        chex.assert_shape(found, [jnp.shape(leaf) for leaf in leaves])
        chex.assert_type(found, [jnp.result_type(leaf) for leaf in leaves])
    return clipped


def _check(tree: PyTree) -> None:
    flatten(tree, "tree", integers="error")


def _check_order(tree: PyTree, *limits: Any) -> None:
    if isinstance(tree, (int, float)) and any(map(holds_arrays, limits)):
        raise TypeError(
            f"tree, the first argument, is {short(tree)}, and what comes after it holds arrays: "
            "pass the gradients first, the limits after them, as in clip_by_global_norm(grads, 1.0)"
        )


def _scalar(value: Any, argument: str) -> Array:
    """`value` as a scalar array; negative numbers and NaN are allowed."""
    return jnp.asarray(checked_limit(value, argument, allow_any_number=True, off="math.inf"))
