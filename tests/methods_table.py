"""Every transformation, one line each, for the tests that all of them must pass.

Trees to go with them have three leaves: a matrix `w` and two vectors `b` and `v`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip
from optaxclip import norms, responses, scopes, thresholds


class Method(NamedTuple):
    """A transformation and what the contract must know about it.

    Attributes:
      factory: makes the transformation.
      hyper: the factory's argument that bounds the gradients, and a value that clips some.
      fixed: further arguments.
      shares: which entries become NaN together; `column` and `row` only tell in `w`, and `step`
        says that all become 0; None where weights are what is clipped.
      needs_params: whether the update needs them.
      has_info: whether the state is a `ClipState`.
      has_memory: whether the result depends on the norms of earlier steps.
      keeps_first: whether it depends on what `init` measured.
      counts: whether the result depends on the number of steps.
      keeps_small: whether small gradients come back bit for bit.
      widens: whether what comes in as float16 comes out as float32 if the weights are.
      atol: by how much results may differ that are summed in another order.
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    hyper: tuple[str, float]
    fixed: Mapping[str, Any] = {}
    shares: Literal["step", "tree", "label", "leaf", "row", "column", "entry"] | None = "tree"
    needs_params: bool = False
    has_info: bool = True
    has_memory: bool = False
    keeps_first: bool = False
    counts: bool = False
    keeps_small: bool = True
    widens: bool = False
    atol: float = 1e-7

    def make(self, threshold: Any = None, **options: Any) -> optax.GradientTransformationExtraArgs:
        """The transformation, with the threshold passed in or with a usual one."""
        name, usual = self.hyper
        return self.factory(
            **{name: usual if threshold is None else threshold}, **self.fixed, **options
        )


SHAPES = {"w": (6, 12), "b": (3,), "v": (4,)}


def random_tree(seed, *leading):
    """Leaves of different sizes, so that some groups exceed their threshold and some do not."""
    rng = np.random.default_rng(seed)
    sizes = {"w": rng.uniform(0.01, 1, (12,)), "b": 0.1, "v": 2.0}
    return {
        name: jnp.asarray(np.float32(sizes[name] * rng.normal(size=(*leading, *shape))))
        for name, shape in SHAPES.items()
    }


PARAMS, GRADS = random_tree(0), random_tree(1)


def at(sequence, i):
    """One of the trees that are stacked."""
    return jax.tree.map(lambda x: x[i], sequence)


def stack(trees):
    """Trees as one with a leading axis, in NumPy, as JAX would compile that for each shape."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def avals(tree):
    """Structure, shapes, dtypes and weak types."""

    def of_leaf(x):
        kind = x if hasattr(x, "weak_type") else jax.typeof(x)
        return kind.shape, kind.dtype, kind.weak_type

    return jax.tree.map(of_leaf, tree)


def assert_close(actual, expected, rtol=2e-6, atol=1e-7):
    assert avals(actual) == avals(expected)
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


def assert_same(actual, expected):
    assert avals(actual) == avals(expected)
    chex.assert_trees_all_equal(actual, expected)


@contextlib.contextmanager
def compilations():
    """A list that grows by one with each compilation."""
    events = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def label(path: str, leaf: Any) -> str:
    """Matrices and vectors."""
    del leaf
    return "matrix" if path.split("/")[-1] == "w" else "vector"


def stacked(path: str, leaf: Any) -> int:
    """Each row of a matrix is a layer."""
    del leaf
    return 1 if path.split("/")[-1] == "w" else 0


def _between(max_value: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    return optaxclip.clip_by_value(-1.0, max_value, **options)


def _by_label(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    return optaxclip.clip_by_group_norm({"matrix": threshold, "vector": 0.7}, label, **options)


def _decayed(threshold: Any) -> Callable[[jax.Array], jax.Array]:
    def schedule(count: jax.Array) -> jax.Array:
        return jnp.asarray(threshold).astype(jnp.float32) * 0.9 ** count.astype(jnp.float32)

    return schedule


def _clip_scheduled(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    return optaxclip.clip(_decayed(threshold), **options)


def _norm_scheduled(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    return optaxclip.clip_by_norm(_decayed(threshold), **options)


def _share_of_weights(ratio: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    rule = thresholds.relative_to_params(ratio)
    return optaxclip.clip_by(scopes.leaf(), rule, norm="rms", **options)


def _engine(shares: Any, scope: scopes.Scope, threshold: float = 1.0, **options: Any) -> Method:
    """A combination that has no name of its own."""
    keeps_small = options.get("response", "clip") == "clip"
    hyper, fixed = ("threshold", threshold), {"scope": scope, **options}
    return Method(optaxclip.clip_by, hyper, fixed, shares, keeps_small=keeps_small)


def _z_score_of_units(z_thresh: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    rule = thresholds.zscore(z_thresh=z_thresh, warmup_steps=3)
    return optaxclip.clip_by(scopes.unit(), rule, **options)


def _beside_muon(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    spikes = thresholds.zscore(0.5, warmup_steps=3)
    return optaxclip.clip_by(scopes.muon(), {"muon": spikes, "adam": threshold}, **options)


def _skip_on_loss(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    rule = thresholds.window(6.0, 4)
    tx = optaxclip.skip_above(optax.identity(), threshold, loss_threshold=rule, **options)
    return optax.GradientTransformationExtraArgs(tx.init, functools.partial(tx.update, value=-1.0))


def _skip_of_clips(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    inner = optax.chain(optaxclip.clip_by_global_norm(threshold), optax.identity())
    return optaxclip.skip_nonfinite(inner, **options)


def _of_scaled_loss(threshold: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    """By the scale 1: others are in `tests/methods/test_loss_scaling.py`."""
    inner = optax.chain(optaxclip.clip_by_global_norm(threshold), optax.identity())
    return optaxclip.scale_loss(inner, initial=1.0, **options)


def _heads_of_columns(tau: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
    """Logits as large as the entries of `w`, each column of which is a head."""

    def heads(path: str, leaf: Any) -> optaxclip.Heads | None:
        return optaxclip.Heads(-1) if label(path, leaf) == "matrix" else None

    clip = optaxclip.clip_attention_logits(tau, heads=heads, **options)

    def update(updates, state, params=None, **extra):
        w = updates["w"]
        logits = {} if w is None else {"w": jnp.max(jnp.abs(w).astype(jnp.float32), axis=0)}
        return clip.update(updates, state, params, max_logits=logits, **extra)

    return optax.GradientTransformationExtraArgs(clip.init, update)


_per_entry = functools.partial(Method, shares="entry", has_info=False)
_per_leaf = functools.partial(Method, shares="leaf")
_per_label = functools.partial(Method, shares="label")
_per_column = functools.partial(Method, shares="column")
_history = functools.partial(Method, has_memory=True)
_MAX_NORM = ("max_norm", 1.0)
# In the warm-up the threshold of a leaf depends on the others, unless the gradients are below it.
_ADAGC = {"warmup_steps": 3, "lambda_abs": 50.0}
_SKIP = {"inner": optax.identity(), "max_consecutive": 20}

METHODS: dict[str, Method] = {
    "clip": _per_entry(optaxclip.clip, ("max_delta", 1.0)),
    "clip_scheduled": _per_entry(_clip_scheduled, ("threshold", 1.0), counts=True),
    "clip_by_value": _per_entry(_between, ("max_value", 0.5)),
    "clip_by_norm": _per_leaf(optaxclip.clip_by_norm, _MAX_NORM),
    "clip_by_norm_axes": _per_column(optaxclip.clip_by_norm, _MAX_NORM, {"axes": 0}),
    "clip_by_norm_scheduled": _per_leaf(_norm_scheduled, ("threshold", 1.0), counts=True),
    "clip_by_global_norm": Method(optaxclip.clip_by_global_norm, _MAX_NORM),
    "clip_by_global_norm_eps": Method(optaxclip.clip_by_global_norm, _MAX_NORM, {"eps": 1e-6}),
    "clip_by_block_rms": _per_leaf(optaxclip.clip_by_block_rms, ("threshold", 0.7)),
    "scale_by_stable_adam": _history(
        optaxclip.scale_by_stable_adam,
        ("clipping_threshold", 0.7),
        shares="leaf",
        has_info=False,
        keeps_small=False,
    ),
    "clip_attention_logits": Method(
        _heads_of_columns,
        ("tau", 1.0),
        {},
        None,
        needs_params=True,
        keeps_small=False,
        atol=5e-7,  # a difference of weights, which are up to 3
    ),
    "adaptive_grad_clip": _per_column(
        optaxclip.adaptive_grad_clip, ("clipping", 0.7), needs_params=True
    ),
    "clip_by_group_norm": _per_label(optaxclip.clip_by_group_norm, _MAX_NORM, {"labels": label}),
    "clip_by_group_norm_dict": _per_label(_by_label, ("threshold", 1.0)),
    "normalize_by_global_norm": Method(
        optaxclip.normalize_by_global_norm, ("norm", 1.0), keeps_small=False
    ),
    "autoclip": _history(optaxclip.autoclip, ("percentile", 40.0), {"window": 5}),
    "zclip": _history(optaxclip.zclip, ("z_thresh", 0.5), {"warmup_steps": 3}),
    "adagc": _history(optaxclip.adagc, ("lambda_rel", 1.05), _ADAGC, shares="leaf"),
    "clip_by_median_norm": _history(optaxclip.clip_by_median_norm, ("scale", 0.8), {"window": 2}),
    "clip_by_quantile": _history(
        optaxclip.clip_by_quantile, ("target", 0.5), {"init_threshold": 4.0}
    ),
    "clip_by_ema_norm": _history(optaxclip.clip_by_ema_norm, ("ratio", 1.05), shares="leaf"),
    "clip_by_window_norm": _history(optaxclip.clip_by_window_norm, ("num_std", 0.5), {"window": 4}),
    "normalize_by_norm_history": _history(
        optaxclip.normalize_by_norm_history, ("mean_decay", 0.7), shares="leaf", keeps_small=False
    ),
    "clip_by_moving_max": _history(optaxclip.clip_by_moving_max, ("decay", 0.9), shares="leaf"),
    "clip_by_second_moment": _per_entry(
        optaxclip.clip_by_second_moment,
        ("threshold", 2.0),
        {"decay": 0.5, "warmup_steps": 0},
        has_memory=True,
    ),
    "clip_by_spectral_norm": _per_leaf(
        optaxclip.clip_by_spectral_norm,
        ("threshold", 1.0),
        {"iterations": 5},
        keeps_small=False,
        atol=2e-6,
    ),
    "clip_by_spectral_norm_hard": _per_leaf(
        optaxclip.clip_by_spectral_norm,
        ("threshold", 1.0),
        {"mode": "hard", "iterations": 5},
        keeps_small=False,
        atol=2e-6,
    ),
    "skip_nonfinite": Method(_skip_of_clips, ("threshold", 1.0), {}, "step", has_info=False),
    "scale_loss": Method(
        _of_scaled_loss, ("threshold", 1.0), {}, "step", has_info=False, widens=True
    ),
    "skip_above": Method(optaxclip.skip_above, ("threshold", 6.0), _SKIP, "step", has_info=False),
    "skip_above_loss": Method(_skip_on_loss, ("threshold", 6.0), shares="step", has_info=False),
    "leaf_stacked_strict": _engine("row", scopes.leaf(stacked), strict=True),
    "leaf_lp": _engine("leaf", scopes.leaf(), norm=norms.lp(3)),
    "leaf_rms_of_weights": _per_leaf(_share_of_weights, ("ratio", 0.7), needs_params=True),
    "axes_l1": _engine("row", scopes.axes(-1), norm="l1"),
    "unit_smooth": _engine("column", scopes.unit(), response="smooth"),
    "unit_z_score": _history(_z_score_of_units, ("z_thresh", 0.5), shares="column"),
    "muon": _history(_beside_muon, ("threshold", 0.7), shares="label"),
    "group_linf_band": _engine(
        "label", scopes.group(label), norm="linf", response=responses.band(0.5, max_factor=3.0)
    ),
    "tree_mean_abs": _engine("tree", scopes.tree(), threshold=0.2, norm="mean_abs"),
    "leaf_average_l2_auto_s": _engine(
        "leaf", scopes.leaf(), 0.02, norm="average_l2", response="auto_s"
    ),
}

# The slow tests leave out what is only another argument of the same code.
VARIANTS = {"clip_scheduled", "clip_by_norm", "clip_by_norm_axes", "clip_by_norm_scheduled"}
VARIANTS |= {
    "clip_by_global_norm_eps",
    "clip_by_spectral_norm_hard",
    "clip_by_block_rms",
    "clip_by_group_norm",
    "clip_by_window_norm",
    "unit_z_score",
    "leaf_average_l2_auto_s",
}
DISTINCT = [name for name in METHODS if name not in VARIANTS]

# The costliest tests leave all others to the slow ones: these have each scope, norm and response
# between them, rules with and without memory, and each method with code of its own.
TYPICAL = {"clip", "clip_by_global_norm", "adaptive_grad_clip", "scale_by_stable_adam"}
TYPICAL |= {"clip_attention_logits", "clip_by_second_moment", "clip_by_spectral_norm"}
TYPICAL |= {"zclip", "adagc", "skip_above_loss", "leaf_stacked_strict", "axes_l1", "unit_smooth"}
TYPICAL |= {"muon", "group_linf_band"}

# One for each way in which a threshold reaches the computation.
ONE_OF_EACH = ["clip", "clip_by_global_norm", "clip_by_group_norm_dict", "leaf_rms_of_weights"]
