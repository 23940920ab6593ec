"""Arguments that no rule takes."""

import numpy as np
import pytest

from optaxclip import thresholds

BAD = [
    ("percentile", "percentile", [-1.0, 101.0, "a"]),
    ("percentile", "window", [0, 2.5, None]),
    ("window", "window", [1, 2.5]),
    ("window", "num_std", [-1.0]),
    ("window", "min_std", [-1.0]),
    ("window", "ddof", [2, -1]),
    ("median", "scale", [-1.0]),
    ("median", "window", [0]),
    ("ema", "decay", [-0.1, 1.1, "a"]),
    ("ema", "ratio", [-1.0]),
    ("ema", "target_decay", [1.1]),
    ("ema", "target_ratio", [-1.0]),
    ("ema", "skip_steps", [-1]),
    ("ema", "record", ["all"]),
    ("zscore", "alpha", [1.1]),
    ("zscore", "z_thresh", [-1.0]),
    ("zscore", "warmup_steps", [-1, "a"]),
    ("zscore", "option", ["median"]),
    ("zscore", "floor", [-1.0, float("nan")]),
    ("zscore", "patience", [0, -1]),
    ("zscore", "max_norm", [-1.0, np.ones(2)]),
    ("log_tracker", "decay", [1.1]),
    ("log_tracker", "num_std", [-1.0]),
    ("log_tracker", "min_limit", [-1.0]),
    ("adagc", "lambda_rel", [-1.0]),
    ("adagc", "lambda_abs", [-1.0]),
    ("adagc", "beta", [1.1]),
    ("adagc", "warmup_steps", [-1]),
    ("quantile", "target", [1.1]),
    ("quantile", "learning_rate", [-1.0]),
    ("quantile", "init_limit", [-1.0]),
    ("mean_over_rms", "mean_decay", [1.1]),
    ("mean_over_rms", "square_decay", [1.1]),
    ("mean_over_rms", "eps", [-1.0]),
]


@pytest.mark.parametrize(
    ("rule", "argument", "value"), [(*row[:2], value) for row in BAD for value in row[2]]
)
def test_an_error_names_the_argument(rule, argument, value):
    with pytest.raises((ValueError, TypeError), match=f"^{argument} must"):
        getattr(thresholds, rule)(**{argument: value})
