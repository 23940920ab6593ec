"""The published threshold rules in float64 NumPy, step by step as their papers and code have them.

Each takes the norms of all steps and returns a `Trace`. `CASES` has them beside ours, `RULES` holds
a rule of every kind, `drive` and `run` show what a rule does; and helpers for trees of results.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip import ThresholdRule, thresholds


class Trace(NamedTuple):
    """One entry per step: the thresholds, and what the rule knows after the step."""

    trigger: Any
    target: Any
    mean: Any = None
    variance: Any = None


def factors(norms, trigger, target):
    """What clipping multiplies by."""
    return np.where(norms > trigger, np.minimum(target / np.where(norms > 0, norms, 1), 1), 1)


def _traced(rows):
    return Trace(*(np.array(column) for column in zip(*rows, strict=True)))


def percentile(norms, percent, window, *, inclusive, needed):
    rows = []
    for t in range(len(norms)):
        seen = norms[: t + 1] if inclusive else norms[:t]
        threshold = np.percentile(seen[-window:], percent) if len(seen) >= needed else np.inf
        rows.append((threshold, threshold))
    return _traced(rows)


def scaled_adam(norms, scale, period):
    ring, threshold, rows = np.zeros(period), np.inf, []
    for step, n in enumerate(norms):
        ring[step % period] = n if step else 0.0
        early = step in (10, 20, 40) and step < period
        if step and (early or step % period == 0):
            values = np.sort(ring)[-step:] if early else np.sort(ring)
            m = len(values)
            threshold = (1 + early) * scale * values[min(m - 1, m // 4 * 2)]
        rows.append((threshold, threshold))
    return _traced(rows)


def window(norms, num_std, size, *, ddof, min_std, needed):
    rows = []
    for t in range(len(norms)):
        past, threshold = norms[max(0, t - size) : t], np.inf
        if t >= needed:
            threshold = np.mean(past) + num_std * max(np.std(past, ddof=ddof), min_std)
        rows.append((threshold, threshold))
    return _traced(rows)


def zclip(norms, warmup=25, cap=math.inf, option="adaptive", record="clipped", z_thresh=2.5):
    alpha, rows = 0.97, []
    mean = variance = math.nan
    for t, n in enumerate(norms):
        trigger = target = math.inf
        if t < warmup:
            mean, variance = np.mean(norms[: t + 1]), np.var(norms[: t + 1])
        else:
            std = math.sqrt(variance)
            z = (n - mean) / (std + 1e-6)
            trigger = mean + z_thresh * (std if option == "percentile" else std + 1e-6)
            adaptive = mean + z_thresh * std / (max(z, z_thresh) / z_thresh)
            target = {"adaptive": adaptive, "mean": mean, "percentile": trigger}[option]
            if not (n > trigger and record == "accepted"):
                x = target if n > trigger else n
                mean = alpha * mean + (1 - alpha) * x
                variance = alpha * variance + (1 - alpha) * (x - mean) ** 2
        target = min(target if n > trigger else math.inf, cap)
        rows.append((min(trigger, cap), target, mean, variance))
    return _traced(rows)


def adagc(norms, relative=1.05, absolute=1.0, beta=0.98, warmup=100):
    """For norms [steps, groups]."""
    gamma, rows = np.full(np.shape(norms)[1], np.inf), []
    for t, n in enumerate(np.asarray(norms)):
        if t < warmup:
            threshold = absolute / np.linalg.norm(n) * n  # which acts if it is below the norm
            gamma = np.minimum(gamma, np.minimum(threshold, n))
        else:
            threshold = relative * gamma
            gamma = beta * gamma + (1 - beta) * np.minimum(n, threshold)
        rows.append((threshold, threshold, gamma))
    return _traced(rows)


def olmo(norms, ratio=2.0, beta=0.95):
    e, rows = None, []
    for t, n in enumerate(norms):
        threshold = ratio * (n if e is None else e)
        if t > 0:
            e = n if e is None else e
            e += (1 - beta) * (min(n, threshold) - e)
        rows.append((threshold, threshold, np.nan if e is None else e))
    return _traced(rows)


def two_averages(norms, decay=0.99, ratio=2.0, target_decay=0.9, target_ratio=1.1):
    """PDE-Transformer's, but for the placeholders of its first step."""
    slow = fast = 0.0
    rows = []
    for t, n in enumerate(norms):
        if t == 0:
            trigger, target = ratio * n, target_ratio * n
        else:
            trigger = ratio * slow / (1 - decay**t)
            target = target_ratio * fast / (1 - target_decay**t)
        x = target if n > trigger else n
        slow = decay * slow + (1 - decay) * x
        fast = target_decay * fast + (1 - target_decay) * x
        rows.append((trigger, target, slow / (1 - decay ** (t + 1))))
    return _traced(rows)


def axlearn(norms, decay, multiplier, min_count=None):
    """Of the mean, or with `min_count` of the deviation; the first mean is the first norm."""
    mean = square = norms[0]
    count, rows = 0, []
    for n in norms:
        threshold = multiplier * mean
        if min_count is not None:
            std = math.sqrt(max(square - mean**2, 0)) if count else 0.0
            threshold = mean + multiplier * std if count >= min_count else np.inf
        if n <= threshold:
            d = decay * (1 - decay**count) / (1 - decay ** (count + 1))
            mean, square = d * mean + (1 - d) * n, d * square + (1 - d) * n**2
            count += 1
        rows.append((threshold, threshold, mean, square - mean**2))
    return _traced(rows)


def lingvo(norms, decay=0.995, num_std=4.0):
    m = s = w = 0.0
    rows = []
    for n in norms:
        mean = m / max(w, 1e-6)
        cap = max(mean + num_std * math.sqrt(max(s / max(w, 1e-6) - mean**2, 1e-6)), 0.0)
        x = min(math.log(1 + max(n, 0.01)), cap)
        rows.append((math.exp(cap) - 1 if w > 0.75 else np.inf, 0.0))
        m, s, w = (decay * old + (1 - decay) * new for old, new in ((m, x), (s, x * x), (w, 1)))
    return _traced(rows)


def mean_over_rms(norms, mean_decay=0.7, square_decay=0.9, eps=1e-8):
    mean = square = 0.0
    rows = []
    for t, n in enumerate(norms, 1):
        mean = mean_decay * mean + (1 - mean_decay) * n
        square = square_decay * square + (1 - square_decay) * n**2
        means = mean / (1 - mean_decay**t), math.sqrt(square / (1 - square_decay**t))
        threshold = means[0] / (means[1] + eps)
        rows.append((threshold, threshold, *means))
    return _traced(rows)


def andrew(norms, target, rate, threshold, *, geometric=True):
    rows = []
    for n in norms:
        step = -rate * (float(n <= threshold) - target)
        after = threshold * math.exp(step) if geometric else max(0.0, threshold + step)
        rows.append((threshold, threshold, after))
        threshold = after
    return _traced(rows)


class Case(NamedTuple):
    """A rule of ours and what it follows, from norms to `Trace`."""

    make: functools.partial[ThresholdRule]
    reference: Callable[[Any], Trace]

    @property
    def rule(self):
        """Our rule."""
        return self.make()


_PUBLISHED: Any = {"patience": None, "floor": 0.0}


def _autoclip(percent, window=1000):
    options = {"inclusive": True, "warmup_steps": 0, **_PUBLISHED}
    rule = functools.partial(thresholds.percentile, percent, window, **options)
    return Case(rule, lambda n: percentile(n, percent, window, inclusive=True, needed=1))


def _trellis(cap=math.inf):
    rule = functools.partial(thresholds.percentile, 95.0, 4, max_norm=cap, **_PUBLISHED)

    def reference(norms):
        return Trace(*np.minimum(percentile(norms, 95.0, 4, inclusive=False, needed=4)[:2], cap))

    return Case(rule, reference)


def _scaled_adam(period):
    return Case(
        functools.partial(thresholds.median, 2.0, period, floor=0.0),
        lambda n: scaled_adam(n, 2.0, period),
    )


def _zclip(warmup=3, cap=math.inf, **options):
    rule = functools.partial(
        thresholds.zscore, warmup_steps=warmup, max_norm=cap, **options, **_PUBLISHED
    )
    return Case(rule, lambda n: zclip(n, warmup, cap, **options))


def _adagc(relative, beta):
    rule = functools.partial(thresholds.adagc, relative, beta=beta, warmup_steps=3, **_PUBLISHED)
    return Case(rule, lambda n: adagc(n, relative, 1.0, beta, 3))


def _window(num_std, size, needed, **options):
    rule = functools.partial(
        thresholds.window, num_std, size, warmup_steps=needed, **options, **_PUBLISHED
    )
    return Case(rule, lambda n: window(n, num_std, size, needed=needed, **options))


def _ema(reference, *numbers, **options):
    return Case(functools.partial(thresholds.ema, *numbers, **options, **_PUBLISHED), reference)


def _axlearn_std():
    options: Any = {"option": "percentile", "debias": True, "record": "accepted"}
    rule = functools.partial(thresholds.zscore, 0.9, 2.0, 3, **options, **_PUBLISHED)
    return Case(rule, lambda n: axlearn(n, 0.9, 2.0, min_count=3))


def _quantile(*numbers, geometric=True):
    rule = functools.partial(thresholds.quantile, *numbers, geometric=geometric, floor=0.0)
    return Case(rule, lambda n: andrew(n, *numbers, geometric=geometric))


CASES = {
    "AutoClip p10": _autoclip(10.0),
    "AutoClip p50": _autoclip(50.0),
    "AutoClip p80 window 4": _autoclip(80.0, 4),
    "AutoClip p0": _autoclip(0.0),
    "AutoClip p100": _autoclip(100.0),
    "TRELLIS": _trellis(),
    "TRELLIS cap 1": _trellis(1.0),
    "ScaledAdam": _scaled_adam(4),
    "ScaledAdam ramp": _scaled_adam(100),
    "ZClip": _zclip(),
    "ZClip cap 1": _zclip(cap=1.0),
    "ZClip mean": _zclip(option="mean"),
    "ZClip percentile": _zclip(option="percentile"),
    "ZClip spikes skipped": _zclip(record="accepted"),
    "ZClip warm-up 25": _zclip(25),
    "AdaGC .98 1.05": _adagc(1.05, 0.98),
    "AdaGC .99 1.04": _adagc(1.04, 0.99),
    "OLMo": _ema(lambda n: olmo(n, 1.5), 0.95, 1.5, skip_steps=1),
    "PDE-Transformer": _ema(
        two_averages, 0.99, 2.0, target_decay=0.9, target_ratio=1.1, debias=True
    ),
    "Levanter": _window(3.0, 4, 2, ddof=0, min_std=1e-6),
    "OLMo-core": _window(2.0, 6, 2, ddof=1, min_std=0.0),
    "Lingvo": Case(functools.partial(thresholds.log_tracker, floor=0.0), lingvo),
    "axlearn mean": _ema(lambda n: axlearn(n, 0.9, 2.0), 0.9, 2.0, debias=True, record="accepted"),
    "axlearn stddev": _axlearn_std(),
    "Stable-SPAM": Case(functools.partial(thresholds.mean_over_rms, floor=0.0), mean_over_rms),
    "quantile": _quantile(0.5, 0.2, 1.0),
    "quantile down": _quantile(0.0, 1.0, 10.0, geometric=False),
    "quantile up": _quantile(1.0, 1.0, 0.0, geometric=False),
    "quantile halved": _quantile(0.0, math.log(2), 16.0),
    "quantile doubled": _quantile(1.0, math.log(2), 0.5),
}
"""By the names of the sequences in the specification."""

# Small windows and warm-ups, so that 60 norms see every stage of a rule.
RULES = {
    "percentile": functools.partial(thresholds.percentile, 80.0, 6, warmup_steps=3),
    "autoclip": functools.partial(thresholds.percentile, 10.0, 6, inclusive=True, warmup_steps=0),
    "median": functools.partial(thresholds.median, 1.2, 50),
    "median of 4": functools.partial(thresholds.median, 1.2, 4),
    "median, every step": functools.partial(thresholds.median, 1.2, 6, every_step=True),
    "window": functools.partial(thresholds.window, 2.0, 6),
    "ema": functools.partial(thresholds.ema, 0.9, 1.3),
    "ema, second step": functools.partial(thresholds.ema, 0.95, 1.5, skip_steps=1),
    "two averages": functools.partial(thresholds.ema, 0.99, 1.5, target_decay=0.9, debias=True),
    "zscore": functools.partial(thresholds.zscore, warmup_steps=5),
    "zscore, accepted": functools.partial(thresholds.zscore, 0.9, 2.0, 3, record="accepted"),
    "zscore, debiased": functools.partial(thresholds.zscore, 0.9, 2.0, 3, debias=True),
    "log tracker": functools.partial(thresholds.log_tracker, 0.9, 2.0),
    "adagc": functools.partial(thresholds.adagc, warmup_steps=5),
    "quantile": functools.partial(thresholds.quantile, init_threshold=1.0),
    "quantile, arithmetic": functools.partial(thresholds.quantile, geometric=False),
}


def random_norms(seed, steps, *groups):
    """Lognormal norms, one in ten of them a spike."""
    rng = np.random.default_rng(seed)
    shape = (steps, *groups)
    spikes = np.where(rng.random(shape) < 0.1, rng.uniform(2, 20, shape), 1)
    return np.float32(np.exp(0.3 * rng.normal(size=shape)) * spikes)


@jax.jit
def drive(rule, norms):
    """Triggers, targets and states of all steps, for norms with a leading axis of steps."""

    def step(state, norm):
        threshold_values, state = rule.update(norm, state, None)
        return state, (*threshold_values, state)

    return jax.lax.scan(step, rule.init(zeros_like_step(norms)), norms)[1]


def run(rule, norms):
    """The same, step by step."""
    state, rows = rule.init(zeros_like_step(norms)), []
    for i in range(len(jax.tree.leaves(norms)[0])):
        threshold_values, state = _step(rule, at(norms, i), state)
        rows.append((*threshold_values, state))
    return stack(rows)


@jax.jit
def _step(rule, norms, state):
    return rule.update(norms, state, None)


def at(sequence, i):
    return jax.tree.map(lambda x: x[i], sequence)


def zeros_like_step(norms):
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), norms)


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def assert_same(actual, expected, check=np.testing.assert_array_equal):
    dtypes = [jax.tree.map(lambda x: x.dtype, tree) for tree in (actual, expected)]
    assert dtypes[0] == dtypes[1]
    jax.tree.map(check, actual, expected)


def assert_close(actual, expected):
    assert_same(
        actual, expected, functools.partial(np.testing.assert_allclose, rtol=5e-6, atol=1e-7)
    )


def no_nan(tree):
    return not any(np.any(np.isnan(x)) for x in jax.tree.leaves(tree))
