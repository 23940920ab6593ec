"""TensorFlow's clipping functions for pytrees, with the same names and semantics.

These functions are pure. Leaves can be `None`, scalars, Python floats, NumPy arrays, or `BCOO`
(TensorFlow's `IndexedSlices`). Arrays can be complex or empty, and trees can be empty. In eager
mode, a call runs one cached compiled function. `docs/coming.md` lists the intended differences from
TensorFlow. `clip_cotangent` does not exist in TensorFlow. It clips inside the backward pass.
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

import optaxclip.scopes as scopes
import optaxclip.transforms.elementwise as elementwise
from optaxclip._backend.cotangent import forbid_vmap, transform_cotangent
from optaxclip._backend.global_view import memory_spaces, put_leaves, put_on_device
from optaxclip._base.trees import broadcast_prefix, flatten, get_stored_values, replace_values
from optaxclip._base.types import ArrayLike, AxisName, ClipInfo, NonFinite, PyTree, Thresholds
from optaxclip._base.validation import has_float_arrays, normalize_axis_names, short_repr
from optaxclip._engine.clip import clip_tree, group_norms
from optaxclip.nonfinite import check_policy
from optaxclip.norms import Norm, average_l2
from optaxclip.thresholds._constant import fixed
from optaxclip.thresholds._rule import check_threshold_value


def global_norm(
    tree: PyTree, *, norm: str | Norm = "l2", axis_name: AxisName = None, specs: PyTree = None
) -> Array:
    """Computes the norm of all leaves together.

    Sums are computed in float32 or wider, and intermediate values cannot overflow. The result is
    infinite only if the exact norm is infinite, and NaN only if an element is NaN. The derivative
    at a tree of zeros is 0.

    Args:
      tree: A pytree of floating-point or complex arrays.
      norm: "l2" (the default), "l1", "linf", "rms", "mean_abs", "average_l2", or a norm from
        `optaxclip.norms`.
      axis_name: The mapped axes over which all leaves are sharded, as in `optaxclip.clip_by`.
      specs: The sharding of the leaves, as in `optaxclip.clip_by`.

    Returns:
      The norm, float32[] (float64[] for 64-bit leaves). It is 0 for an empty tree.

    Raises:
      TypeError: If a leaf is an integer, a bool, a PRNG key, or not an array.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = {"w": jnp.full(4, 300, jnp.float16), "b": None}
      >>> print(optaxclip.ops.global_norm(grads))
      600.0
    """
    flatten(tree, "tree", integer_policy="error")
    result = group_norms(tree, scope=scopes.tree(), norm=norm, axis_name=axis_name, specs=specs)
    chex.assert_shape(result, ())
    return result


def clip_by_value(tree: PyTree, clip_value_min: ArrayLike, clip_value_max: ArrayLike) -> PyTree:
    """Clips elements to `[clip_value_min, clip_value_max]`.

    NaN is unchanged, and infinite elements become the bounds. Complex elements are scaled down to
    an absolute value of at most `clip_value_max`. If the minimum exceeds the maximum, all elements
    become the minimum, as in TensorFlow.

    Args:
      tree: A pytree of arrays. Integer leaves are allowed if both bounds are integers.
      clip_value_min: The minimum, a scalar or an array that broadcasts to all leaves.
      clip_value_max: The maximum, a scalar or an array that broadcasts to all leaves.

    Returns:
      A tree with the same structure, shapes, dtypes, and weak types.

    Raises:
      TypeError: If a bound is not a number, if a leaf is an integer and a bound is not, or if a
        leaf is a bool, a PRNG key, or not an array.
      ValueError: If a bound does not broadcast to the shape of a leaf.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> print(optaxclip.ops.clip_by_value(jnp.array([-5.0, 2.0, 6.0]), -4.4, 4.4))
      [-4.4  2.   4.4]
    """
    _check_order(tree, clip_value_min, clip_value_max)
    low = elementwise.check_bound(clip_value_min, "clip_value_min")
    high = elementwise.check_bound(clip_value_max, "clip_value_max")
    are_integers = all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in (low, high))
    # Like TensorFlow, clip integers if the bounds are integers.
    homes, integers = memory_spaces(tree), "measure" if are_integers else "error"
    flat = flatten(put_on_device(tree), "tree", integer_policy=integers)
    clamped = elementwise.clamp(flat, low, high, ("clip_value_min", "clip_value_max"))
    return _assert_same_types(put_leaves(clamped, homes), tree)


def clip_by_norm(
    tree: PyTree,
    clip_norm: ArrayLike,
    axes: int | Sequence[int] | None = None,
    *,
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> PyTree:
    """Scales leaves down to an L2 norm of at most `clip_norm`.

    Args:
      tree: A pytree of floating-point or complex arrays.
      clip_norm: A scalar. Negative numbers act as 0, and NaN sets all elements to NaN.
      axes: The axes over which norms are computed. Defaults to all axes.
      axis_name: The mapped axes, as in `global_norm`.
      specs: The sharding of the leaves, as in `global_norm`.

    Returns:
      A tree with the same structure, shapes, dtypes, and weak types. Norms at or below the
      threshold do not change. If a norm is non-finite, all of its elements become NaN.

    Raises:
      TypeError: If a leaf is an integer, a bool, a PRNG key, or not an array.
      ValueError: If `clip_norm` is not a scalar, or if a leaf does not have one of the axes.

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
    """Scales leaves down to an average norm of at most `clip_norm`.

    The average norm is the L2 norm divided by the number of elements, not the root mean square.

    Args:
      tree: A pytree of floating-point or complex arrays.
      clip_norm: A scalar. Negative numbers act as 0, and NaN sets all elements to NaN.
      axis_name: The mapped axes, as in `global_norm`.
      specs: The sharding of the leaves, as in `global_norm`.

    Returns:
      A tree as in `clip_by_norm`.

    Raises:
      TypeError: If a leaf is an integer, a bool, a PRNG key, or not an array.
      ValueError: If `clip_norm` is not a scalar.

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
    """Scales the whole tree down to an L2 norm of at most `clip_norm`.

    Source: Pascanu, Mikolov, and Bengio, 2013, arXiv 1211.5063.

    Args:
      tree: A pytree of floating-point or complex arrays.
      clip_norm: A scalar. Negative numbers act as 0, and NaN sets all elements to NaN.
      use_norm: The norm of the tree. By default, it is computed.
      axis_name: The mapped axes, as in `global_norm`.
      specs: The sharding of the leaves, as in `global_norm`.

    Returns:
      A tree with the same structure, shapes, dtypes, and weak types, and the norm before clipping,
      float32[] (float64[] for 64-bit leaves). If the norm is at or below the threshold, the leaves
      are unchanged. If it is non-finite, all elements become NaN.

    Raises:
      TypeError: If a leaf is an integer, a bool, a PRNG key, or not an array.
      ValueError: If `clip_norm` or `use_norm` is not a scalar.

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
    """Returns `x` unchanged, and clips its cotangent in the backward pass.

    The cotangent is the derivative of the loss with respect to `x`. In recurrent networks, unrolled
    solvers, and routers, this function prevents cotangents from growing as they are propagated,
    which clipping the final gradients cannot do::

      def step(h, x):
          h = jnp.tanh(h @ w + x)
          return ops.clip_cotangent(h, clip_norm=1.0), h

    Leaves are clipped independently, as by `clip_by_norm`. To clip several leaves by a common norm,
    concatenate them.

    Under `vmap`, examples are clipped independently. Use `axis_name` to compute one norm for the
    whole batch. Under `vmap` inside `shard_map`, you must use `axis_name=()` if devices have
    different examples, or the names of the axes over which examples are sharded. JAX sums the
    cotangents of a replicated `x` over devices before clipping.

    Cotangents are proportional to the loss. If the loss is a mean over `n` examples, the cotangent
    of an example is divided by `n`. If you use a loss scale, multiply the threshold by it.

    In forward mode (`jax.jvp`, `jax.jacfwd`), this function is the identity. Second derivatives are
    derivatives of the clipped gradient, also inside `scan`, `cond`, `jax.checkpoint`, and
    `shard_map`.

    Source: Graves, 2013, arXiv 1308.0850, section 2.1, clips the derivatives with respect to the
    inputs of LSTM layers by value.

    Args:
      x: A pytree of arrays. `None`, integer, bool, and PRNG-key leaves have no cotangent and are
        returned unchanged. For `BCOO` leaves, the cotangents of the stored elements are clipped.
      clip_norm: The maximum L2 norm of the cotangent of a leaf, a scalar. Negative numbers act as
        0, and NaN sets all elements to NaN.
      clip_value: The maximum absolute value of an element, a scalar. Use it instead of `clip_norm`.
        Negative numbers and NaN act as in `clip_norm`, but NaN elements are unchanged and infinite
        elements become the bounds.
      axes: The axes over which norms are computed. Defaults to all axes. This option and the
        following options require `clip_norm`.
      nonfinite: The policy for cotangents with a non-finite norm: "nan" (the default), "zero",
        "mask", or "error", as in `optaxclip.TransformOptions`.
      axis_name: The mapped axes, as in `global_norm`.
      specs: The sharding of the leaves, as in `global_norm`, a pytree prefix of `x`.

    Returns:
      `x` with the same structure, values, shapes, dtypes, and weak types. Cotangents have the same
      shapes and dtypes, and are unchanged if they are at or below the threshold.

    Raises:
      TypeError: If a leaf is not an array, or if a threshold is not a number.
      ValueError: If both or neither of `clip_norm` and `clip_value` are passed, if the threshold is
        not a scalar, if a leaf does not have one of the axes, or if an option of `clip_norm` is
        used with `clip_value`. Also raised by the backward pass under `vmap` inside `shard_map` if
        neither `axis_name` nor `specs` is used.

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
        given = "neither was" if clip_norm is None else "both were"
        raise ValueError(
            f"clip_cotangent requires exactly one of clip_norm and clip_value, but {given} passed"
        )
    options = {"nonfinite": check_policy(nonfinite), "axis_name": normalize_axis_names(axis_name)}
    flat = flatten(x, "x")
    leaves, names = flat.inexact_leaves(), flat.names()
    if clip_norm is not None:
        threshold = _as_scalar(clip_norm, "clip_norm")
        scope = scopes.leaf() if axes is None else scopes.axes(axes)
        scope(flat)  # Checks that all leaves have the axes.
        by_leaf = [None] * len(leaves) if specs is None else broadcast_prefix(specs, flat, "specs")
        backs = [
            functools.partial(_clip_leaf, name, spec, scope=scope, **options)
            for name, spec in zip(names, by_leaf, strict=True)
        ]
    else:
        threshold, backs = _as_scalar(clip_value, "clip_value"), [_clip_elements] * len(leaves)
        options |= {"axes": axes, "specs": specs, "nonfinite": None if nonfinite == "nan" else ""}
        unused = [name for name, value in options.items() if value is not None]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} cannot be combined with "
                f"clip_value={short_repr(clip_value)}; use clip_norm instead"
            )
    results = []
    for leaf, back in zip(leaves, backs, strict=True):
        # The cotangent of a sparse array is the cotangent of its stored elements.
        values = jnp.asarray(get_stored_values(leaf))
        results.append(replace_values(leaf, transform_cotangent(values, back, threshold)))
    return flat.unflatten(results)


def _clip_leaf(name: str, specs: Any, cotangent: Array, threshold: Array, **options: Any) -> Array:
    # Under `vmap` inside `shard_map`, it is unknown which devices share an example.
    if specs is None and options["axis_name"] is None:
        cotangent = forbid_vmap(cotangent, "clip_cotangent")
    options |= {"specs": None if specs is None else {name: specs}, "name": "clip_cotangent"}
    rule = fixed(Thresholds(threshold, threshold))
    # A dict, so that messages contain the name of the leaf.
    return clip_tree({name: cotangent}, rule, **options)[0][name]


def _clip_elements(cotangent: Array, threshold: Array) -> Array:
    return elementwise.clamp(flatten(cotangent, "x"), None, threshold, ("clip_value", "clip_value"))


def _clip(tree: PyTree, clip_norm: ArrayLike, **options: Any) -> tuple[PyTree, ClipInfo]:
    flatten(tree, "tree", integer_policy="error")
    _check_order(tree, clip_norm)
    threshold = _as_scalar(clip_norm, "clip_norm")
    clipped, info = clip_tree(tree, fixed(Thresholds(threshold, threshold)), **options)
    return _assert_same_types(clipped, tree), info


def _assert_same_types(clipped: PyTree, tree: PyTree) -> PyTree:
    """Asserts that the shapes and dtypes of both trees are equal, unless in eager mode."""
    leaves, structure = jax.tree.flatten(clipped)
    # In eager mode, this check would take as long as clipping.
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        expected = structure.flatten_up_to(tree)
        chex.assert_shape(leaves, [jnp.shape(leaf) for leaf in expected])
        chex.assert_type(leaves, [jnp.result_type(leaf) for leaf in expected])
    return clipped


def _check_order(tree: PyTree, *thresholds: Any) -> None:
    """Checks that the tree and the thresholds are not swapped."""
    if isinstance(tree, (int, float)) and any(map(has_float_arrays, thresholds)):
        raise TypeError(
            f"tree must be the gradients, got {short_repr(tree)} and a threshold that contains "
            "arrays; pass the gradients first, as in clip_by_global_norm(grads, 1.0)"
        )


def _as_scalar(value: Any, argument: str) -> Array:
    """Converts `value` to a scalar array, which may be negative or NaN."""
    return jnp.asarray(
        check_threshold_value(value, argument, allow_any_number=True, disabled_value="math.inf")
    )
