"""The transformations of the package, made with usual arguments, and what Optax has in their place.

They are found by what the package exports: a new one is among them by itself, and one that needs an
argument of a new name is an error here.
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
"""What required arguments are, by their names."""

NOT_CLIPS = {
    "clip_by": "the engine itself",
    "clip_attention_logits": "it needs weights of attention",
    "clip_by_spectral_norm": "matrix products, which Optax has in Muon",
    "per_example_clip_and_aggregate": "it takes examples (`benchmarks.per_example`)",
}


# The statistics of a record, and how they are measured: without the parameters, and with them.
OF_GRADIENTS = ("norm", "max", "mean_abs", "zero_fraction", "share")
OF_PARAMETERS = ("param_norm", "ratio", "cosine_param")

SGD = optax.sgd(1e-3)
GLOBAL: tuple[str, Step] = ("clip_by_global_norm", optax.clip_by_global_norm(1.0))


def every_method(inner: Step = SGD) -> dict[str, Step]:
    """All transformations by name, and some expressions over the engine that have no name.

    Args:
      inner: the optimizer in a skip.
    """
    named = {
        name: _made(fn, inner)
        for name, fn in vars(optaxclip).items()
        if _is_clip(fn) and name[0] != "_"
    }
    return named | {
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


def in_steps(
    optimizer: Callable[[], Step], params: Any
) -> dict[str, tuple[Step, tuple[str, Step] | None]]:
    """Each method in an optimizer's step, by name, and Optax's nearest with its name in one.

    `scale_by_stable_adam` is in the place of Adam. What Optax has nothing for has None.
    """
    found: dict[str, tuple[Step, tuple[str, Step] | None]] = {
        "clip_by_spectral_norm": (
            optax.chain(optaxclip.clip_by_spectral_norm(1.0), optimizer()),
            None,
        ),
    }
    for name, tx in every_method(optimizer()).items():
        theirs, optax_tx = nearest(name, tx, params, optimizer())
        behind = [] if _is_whole(name) else [optimizer()]
        if name == "scale_by_stable_adam":
            behind = [optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(1e-3)]
        found[name] = (
            optax.chain(tx, *behind),
            (theirs, optax.chain(optax_tx, *behind)),
        )
    return found


def _is_whole(name: str) -> bool:
    """Whether there is an optimizer in it."""
    return name.startswith("skip") or name == "scale_loss"


def nearest(name: str, tx: Step, params: Any, inner: Step = SGD) -> tuple[str, Step]:
    """What Optax has in the place of a method, with `inner` in a skip: its name and itself."""
    if _is_whole(name):
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


def _is_clip(fn: Any) -> bool:
    if not inspect.isfunction(fn) or fn.__name__ in NOT_CLIPS:
        return False
    return "Transformation[" in str(inspect.signature(fn).return_annotation)


def _made(fn: Callable[..., Step], inner: Step) -> Step:
    """The transformation with the arguments that it needs."""
    name = fn.__name__
    required = [
        parameter.name
        for parameter in inspect.signature(fn).parameters.values()
        if parameter.default is parameter.empty
    ]
    known: dict[str, Any] = {"inner": inner, **ARGUMENTS}
    if name == "skip_above":
        known = known | {"threshold": 1e3}
    missing = [argument for argument in required if argument not in known]
    if missing:
        raise ValueError(f"benchmarks.every_method: {name} needs {missing}; add them to ARGUMENTS")
    return fn(**{argument: known[argument] for argument in required})
