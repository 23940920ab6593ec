"""The numbers that a call without them stands for: mostly published ones, on which users build."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from public_names import public

import optaxclip
from optaxclip import accumulate, monitor, ops, per_example, responses, scopes, thresholds

FLOOR, PATIENCE, L2 = {"floor": 1e-8}, {"patience": 20}, {"norm": "l2"}
ADAGC = {"lambda_rel": 1.04, "lambda_abs": 1.0, "beta": 0.99, "warmup_steps": 100}
ADAGC |= FLOOR | PATIENCE
ZSCORE = {"alpha": 0.97, "z_thresh": 2.5, "warmup_steps": 25, "option": "adaptive"}
QUANTILE = {"target": 0.5, "learning_rate": 0.2, "init_threshold": 0.1, "geometric": True}
HISTORY = {"mean_decay": 0.7, "square_decay": 0.9, "eps": 1e-8, **FLOOR}
BY_ENGINE = {"nonfinite": "nan", "strict": False}
LIFTED = {"response": "clip", "split": "uniform"}

THRESHOLDS = {
    "adagc": ADAGC,
    "adaptive": {"warmup_steps": 0, **FLOOR, **PATIENCE},
    "ema": {
        "decay": 0.95,
        "ratio": 2.0,
        "debias": False,
        "skip_steps": 0,
        "warmup_steps": 0,
        "record": "clipped",
        "inclusive": False,
        **FLOOR,
        **PATIENCE,
    },
    "log_tracker": {"decay": 0.995, "num_std": 4.0, "min_threshold": 0.0, "reject": True, **FLOOR},
    "mean_over_rms": HISTORY,
    "median": {"scale": 2.0, "window": 100, "every_step": False, **FLOOR},
    "percentile": {
        "percentile": 95.0,
        "window": 1000,
        "record": "raw",
        "inclusive": False,
        **FLOOR,
        **PATIENCE,
    },
    "quantile": QUANTILE | FLOOR,
    "relative_to_params": {"eps": 1e-3},
    "window": {
        "num_std": 3.0,
        "window": 128,
        "ddof": 0,
        "min_std": 1e-6,
        "record": "raw",
        "inclusive": False,
        **FLOOR,
        **PATIENCE,
    },
    "zscore": {**ZSCORE, "debias": False, "record": "clipped", **FLOOR, **PATIENCE},
}
METHODS = {
    "adagc": ADAGC | L2,
    "adaptive_grad_clip": {"eps": 1e-3, **L2},
    "autoclip": {"percentile": 10.0, "window": 1000, **FLOOR, **L2},
    "clip_by": {**L2, "response": "clip"},
    "clip_by_block_rms": {},
    "clip_by_ema_norm": {"ratio": 2.0, "decay": 0.95, **FLOOR, **PATIENCE, **L2},
    "clip_by_global_norm": L2,
    "clip_by_group_norm": L2,
    "clip_by_median_norm": {"scale": 2.0, "window": 100, **FLOOR, **L2},
    "clip_by_moving_max": {"decay": 0.999, **FLOOR},
    "clip_by_norm": L2,
    "clip_by_quantile": QUANTILE | FLOOR | L2,
    "clip_by_window_norm": {"num_std": 3.0, "window": 128, **FLOOR, **L2},
    "clip_tree": {**L2, "response": "clip"},
    "normalize_by_global_norm": {"norm": 1.0},
    "normalize_by_norm_history": HISTORY | L2,
    "zclip": {**ZSCORE, **FLOOR, **PATIENCE, **L2},
}
OTHERS = [
    (
        accumulate.value_and_grad,
        {"argnums": 0, "batch_argnums": 1, "dtype": jnp.float32, "reject_rule": "nonfinite"},
    ),
    (monitor.events, {"window": 1000, **L2}),
    (monitor.dtype_fit, {"dtype": jnp.float16, "max_lost_fraction": 0.001}),
    (monitor.histogram, {"every": 100, "of": "updates"}),
    (monitor.json_line, {"top": 0}),
    (monitor.metrics, {"prefix": "", "top": 0}),
    (monitor.noise_scale, {"decay": 0.99}),
    (monitor.record, {"window": 1000, "stats": ("norm",), **L2}),
    (monitor.scalars, {"prefix": "", "top": 0}),
    (monitor.step_status, {"roll_back_after": 10}),
    (ops.clip_cotangent, {"nonfinite": "nan"}),
    (ops.global_norm, L2),
    (optaxclip.skip_nonfinite, {"max_consecutive": None}),
    (optaxclip.clip_attention_logits, {"tau": 100.0}),
    (
        optaxclip.clip_by_second_moment,
        {"threshold": 5000.0, "decay": 0.999, "warmup_steps": 20, "reset_every": None},
    ),
    (optaxclip.clip_by_spectral_norm, {"mode": "soft", "iterations": 10, "nonfinite": "nan"}),
    (
        optaxclip.scale_by_stable_adam,
        {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "clipping_threshold": 1.0, "nonfinite": "nan"},
    ),
    (
        optaxclip.scale_loss,
        {
            "initial": 2.0**15,
            "growth_interval": 2000,
            "factor": 2.0,
            "minimum": 1.0,
            "maximum": 2.0**24,
        },
    ),
    (optaxclip.skip_above, {"check": "gradients", "max_consecutive": 20, **L2}),
    (per_example.clip_sum, LIFTED),
    (per_example.clipped_grad, {"argnums": 0, "has_aux": False, "method": "vmap", **LIFTED}),
    (per_example.grad_norms, {"argnums": 0, "method": "ghost"}),
    (per_example.explain, {"argnums": 0}),
    (optaxclip.per_example_clip_and_aggregate, {"reduction": "mean", **LIFTED}),
    (per_example.noisy_mean, {"relation": "add_or_remove_one"}),
    (optaxclip.per_example_layer_norm_clip, {"uniform": True}),
    (
        per_example.quantile_threshold,
        {**QUANTILE, "count_noise": 0.0, "min_threshold": 0.0, "max_threshold": np.inf},
    ),
    (responses.auto_s, {"gamma": 0.01}),
    (responses.clip_with_eps, {"eps": 1e-6}),
    (responses.band, {"low": 1 / 3, "min_factor": 0.0, "max_factor": np.inf}),
    (scopes.leaf, {"stacked": 0}),
    (scopes.ensemble_member, {"axis": 0}),
    (scopes.unit, {"axis": None, "stacked": 0}),
]
CASES = [
    *((getattr(thresholds, name), numbers) for name, numbers in THRESHOLDS.items()),
    *((getattr(optaxclip, name), numbers | BY_ENGINE) for name, numbers in METHODS.items()),
    *OTHERS,
]


@pytest.mark.parametrize(("function", "numbers"), CASES)
def test_defaults_match_published_values(function, numbers):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in numbers} == numbers


def is_plain(default):
    return default is None or isinstance(default, bool)


def test_default_table_covers_all_public_defaults():
    checked = {}
    for function, numbers in CASES:
        checked.setdefault(function, set()).update(numbers)
    for name, function in public().items():
        if inspect.isfunction(function) and not name.startswith("plots."):  # which change looks
            parameters = inspect.signature(function).parameters.values()
            found = {
                x.name for x in parameters if x.default is not x.empty and not is_plain(x.default)
            }
            assert found - checked.get(function, set()) <= {"name"}, name
