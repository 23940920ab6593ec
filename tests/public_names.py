"""What the package offers, found by its `__all__`: tables and pages are compared with it."""

import inspect

import optaxclip
from optaxclip import scopes

INNER = {"inner": optaxclip.scale_by_stable_adam()}
GIVEN = {
    "adaptive_grad_clip": {"clipping": 0.1},
    "clip": {"max_delta": 1.0},
    "clip_attention_logits": {"heads": lambda path, leaf: optaxclip.Heads(-1)},
    "clip_by": {"scope": scopes.tree(), "threshold": 1.0},
    "clip_by_block_rms": {"threshold": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_group_norm": {"max_norm": 1.0, "labels": "a"},
    "clip_by_norm": {"max_norm": 1.0},
    "clip_by_spectral_norm": {"threshold": 1.0},
    "clip_by_value": {"min_value": -1.0, "max_value": 1.0},
    "per_example_clip_and_aggregate": {
        "threshold": 1.0,
        "noise_multiplier": 1.0,
        "key": 0,
        "scope": scopes.leaf(),
    },
    "scale_loss": INNER,
    "skip_above": INNER | {"threshold": 1.0},
    "skip_nonfinite": INNER,
    "thresholds.relative_to_params": {"ratio": 0.1},
}
"""What functions must be given: arguments without a default, and what options need to act."""


def public():
    """The public functions, classes and constants by name, those of the namespaces too."""
    found = {}
    for name in (name for name in dir(optaxclip) if not name.startswith("_")):
        value = getattr(optaxclip, name)
        found |= members(name, value) if inspect.ismodule(value) else {name: value}
    return found


def members(name, module):
    """What a namespace offers: all of a package, of a file what it does not import."""
    whole = hasattr(module, "__path__")
    return {
        f"{name}.{key}": value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and not inspect.ismodule(value)
        and (whole or getattr(value, "__module__", None) == module.__name__)
    }
