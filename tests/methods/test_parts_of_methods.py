"""A named method is one expression over the engine: its program is that of these parts."""

import functools

import jax
import jax.numpy as jnp
import pytest

import optaxclip
from optaxclip import clip_by, responses, scopes, thresholds

GRADS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
OPTIONS = {"norm": "l1", "nonfinite": "zero", "strict": True}
FLOOR, PATIENCE, CAP = {"floor": 0.25}, {"patience": 5}, {"max_norm": 7.0}
ZSCORE = {"alpha": 0.9, "z_thresh": 2.0, "warmup_steps": 3, "option": "mean", **FLOOR, **PATIENCE}
ADAGC = {"lambda_rel": 1.5, "lambda_abs": 3.0, "beta": 0.5, "warmup_steps": 3, **FLOOR, **PATIENCE}
QUANTILE = {
    "target": 0.75,
    "learning_rate": 0.5,
    "init_threshold": 2.0,
    "geometric": False,
    **FLOOR,
}
EMA = {"ratio": 3.0, "decay": 0.5, **FLOOR, **PATIENCE, **CAP}
HISTORY = {"mean_decay": 0.5, "square_decay": 0.75, "eps": 0.125, **FLOOR}


def by(scope, threshold, **options):
    return functools.partial(clip_by, scope, threshold, **options)


# Each argument of a method that differs from its default, and the same by its parts.
PROGRAMS = {
    "zclip": (ZSCORE | CAP, by(scopes.tree(), thresholds.zscore(**ZSCORE, **CAP))),
    "adagc": (ADAGC, by(scopes.leaf(), thresholds.adagc(**ADAGC))),
    "clip_by_quantile": (QUANTILE, by(scopes.tree(), thresholds.quantile(**QUANTILE))),
    "clip_by_ema_norm": (EMA, by(scopes.leaf(), thresholds.ema(**EMA, skip_steps=1))),
    "autoclip": (
        {"percentile": 60.0, "window": 4, **FLOOR, **CAP},
        by(
            scopes.tree(),
            thresholds.percentile(60.0, 4, inclusive=True, warmup_steps=0, **FLOOR, **CAP),
        ),
    ),
    "clip_by_median_norm": (
        {"scale": 3.0, "window": 4, **FLOOR, **CAP},
        by(scopes.tree(), thresholds.median(3.0, 4, **FLOOR, **CAP)),
    ),
    "clip_by_window_norm": (
        {"num_std": 2.0, "window": 4, **FLOOR, **CAP},
        by(scopes.tree(), thresholds.window(2.0, 4, **FLOOR, **CAP)),
    ),
    "normalize_by_norm_history": (
        HISTORY | {"stacked": 1},
        by(scopes.leaf(1), thresholds.mean_over_rms(**HISTORY), response="normalize"),
    ),
    "clip_by_norm": ({"max_norm": 3.0, "axes": -1}, by(scopes.axes(-1), 3.0)),
    "clip_by_global_norm": (
        {"max_norm": 3.0, "eps": 0.5},
        by(scopes.tree(), 3.0, response=responses.clip_with_eps(0.5)),
    ),
    "adaptive_grad_clip": (
        {"clipping": 0.5, "eps": 0.25, "axis": -1},
        by(scopes.unit(-1), thresholds.relative_to_params(0.5, 0.25)),
    ),
    "clip_by_group_norm": (
        {"max_norm": {"x": 3.0, "y": thresholds.ema()}, "labels": {"w": "x", "b": "y"}},
        by(scopes.group({"w": "x", "b": "y"}), {"x": 3.0, "y": thresholds.ema()}),
    ),
    "normalize_by_global_norm": (
        {"norm": 3.0, "known_norm": "size"},
        by(scopes.tree(), 3.0, norm="l2", response="normalize", known_norm="size"),
    ),
    "clip_by_block_rms": (
        {"threshold": 3.0, "stacked": 1},
        by(scopes.leaf(1), 3.0, norm="rms"),
    ),
}
OF_ITS_OWN_NORM = ("normalize_by_global_norm", "clip_by_block_rms")


@pytest.mark.parametrize("name", PROGRAMS)
def test_named_methods_compile_to_same_program_as_parts(name):
    arguments, parts = PROGRAMS[name]
    options = {k: v for k, v in OPTIONS.items() if not (k == "norm" and name in OF_ITS_OWN_NORM)}
    own, same = (make(**options) for make in (method(name, arguments), parts))
    assert program(own) == program(same)


def method(name, arguments):
    return functools.partial(getattr(optaxclip, name), **arguments)


def program(tx):
    def steps(grads):
        state = tx.init(grads)
        return tx.update(grads, state, grads, size=jnp.float32(2))

    return str(jax.make_jaxpr(steps)(GRADS))
