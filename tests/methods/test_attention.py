"""QK-Clip reduces the largest logit of each head to the threshold, in each kind of attention."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from methods_table import assert_same, avals

import optaxclip
from optaxclip import Heads
from optaxclip.transforms.attention import multiplier, resolve_heads

WIDTH, HEADS, SIZE, ROTARY, VALUE, TAU = 6, 4, 3, 2, 5, 2.0
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, WIDTH)).astype(np.float32)


def weight(*shape):
    """Larger from head to head, which are on axis 1."""
    by = np.linspace(0.3, 2.0, shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))
    return (by * RNG.normal(size=shape)).astype(np.float32)


def kernel_and_bias():
    kernel = weight(WIDTH, HEADS, SIZE)
    return {"kernel": kernel, "bias": kernel[0].copy()}


PARAMS = {
    "mha": {name: kernel_and_bias() for name in ("query", "key", "value")},
    "gqa": {"query": weight(WIDTH, HEADS, SIZE), "key": weight(WIDTH, 2, SIZE)},
    "mqa": {"query": weight(WIDTH, HEADS, SIZE), "key": weight(WIDTH, SIZE)},
    "mla": {
        "query": weight(WIDTH, HEADS, SIZE + ROTARY),
        "key_value": weight(WIDTH, HEADS, SIZE + VALUE),
        "rotary_key": weight(WIDTH, ROTARY),
    },
    "one_axis": {x: weight(WIDTH, HEADS, SIZE).reshape(WIDTH, -1) for x in ("query", "key")},
    "fused": {"kernel": weight(WIDTH, HEADS, 3 * SIZE)},
    "stacked": {x: np.stack([weight(WIDTH, HEADS, SIZE)] * 2, axis=1) for x in ("query", "key")},
}
PARAMS["stacked"]["query"][:, 1] *= 2
PLACES = {
    **{f"mha/{x}/{y}": Heads(-2) for x in ("query", "key") for y in ("kernel", "bias")},
    "gqa/query": Heads(1, 1.0),
    "mqa/query": Heads(1, 1.0),
    "mla/query": Heads(1, ((SIZE, 0.5), (ROTARY, 1.0))),
    "mla/key_value": Heads(1, [(SIZE, 0.5), (VALUE, 0)]),
    **{f"one_axis/{x}": Heads(-1, ((SIZE, 0.5),)) for x in ("query", "key")},
    "fused/kernel": Heads(1, ((SIZE, 0.5), (SIZE, 0.5), (SIZE, 0.0))),
    **{f"stacked/{x}": Heads((1, 2)) for x in ("query", "key")},
}


def heads(path, leaf):
    del leaf
    return PLACES.get(path)


def largest(query, key):
    """The largest logit of each head, `[heads]`, of queries and keys `[..., heads, size]`."""
    logits = np.einsum("bthd,bshd->htsb", query, key) / np.sqrt(query.shape[-1])
    return np.max(logits, axis=(1, 2, 3))


def project(kernel, bias=0.0):
    return np.einsum("btw,whd->bthd", X, kernel) + bias


def of_mla(query, key_value, rotary_key):
    shared = np.einsum("btw,wr->btr", X, rotary_key)[:, :, None].repeat(HEADS, axis=2)
    key = np.concatenate([project(key_value)[..., :SIZE], shared], axis=-1)
    return largest(project(query), key)


def logits_of(params):
    """The largest logits of all attentions."""
    mha, gqa, mqa, stacked = (params[x] for x in ("mha", "gqa", "mqa", "stacked"))
    one = {x: y.reshape(WIDTH, HEADS, SIZE) for x, y in params["one_axis"].items()}
    fused = project(params["fused"]["kernel"])
    layers = [{x: y[:, i] for x, y in stacked.items()} for i in range(2)]
    return {
        "mha": largest(project(**mha["query"]), project(**mha["key"])),
        "gqa": largest(project(gqa["query"]), project(gqa["key"].repeat(2, axis=1))),
        "mqa": largest(project(mqa["query"]), project(mqa["key"][:, None].repeat(HEADS, axis=1))),
        "mla": of_mla(**params["mla"]),
        "one_axis": largest(project(one["query"]), project(one["key"])),
        "fused": largest(fused[..., :SIZE], fused[..., SIZE : 2 * SIZE]),
        "stacked": np.stack([largest(project(x["query"]), project(x["key"])) for x in layers]),
    }


CLIP = optaxclip.clip_attention_logits(TAU, heads=heads)
UPDATE = jax.jit(CLIP.update)


def clipped(updates, params=PARAMS, logits=None):
    """Updates, their sum with the parameters, and the record."""
    logits = logits_of(PARAMS) if logits is None else logits
    updates, state = UPDATE(updates, CLIP.init(params), params, max_logits=logits)
    updates, params = (jax.tree.map(np.asarray, tree) for tree in (updates, params))
    new = jax.tree.map(lambda u, w: w if u is None else w + u, updates, params, is_leaf=is_none)
    return updates, new, state.info


def is_none(x):
    return x is None


def test_the_largest_logits_of_the_batch_come_back_to_the_threshold():
    before, zeros = logits_of(PARAMS), jax.tree.map(np.zeros_like, PARAMS)
    updates, params, info = clipped(zeros)
    after = logits_of(jax.tree.map(np.asarray, params))
    for kind, logits in before.items():
        assert np.any(logits > TAU), kind
        np.testing.assert_allclose(after[kind], np.minimum(logits, TAU), rtol=1e-4, err_msg=kind)
    alone = [("mha", "value", "kernel"), ("gqa", "key"), ("mqa", "key"), ("mla", "rotary_key")]
    for path in alone:
        assert not np.any(nested(updates, path))
    np.testing.assert_array_equal(updates["mla"]["key_value"][..., SIZE:], 0)
    np.testing.assert_array_equal(updates["fused"]["kernel"][..., 2 * SIZE :], 0)
    assert list(info.names) == sorted(PLACES)
    worst = [np.max(before[name.split("/")[0]]) for name in info.names]
    np.testing.assert_allclose(info.norm, worst, rtol=1e-6)
    np.testing.assert_array_equal(info.threshold, TAU)
    shares = [np.mean(before[name.split("/")[0]] > TAU) for name in info.names]
    np.testing.assert_allclose(info.fraction, shares, rtol=1e-6)


def nested(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def test_clip_attention_logits_rescales_updated_params():
    moves = jax.tree.map(lambda x: np.float32(0.1) * RNG.normal(size=x.shape).astype("f4"), PARAMS)
    updates, params, _ = clipped(moves)
    factor = np.minimum(1, TAU / logits_of(PARAMS)["mha"])
    assert np.any(factor == 1)
    for name, power in (("query", 0.5), ("key", 0.5), ("value", 0.0)):
        old, move = PARAMS["mha"][name]["kernel"], moves["mha"][name]["kernel"]
        expected = factor[:, None] ** power * (old + move)
        np.testing.assert_allclose(params["mha"][name]["kernel"], expected, atol=1e-6)
        kept = updates["mha"][name]["kernel"][:, factor == 1]
        np.testing.assert_array_equal(kept, move[:, factor == 1])


@pytest.mark.slow
def test_clip_attention_logits_keeps_dtypes_and_none_leaves():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    updates = jax.tree.map(np.zeros_like, narrow) | {"gqa": {"query": None, "key": None}}
    updates["mha"]["value"]["steps"] = np.arange(2, dtype=np.int32)
    narrow["mha"]["value"]["steps"] = np.arange(2, dtype=np.int32)
    found, params, info = clipped(updates, narrow)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, updates)
    assert found["gqa"] == {"query": None, "key": None}
    assert info.norm[list(info.names).index("gqa/query")] == 0
    after = logits_of(jax.tree.map(lambda x: np.asarray(x, "f4"), params))
    assert np.max(after["mha"]) == pytest.approx(TAU, rel=0.02)


def test_clip_attention_logits_ignores_nonfinite_and_negative_logits():
    moves = jax.tree.map(np.ones_like, PARAMS)
    bad = np.float32([np.nan, np.inf, -np.inf, -5.0])
    logits = {kind: np.broadcast_to(bad, x.shape) for kind, x in logits_of(PARAMS).items()}
    updates, _, info = clipped(moves, logits=logits)
    assert_same(jax.tree.map(np.asarray, updates), moves)
    np.testing.assert_array_equal(info.num_nonfinite, 1)
    small = {kind: np.full_like(x, 0.5) for kind, x in logits.items()}
    np.testing.assert_array_equal(clipped(moves, logits=small)[2].norm, 0.5)


def one_layer(path, leaf):
    del leaf
    return Heads(1) if path.endswith(("query", "key")) else None


LAYER = {x: jnp.full((1, 2, 2), 3.0) for x in ("query", "key")}
MODEL = {"layers": [{"attention": LAYER}, {"attention": LAYER}]}
FIRST, SECOND = np.float32([1.0, 4.0]), np.float32([16.0, 1.0])
SOWN = [{"attention": {"max_logits": (FIRST,)}}, {"attention": {"max_logits": (FIRST, SECOND)}}]
WHERE = {
    "nested": {"layers": [{"attention": FIRST}, {"attention": jnp.maximum(FIRST, SECOND)}]},
    "paths": {"layers/0": FIRST, "layers/1/attention": jnp.maximum(FIRST, SECOND)},
    "the longest path": {"layers": {"0": FIRST}, "layers/1": np.float32([16.0, 4.0])},
    "sown": {"layers": SOWN},
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("where", WHERE)
def test_max_logits_accept_nested_paths_and_sown_values(where):
    clip = optaxclip.clip_attention_logits(1.0, heads=one_layer)
    zeros = jax.tree.map(jnp.zeros_like, MODEL)
    updates, _ = clip.update(zeros, clip.init(MODEL), MODEL, max_logits=WHERE[where])
    for layer, roots in ((0, [1.0, 2.0]), (1, [4.0, 2.0])):
        new = np.asarray(updates["layers"][layer]["attention"]["key"])[0, :, 0] + 3
        np.testing.assert_allclose(new, 3 / np.array(roots), rtol=1e-5)


def test_max_logits_prefer_longest_path():
    logits = {"layers/0": FIRST, "layers/1": jnp.ones(3), "layers/1/attention": FIRST}
    clip = optaxclip.clip_attention_logits(1.0, heads=one_layer)
    found, _ = jax.eval_shape(clip.update, MODEL, clip.init(MODEL), MODEL, max_logits=logits)
    assert avals(found) == avals(MODEL)


def test_clip_attention_logits_accepts_named_shardings():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict.fromkeys(LAYER, jax.NamedSharding(mesh, jax.P(None, "model")))
    clip = optaxclip.clip_attention_logits(1.0, heads=one_layer, specs=specs)
    for tree in (LAYER, {"query": None, "key": None}):
        found, _ = jax.eval_shape(clip.update, tree, clip.init(LAYER), LAYER, max_logits=FIRST)
        assert avals(found) == avals(tree)


def updated(params=LAYER, logits=FIRST, heads=one_layer, tau=1.0):
    clip = optaxclip.clip_attention_logits(tau, heads=heads)
    return clip.update(LAYER, clip.init(LAYER), params, max_logits=logits)


@pytest.mark.usefixtures("x64")
def test_max_logits_compare_in_float32_or_wider():
    weights = {name: np.ones((1, 2), np.float32) for name in ("narrow", "several")}
    clip = optaxclip.clip_attention_logits(2.0, heads=lambda *_: Heads(1, 1.0))
    narrow, wide = jnp.asarray([1, 3], jnp.bfloat16), jnp.asarray([2, 1], jnp.float64)
    logits = {"narrow": narrow, "several": {"max_logits": (narrow.astype(jnp.float32), wide)}}
    updates, _ = jax.jit(clip.update)(weights, None, weights, max_logits=logits)
    for name, update in updates.items():
        np.testing.assert_allclose(1 + update, [[2, 4 / 3]], rtol=1e-6, err_msg=name)


ERRORS = {
    "no params": (
        {"params": None},
        r"params is required; .*max_logits=\.\.\.",
    ),
    "no logits": (
        {"logits": None},
        r"max_logits is required; call update",
    ),
    "other params": (
        {"params": {"query": LAYER["query"]}},
        r"leaf 'key' of params must have the same shape as the update, \(1, 2, 2\), but is missing",
    ),
    "no place": (
        {"logits": {"body/0": FIRST}},
        r"an array for leaf 'key', but has arrays only for \['bo",
    ),
    "batch": (
        {"logits": jnp.ones((3, 2))},
        r"shape \(2,\).*'key', got \(3, 2\); return None from heads for",
    ),
    "integers": ({"logits": jnp.arange(2)}, "of max_logits must have a floating-point dtype"),
    "complex": ({"logits": jnp.ones(2, complex)}, "max_logits must be real-valued arrays"),
    "tau": ({"tau": -1.0}, "tau must not be negative"),
    "no function": ({"heads": "query"}, "heads must be a function"),
    "no heads": (
        {"heads": lambda path, leaf: 1},
        "heads must return optaxclip.Heads or None, but returned 1 for leaf '",
    ),
    "nowhere": ({"heads": lambda *_: None}, r"returned None for all of \['key', 'query'\]"),
    "axis": (
        {"heads": lambda *_: Heads(3)},
        r"heads uses axes \(3,\), but leaf 'key' has shape \(1, 2, 2\)",
    ),
    "axis below": (
        {"heads": lambda *_: Heads(-4)},
        r"heads uses axes \(-4,\), but leaf 'key' has shape",
    ),
    "axis of parts": (
        {"heads": lambda *_: Heads(3, ((2, 1.0),))},
        r"heads uses axes \(3, -1\), but leaf 'key' has shape",
    ),
    "no axis of entries": (
        {"heads": lambda *_: Heads(1, ((2, 1.0),), head_dim_axis=3)},
        r"heads uses axes \(1, 3\), but leaf 'key' has shape",
    ),
    "half a head": (
        {"heads": lambda *_: Heads(-1, ((3, 1.0),))},
        r"power sets a head size of 3 along axis 2, but leaf 'key' has shape \(1, 2, 2\)",
    ),
    "heads as entries": (
        {"heads": lambda *_: Heads((0, 1), ((1, 1.0),), head_dim_axis=0)},
        r"power sets a head size of 1 along axis 0, but leaf 'key' has shape \(1, 2, 2\)",
    ),
    "twice": ({"heads": lambda *_: Heads((1, -2))}, "must use distinct axes of leaf 'key', "),
    "entries": (
        {"heads": lambda *_: Heads(1, ((3, 1.0),))},
        r"power sets a head size of 3 along axis 2, but leaf 'key' has shape \(1, 2, 2\)",
    ),
}


def test_clip_attention_logits_schedule_requires_record():
    with pytest.raises(
        ValueError,
        match=(
            "clip_attention_logits: record=False cannot be combined with a threshold that depends"
        ),
    ):
        optaxclip.clip_attention_logits(lambda count: 1.0, heads=one_layer, record=False)


def test_heads_reject_sparse_params():
    with pytest.raises(
        TypeError, match="leaf 'w' is sparse, so heads must return None instead of Heads"
    ):
        optaxclip.clip_attention_logits(1.0, heads=lambda *_: Heads(0)).init(
            {"w": BCOO.fromdense(jnp.ones((2, 2)))}
        )


@pytest.mark.parametrize("case", ERRORS)
def test_clip_attention_logits_errors_explain_remedy(case):
    arguments, message = ERRORS[case]
    with pytest.raises((TypeError, ValueError), match=message):
        updated(**arguments)


def test_clip_attention_logits_rejects_state_as_updates():
    said = "updates must be gradients, got a state of type ClipState; call update"
    with pytest.raises(ValueError, match=f"^clip_attention_logits: {said}"):
        CLIP.update(CLIP.init(PARAMS), PARAMS, PARAMS)


@pytest.mark.parametrize(
    "arguments", [("one",), (1, 1.5), (1, -0.5), (1, ((0, 0.5),)), (1, ("a",)), (1, 1, "a")]
)
def test_heads_reject_invalid_axis_or_power(arguments):
    with pytest.raises(
        (TypeError, ValueError), match=r"^(Heads must have an int .* as axis|power must be)"
    ):
        Heads(*arguments)


@pytest.mark.parametrize(("axis", "shape"), [(0, (2,)), ((2, -3), (3, 1, 2))])
def test_heads_accept_any_axes(axis, shape):
    place, of_heads = resolve_heads(Heads(axis), shape, "w")
    factors = np.random.default_rng(0).uniform(0.1, 0.9, of_heads).astype(np.float32)
    by = np.broadcast_to(jax.jit(lambda x: multiplier(x, place))(factors), shape)
    at = [range(size) for size in of_heads]
    for index in itertools.product(*at):
        where = [slice(None)] * len(shape)
        for i, number in zip(np.atleast_1d(axis), index, strict=True):
            where[i] = number
        np.testing.assert_allclose(by[tuple(where)], factors[index] ** 0.5, rtol=1e-6)


def test_zero_factor_keeps_parts_with_zero_power():
    place, _ = resolve_heads(Heads(0, ((1, 0.5), (1, 0.0))), (3, 2), "w")
    factors = jnp.float32([0.0, 0.25, 1.0])
    np.testing.assert_array_equal(multiplier(factors, place), [[0, 1], [0.5, 1], [1, 1]])
    slopes = jax.jit(jax.grad(lambda x: jnp.sum(multiplier(x, place))))(factors)
    np.testing.assert_allclose(slopes, [0, 1, 0], rtol=1e-6)


@pytest.mark.slow
def test_nonfinite_logit_has_zero_derivative():
    clip = optaxclip.clip_attention_logits(1.0, heads=lambda path, leaf: optaxclip.Heads(0))

    def total(logits):
        return jnp.sum(clip.update(jnp.ones((4, 2)), None, jnp.ones((4, 2)), max_logits=logits)[0])

    logits = jnp.float32([jnp.nan, jnp.inf, 0.5, 4.0])
    # The weights become `(4 / 2) * sqrt(1 / S)`, twice, for the last head.
    expected = [0, 0, 0, -4 * 0.5 * 4.0**-1.5]
    np.testing.assert_allclose(jax.jit(jax.grad(total))(logits), expected, rtol=1e-6)
