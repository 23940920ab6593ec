"""Rules, scopes and wrappers, one of each, for tests of what all of them must do."""

import functools

import jax
import jax.numpy as jnp
import optax
from methods_table import METHODS, label, stacked

import optaxclip
from optaxclip import monitor, per_example, scopes, thresholds
from optaxclip.monitor._record import STATISTICS

NUMBER = jnp.asarray(0.5)
RULES = {
    "constant": functools.partial(thresholds.constant, NUMBER),
    "schedule": functools.partial(thresholds.schedule, optax.linear_schedule(1.0, 0.5, 9)),
    "relative_to_params": functools.partial(thresholds.relative_to_params, NUMBER),
    "percentile": functools.partial(thresholds.percentile, window=4),
    "window": functools.partial(thresholds.window, window=4),
    "median": functools.partial(thresholds.median, window=4),
    "median_every_step": functools.partial(thresholds.median, window=4, every_step=True),
    "ema": functools.partial(thresholds.ema, target_ratio=NUMBER),
    "zscore": thresholds.zscore,
    "log_tracker": thresholds.log_tracker,
    "adagc": thresholds.adagc,
    "quantile": functools.partial(thresholds.quantile, init_threshold=NUMBER),
    "mean_over_rms": thresholds.mean_over_rms,
    "of a user": lambda: optaxclip.ThresholdRule(
        lambda norms: (norms, norms, NUMBER),
        lambda norms, state, _: (optaxclip.Thresholds(norms, norms), state),
    ),
}
SCOPES = {
    "tree": scopes.tree(),
    "group": scopes.group(label),
    "leaf": scopes.leaf(stacked),
    "axes": scopes.axes(0),
    "unit": scopes.unit(),
    "muon": scopes.muon(),
}
QUANTILE = per_example.quantile_threshold(init_threshold=NUMBER, count_noise=2.0)
WRAPPERS = {
    "skip_nonfinite": optaxclip.skip_nonfinite(optax.sgd(0.1, momentum=0.9)),
    "skip_above": optaxclip.skip_above(
        optax.sgd(0.1, momentum=0.9), thresholds.quantile(init_threshold=NUMBER)
    ),
    "scale_loss": optaxclip.scale_loss(optax.sgd(0.1, momentum=0.9), initial=1.0),
    "record": monitor.record(4),
    "record_per_leaf": monitor.record(4, scope=scopes.leaf()),
    "record_ratio": monitor.record(4, stats="ratio"),
    "record_stats": monitor.record(4, scope=scopes.leaf(stacked), stats=tuple(STATISTICS)),
    "histogram": monitor.histogram(2),
    "histogram_of_params": monitor.histogram(4, scope=scopes.leaf(stacked), of="params"),
    "events": monitor.events(
        optaxclip.skip_above(
            optax.chain(optaxclip.clip_by_norm(0.5), optax.sgd(0.1, momentum=0.9)),
            thresholds.quantile(init_threshold=NUMBER),
        ),
        4,
    ),
    "per_example": optaxclip.per_example_clip_and_aggregate(1.0, 1.0, jax.random.key(0)),
    "per_example_quantile": optaxclip.per_example_clip_and_aggregate(QUANTILE, 1.0, key=0),
}
TRANSFORMATIONS = {name: method.make() for name, method in METHODS.items()} | WRAPPERS
