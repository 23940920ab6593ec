"""What jax_privacy's `clipping` module offers, made of ours; where it differs is said."""

import collections

import jax
import jax.numpy as jnp

import optaxclip
from optaxclip import per_example, scopes

AuxiliaryOutput = collections.namedtuple("AuxiliaryOutput", ["values", "grad_norms", "aux"])


def _several(numbers):
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _with_axis(fun, positions):
    """A function of one example that calls another with an axis of one example."""

    def of_one(*args, **keywords):
        args = list(args)
        for i in positions:
            args[i] = jax.tree.map(lambda x: x[None], args[i])
        return fun(*args, **keywords)

    return of_one


def _without_axis(x):
    return jnp.squeeze(x, axis=1) if jnp.ndim(x) >= 2 and x.shape[1] == 1 else x


def _like(tree, others):
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, others)


def clip_pytree(pytree, clip_norm, rescale_to_unit_norm=False, nan_safe=True, return_zero=False):
    """Clips by the global norm; a zero tree stays zero with a unit norm."""
    options = {"scope": scopes.tree(), "nonfinite": "mask" if nan_safe else "nan"}
    clipped, info = optaxclip.clip_tree(pytree, clip_norm, strict=True, **options)
    if rescale_to_unit_norm:
        # Rounded to 16 bits it may be longer than 1; in float32 it is 1 to the last digit.
        is_narrow = any(jnp.finfo(x.dtype).bits < 32 for x in jax.tree.leaves(pytree))
        options |= {"strict": is_narrow, "response": "normalize"}
        unit, _ = optaxclip.clip_tree(pytree, 1.0, **options)
        is_zero = jnp.asarray(clip_norm) <= 0
        bound = jnp.where(is_zero, 1, clip_norm)
        clipped = jax.tree.map(
            lambda x, y: jnp.where(is_zero, y, x / bound).astype(x.dtype), clipped, unit
        )
    return jax.tree.map(lambda x: jnp.where(return_zero, 0, x), clipped), info.norm


class _Bounded:
    """A function with `.sensitivity()`, as `clipped_grad` has it, after a scaling."""

    def __init__(self, fun, of_ours, scale):
        self.fun, self.of_ours, self.scale = fun, of_ours, scale

    def __call__(self, *args, **keywords):
        return self.fun(*args, **keywords)

    def sensitivity(self, relation="replace_special"):
        return self.of_ours.sensitivity(relation) * self.scale


def _scale(l2_clip_norm, rescale_to_unit_norm, normalize_by):
    return (1 / l2_clip_norm if rescale_to_unit_norm else 1.0) / normalize_by


def clipped_fun(
    fun,
    has_aux=False,
    *,
    batch_argnums=0,
    keep_batch_dim=True,
    l2_clip_norm=1.0,
    rescale_to_unit_norm=False,
    normalize_by=1.0,
    return_norms=False,
    microbatch_size=None,
    nan_safe=True,
    dtype=None,
):
    """Any function of one example; microbatches we have for gradients alone."""
    del microbatch_size, nan_safe  # what is not finite is dropped always
    batch = _several(batch_argnums)
    of_one = _with_axis(fun, batch) if keep_batch_dim else fun
    scale = _scale(l2_clip_norm, rescale_to_unit_norm, normalize_by)

    def summed(*args, is_padding_example=None):
        axes = [0 if i in batch else None for i in range(len(args))]
        found = jax.vmap(of_one, axes)(*args)
        values, aux = found if has_aux else (found, ())
        given = jax.tree.map(lambda x: x.astype(dtype or x.dtype), values)
        result = per_example.clip_sum(given, l2_clip_norm, is_padding=is_padding_example)
        total = _like(jax.tree.map(lambda x: x * scale, result.grads), given)
        aux = jax.tree.map(_without_axis, aux) if keep_batch_dim else aux
        extra = {(0, 1): result.norms, (1, 0): aux, (1, 1): (aux, result.norms)}
        return (total, extra[has_aux, return_norms]) if has_aux or return_norms else total

    return _Bounded(summed, per_example.clipped_grad(fun, l2_clip_norm), scale)


def clipped_grad(
    fun,
    argnums=0,
    has_aux=False,
    *,
    l2_clip_norm,
    rescale_to_unit_norm=False,
    normalize_by=1.0,
    batch_argnums=1,
    keep_batch_dim=True,
    return_values=False,
    return_grad_norms=False,
    pre_clipping_transform=None,
    microbatch_size=None,
    prng_argnum=None,
    method="vmap",
):
    """The sum of clipped gradients, in the dtypes of the parameters.

    The method "ghost" is taken where it can be: it has no gradients of examples to transform.
    """
    batch = _several(batch_argnums)
    of_one = _with_axis(fun, batch) if keep_batch_dim else fun
    mapped = batch if prng_argnum is None else (*batch, prng_argnum)
    ours = per_example.clipped_grad(
        of_one,
        l2_clip_norm,
        argnums=argnums,
        batch_argnums=mapped,
        has_aux=has_aux,
        microbatch_size=microbatch_size,
        pre_clipping_transform=pre_clipping_transform,
        method=method if pre_clipping_transform is None else "vmap",
    )
    scale = _scale(l2_clip_norm, rescale_to_unit_norm, normalize_by)

    def summed(*args, is_padding_example=None, **keywords):
        args = list(args)
        if prng_argnum is not None:
            examples = jax.tree.leaves(args[batch[0]])[0].shape[0]
            args[prng_argnum] = jax.random.split(args[prng_argnum], examples)
        result = ours(*args, is_padding=is_padding_example, **keywords)
        total = jax.tree.map(lambda x: x * scale, result.grads)
        if pre_clipping_transform is None:
            total = _like(total, args[argnums])
        if not (has_aux or return_values or return_grad_norms):
            return total
        aux = jax.tree.map(_without_axis, result.aux) if keep_batch_dim else result.aux
        values = result.losses if return_values else None
        return total, AuxiliaryOutput(values, result.norms if return_grad_norms else None, aux)

    return _Bounded(summed, ours, scale)
