"""Messages for names that people look for in the wrong place."""

import sys
from typing import Any

_NAMESPACES: list[str] = []
"""The full names of the modules that give such messages."""

_BY_NORM = (
    "clip_by_global_norm(max_norm) in an optax.chain, or ops.clip_by_global_norm(grads, max_norm) "
    "for gradients that you have"
)
_BY_VALUE = (
    "clip(max_delta) in an optax.chain, or ops.clip_by_value(grads, -max_delta, max_delta) for "
    "gradients that you have"
)
_BY_LEAF = (
    "clip_by_norm(max_norm) in an optax.chain, or ops.clip_by_norm(grads, max_norm) for gradients "
    "that you have"
)
_AGC = "adaptive_grad_clip(clipping) in an optax.chain, whose update needs the parameters"
_EITHER = f"by the norm of all leaves: {_BY_NORM}; by value: {_BY_VALUE}"
_TOTAL = "ops.global_norm(grads)"
_SKIP = "skip_nonfinite(optimizer) or skip_above(optimizer, limit), around the whole optimizer"
_SCALE = "scale_loss(optimizer), and monitor.loss_scale(opt_state), which multiplies the loss"
_PRIVATE = "per_example_clip_and_aggregate(limit, noise_multiplier, key)"

SIGNS: dict[str, str] = {
    # PyTorch, Lightning, Accelerate, DeepSpeed, Megatron, Apex, MLX
    "clip_grad_norm": _BY_NORM,
    "clip_grads_with_norm": "ops.clip_by_global_norm(grads, max_norm, use_norm=norm)",
    "clip_grad_by_total_norm_fp32": "ops.clip_by_global_norm(grads, max_norm, use_norm=norm)",
    "clip_grad_value": _BY_VALUE,
    "clamp": _BY_VALUE,
    "clip_grad": _EITHER,
    "clip_grads": _BY_NORM,
    "clip_gradients": _EITHER,
    "gradient_clip_val": _EITHER,
    "gradient_clipping": _EITHER,
    "max_grad_norm": _BY_NORM,
    "get_total_norm": _TOTAL,
    "get_global_norm": _TOTAL,
    "get_grad_norm": _TOTAL,
    "get_grad_norm_fp32": _TOTAL,
    "grad_norm": _TOTAL,
    "total_norm": _TOTAL,
    # TensorFlow, Keras, Paddle, MXNet
    "clip_gradient_norms": _BY_LEAF,
    "clip_gradients_by_norm": _BY_LEAF,
    "clip_gradients_by_global_norm": _BY_NORM,
    "clip_tensors_by_global_norm": _BY_NORM,
    "clip_global_norm": _BY_NORM,
    "clip_grad_by_norm": _BY_LEAF,
    "clip_grad_by_value": _BY_VALUE,
    "clip_grad_by_global_norm": _BY_NORM,
    "clipnorm": _BY_LEAF,
    "clipvalue": _BY_VALUE,
    "global_clipnorm": _BY_NORM,
    # Optax
    "apply_if_finite": "skip_nonfinite(optimizer, max_consecutive)",
    "skip_not_finite": _SKIP,
    "skip_large_updates": _SKIP,
    "zero_nans": 'a clip with nonfinite="mask", as clip_by_global_norm(max_norm, nonfinite="mask")',
    "unitwise_norm": "scopes.unit(), as in clip_by(scopes.unit(), limit)",
    "unitwise_clip": _AGC,
    "normalize_by_update_norm": "normalize_by_global_norm(norm)",
    "differentially_private_aggregate": _PRIVATE,
    "dpsgd": _PRIVATE,
    "l2_norm": _TOTAL,
    # Flax, jmp, PyTorch
    "DynamicScale": _SCALE,
    "DynamicLossScale": _SCALE,
    "GradScaler": _SCALE,
    # timm, fastai
    "agc": _AGC,
    "adaptive_clip_grad": _AGC,
    "adaptive_gradient_clipping": _AGC,
    "dispatch_clip_grad": f"{_EITHER}; relative to the weights: {_AGC}",
    "gradient_clip": _BY_NORM,
    # Rules whose name differs from that of the method which uses them.
    "thresholds.zclip": "thresholds.zscore(), a rule; zclip() is a transformation",
    "thresholds.autoclip": "thresholds.percentile(), a rule; autoclip() is a transformation",
    "thresholds.agc": "thresholds.relative_to_params(ratio), a rule; for a transformation " + _AGC,
    "thresholds.adaptive_grad_clip": "thresholds.relative_to_params(ratio), a rule; "
    "adaptive_grad_clip(clipping) is a transformation",
    # Names that this package once had.
    "norm_heatmap": "plots.heatmap(norms, names)",
    "before_after": "plots.loss_curves(losses), with a dict of both runs",
}
"""What to use in place of a name from another library, or from another namespace of this package.

Case and underscores do not count, so `ClipGradByNorm` and `clip_grad_norm_` are found too.
"""


def put_signs(namespace: str) -> None:
    """Makes a module's `AttributeError` say where the name is that the user looks for.

    Python calls a module's `__getattr__` for names that the module lacks. It is set from here,
    because type checkers that saw it in the module would believe that the module has every name.
    """

    def look_up(name: str) -> Any:
        text = f"module {namespace!r} has no attribute {name!r}"
        sign = None if name.startswith("__") else _sign(namespace, name)
        if sign is None:
            raise AttributeError(text)
        text = f"{text}; here it is {sign}"
        # `from optaxclip import name` drops the text of an `AttributeError`. There Python's import
        # system asks first, but only a package.
        if sys._getframe(1).f_globals.get("__name__", "").endswith("_bootstrap"):
            raise ImportError(text, name=namespace)
        # With `obj=None`, Python does not propose the most similar name, which would mislead.
        raise AttributeError(text, name=name, obj=None)

    _NAMESPACES.append(namespace)
    vars(sys.modules[namespace])["__getattr__"] = look_up


def _sign(namespace: str, name: str) -> str | None:
    """What to use in place of a name; None if that is unknown."""
    known = {_folded(key): sign for key, sign in SIGNS.items()}
    here = f"{namespace.rpartition('.')[2]}.{name}"
    return known.get(_folded(here)) or known.get(_folded(name)) or _elsewhere(namespace, name)


def _elsewhere(here: str, name: str) -> str | None:
    """The place of a name in the package, even if case or underscores differ."""
    for namespace in (here, __name__.partition(".")[0], *_NAMESPACES):
        module = sys.modules[namespace]
        for offered in vars(module):
            if _folded(offered) == _folded(name) and _offers(module, offered):
                return f"{namespace}.{offered}"
    return None


def _offers(module: Any, name: str) -> bool:
    """Whether a module's name is public, and not one that the module imports."""
    owner = getattr(vars(module)[name], "__module__", None)
    is_own = owner == module.__name__
    if hasattr(module, "__path__"):
        is_own = is_own or str(owner).startswith(f"{module.__name__}.")
    return is_own and not name.startswith("_")


def _folded(name: str) -> str:
    return name.replace("_", "").lower()
