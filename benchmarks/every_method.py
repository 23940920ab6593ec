"""Builds all public transformations with typical arguments, and the closest methods of Optax.

New transformations are included automatically. A required argument with an unknown name is an
error.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip
from optaxclip import monitor, scopes, thresholds

Step = optax.GradientTransformation

ARGUMENTS: dict[str, Any] = {
    "max_delta": 1e-2,
    "min_value": -1e-2,
    "max_value": 1e-2,
    "max_norm": 1.0,
    "threshold": 1e-3,
    "clipping": 0.01,
    "labels": lambda path, leaf: "matrix" if jnp.ndim(leaf) == 2 else "vector",
    "c": 1.0,
}
"""The values of required arguments."""

NOT_CLIPS = {
    "clip_by": "the engine itself",
    "clip_attention_logits": "it needs weights of attention",
    "clip_by_spectral_norm": "matrix products, which Optax has in Muon",
    "per_example_clip_and_aggregate": "it takes examples (`benchmarks.per_example`)",
}


# The statistics of `monitor.record` that need only gradients, and those that need parameters.
OF_GRADIENTS = ("norm", "max", "mean_abs", "zero_fraction", "share")
OF_PARAMETERS = ("param_norm", "ratio", "cosine_param")

SGD = optax.sgd(1e-3)
GLOBAL: tuple[str, Step] = ("clip_by_global_norm", optax.clip_by_global_norm(1.0))


def build_methods(inner: Step = SGD) -> dict[str, Step]:
    """Builds all transformations by name, and some expressions, with `inner` in skips."""
    methods = {
        name: _build_method(fn, inner)
        for name, fn in vars(optaxclip).items()
        if _is_transformation(fn) and name[0] != "_"
    }
    return methods | {
        "z-score by leaf": optaxclip.clip_by(scopes.leaf(), thresholds.zscore()),
        "record": monitor.record(100),
        "record by leaf": monitor.record(100, scope=scopes.leaf()),
        "record, of the gradients all": monitor.record(100, stats=OF_GRADIENTS),
        "record, all": monitor.record(100, stats=(*OF_GRADIENTS, *OF_PARAMETERS)),
        "record by leaf, all": monitor.record(
            100, scope=scopes.leaf(), stats=(*OF_GRADIENTS, *OF_PARAMETERS)
        ),
        "skip, zclip": optaxclip.skip_nonfinite(optax.chain(optaxclip.zclip(), inner)),
    }


def build_method_steps(
    optimizer: Callable[[], Step], params: Any
) -> dict[str, tuple[Step, tuple[str, Step] | None]]:
    """Builds steps of all methods, with the name and step of the closest Optax method or None.

    `scale_by_stable_adam` replaces Adam.
    """
    steps: dict[str, tuple[Step, tuple[str, Step] | None]] = {
        "clip_by_spectral_norm": (
            optax.chain(optaxclip.clip_by_spectral_norm(1.0), optimizer()),
            None,
        )
    }
    for name, tx in build_methods(optimizer()).items():
        optax_name, optax_tx = find_optax_method(name, tx, params, optimizer())
        following = [] if _wraps_optimizer(name) else [optimizer()]
        if name == "scale_by_stable_adam":
            following = [optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(1e-3)]
        steps[name] = (optax.chain(tx, *following), (optax_name, optax.chain(optax_tx, *following)))
    return steps


def _wraps_optimizer(name: str) -> bool:
    """Returns `True` if the method wraps an optimizer."""
    return name.startswith("skip") or name == "scale_loss"


def find_optax_method(name: str, tx: Step, params: Any, inner: Step = SGD) -> tuple[str, Step]:
    """Returns the name and the transformation of the closest Optax method."""
    if _wraps_optimizer(name):
        clip = optax.clip_by_global_norm(1.0) if "zclip" in name else optax.identity()
        return "apply_if_finite", optax.apply_if_finite(optax.chain(clip, inner), 5)
    if name.startswith("record"):
        by_leaf = optax.clip_by_block_rms(1e-3)
        return ("clip_by_block_rms", by_leaf) if "by leaf" in name else GLOBAL
    if name == "adaptive_grad_clip":
        return name, optax.adaptive_grad_clip(0.01)
    if name in WITH_MOMENTS:
        return WITH_MOMENTS[name]
    state = jax.eval_shape(tx.init, params)
    norms = getattr(getattr(state, "info", state), "norm", None)
    if norms is None:
        return "clip", optax.clip(1e-2)
    if len(jax.tree.leaves(params)) > 1 and norms.shape[-1:] == (len(jax.tree.leaves(params)),):
        return "clip_by_block_rms", optax.clip_by_block_rms(1e-3)
    return GLOBAL


WITH_MOMENTS: dict[str, tuple[str, Step]] = {
    "clip_by_second_moment": ("scale_by_rms", optax.scale_by_rms()),
    "scale_by_stable_adam": (
        "scale_by_adam, clip_by_block_rms",
        optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(1.0)),
    ),
}


def _is_transformation(fn: Any) -> bool:
    if not inspect.isfunction(fn) or fn.__name__ in NOT_CLIPS:
        return False
    return "Transformation[" in str(inspect.signature(fn).return_annotation)


def _build_method(fn: Callable[..., Step], inner: Step) -> Step:
    """Builds a transformation with its required arguments."""
    name = fn.__name__
    required = [
        parameter.name
        for parameter in inspect.signature(fn).parameters.values()
        if parameter.default is parameter.empty
    ]
    known: dict[str, Any] = {"inner": inner, **ARGUMENTS}
    if name == "skip_above":
        known["threshold"] = 1e3
    missing = [argument for argument in required if argument not in known]
    if missing:
        raise ValueError(f"benchmarks.every_method: {name} needs {missing}; add them to ARGUMENTS")
    return fn(**{argument: known[argument] for argument in required})
