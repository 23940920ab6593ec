"""For functions and their arguments, values that each argument refuses by its name."""

import math

import jax.numpy as jnp
import numpy as np

NO_STEPS = [0, 1.5, jnp.int32(4)]
NO_THRESHOLDS = [-1.0, math.nan, "a"]
WRONG_VALUES = {
    "clip_by_moving_max": {"decay": [-0.1, 2, None], "stacked": [jnp.int32(1)]},
    "clip_by_second_moment": {
        "decay": [1.5],
        "reset_every": NO_STEPS,
        "threshold": NO_THRESHOLDS,
        "warmup_steps": [-1],
    },
    "clip_by_spectral_norm": {
        "threshold": [*NO_THRESHOLDS, np.ones(2)],
        "iterations": [0, 2.5, jnp.int32(3)],
        "mode": ["medium"],
        "nonfinite": ["no"],
        "stacked": [jnp.int32(1)],
    },
    "norms.lp": {"p": [0, -1, 64.5, 65, math.nan, -math.inf]},
    "normalize_by_norm_history": {"eps": [-1], "mean_decay": [2.0], "square_decay": [-1]},
    "per_example.quantile_threshold": {
        "target": [-1.0, math.nan, 1.5],
        "count_noise": [-1.0, math.nan],
        "init_threshold": [-1.0, math.nan],
        "learning_rate": [-1.0, math.nan],
        "max_threshold": [-1.0, math.nan],
        "min_threshold": [-1.0, math.nan],
    },
    "responses.auto_s": {"gamma": [-1.0, math.inf, math.nan]},
    "responses.band": {
        "low": [-0.1, 1.5, math.nan, "a", jnp.float32(0.5)],
        "max_factor": [-1.0, math.nan],
        "min_factor": [-1, math.inf],
    },
    "skip_above": {
        "threshold": [*NO_THRESHOLDS, None, np.ones(2)],
        "max_consecutive": [0, -1, 1.5, "a"],
        "norm": ["l3"],
    },
    "thresholds.adagc": {
        "beta": [1.1],
        "lambda_abs": [-1.0],
        "lambda_rel": [-1.0],
        "warmup_steps": [-1],
    },
    "thresholds.ema": {
        "decay": [-0.1, 1.1, "a"],
        "ratio": [-1.0],
        "record": ["all"],
        "skip_steps": [-1],
        "target_decay": [1.1],
        "target_ratio": [-1.0],
    },
    "thresholds.log_tracker": {"decay": [1.1], "min_threshold": [-1.0], "num_std": [-1.0]},
    "thresholds.mean_over_rms": {"eps": [-1.0], "mean_decay": [1.1], "square_decay": [1.1]},
    "thresholds.median": {"scale": [-1.0], "window": [0]},
    "thresholds.percentile": {"percentile": [-1.0, 101.0, "a"], "window": [0, 2.5, None]},
    "thresholds.quantile": {"init_threshold": [-1.0], "learning_rate": [-1.0], "target": [1.1]},
    "thresholds.relative_to_params": {"eps": [-1.0], "ratio": [-1.0]},
    "thresholds.window": {
        "ddof": [2, -1],
        "min_std": [-1.0],
        "num_std": [-1.0],
        "window": [1, 2.5],
    },
    "thresholds.zscore": {
        "alpha": [1.1],
        "floor": [-1.0, math.nan],
        "max_norm": [-1.0, np.ones(2)],
        "option": ["median"],
        "patience": [0, -1],
        "warmup_steps": [-1, "a"],
        "z_thresh": [-1.0],
    },
}
