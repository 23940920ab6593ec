"""What users are told when something cannot be: what came, and what to pass in its place."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optaxclip
from optaxclip import clip_by, clip_by_global_norm, clip_tree, ops, per_example, scopes

SPARSE = BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 2))
STATE = clip_by(scopes.leaf(), 1.0).init
RELATIVE = optaxclip.thresholds.relative_to_params(0.01)
MISTAKES = {
    "negative limit": (lambda: clip_by_global_norm(-1.0), "max_norm .* got -1.0; .* math.inf"),
    "limit of groups": (lambda: clip_by_global_norm(np.ones(2)), r"shape \(2,\).* a dict from the"),
    "missing params": (
        lambda: clip_tree({"b": jnp.ones(1)}, RELATIVE, scope=scopes.leaf(), name="mine"),
        "^mine: .* pass them",
    ),
    "limits of others": (
        lambda: clip_by(scopes.leaf(), {"a": 1.0}).init({"b": jnp.ones(1)}),
        r"groups \['a'\], but the groups are \['b'\]: give one",
    ),
    "limits of more": (
        lambda: clip_tree({"b": jnp.ones(1)}, {"a": 1.0, "b": 1.0}, scope=scopes.leaf()),
        r"groups \['a', 'b'\], but the groups are \['b'\]: give one",
    ),
    "schedule of ops": (
        lambda: ops.clip_by_norm(jnp.ones(1), lambda count: 1.0),
        "clip_norm must be a number or scalar array, got <function",
    ),
    "schedule of a rule's number": (
        lambda: optaxclip.thresholds.zscore(z_thresh=lambda count: 2.0),
        "z_thresh must be a number or scalar array, got <function",
    ),
    "schedule of examples": (
        lambda: per_example.clip_sum(jnp.ones((2, 1)), lambda count: 1.0),
        "^limit must be a number or scalar array, got <function .* per_example_clip_and_aggregate",
    ),
    "quantile of examples": (
        lambda: per_example.clipped_grad(dot, per_example.quantile_limit()),
        r"^limit must be a number or scalar array, got QuantileLimit\(.* its limit at this step",
    ),
    "schedule of examples' groups": (
        lambda: per_example.clip_sum(jnp.ones((2, 1)), {"a": lambda count: 1.0}),
        r"^limit\['a'\] must be a number or scalar array, got <function",
    ),
    "word of examples": (
        lambda: per_example.clip_sum(jnp.ones((2, 1)), "1"),
        "^limit must be a number or scalar array, got '1' of type str$",
    ),
    "limits of examples": (
        lambda: per_example.clip_sum(jnp.ones((2, 1)), np.ones(2)),
        r"limit must be a scalar, got an array of shape \(2,\); .* pass a dict",
    ),
    "word for a batch's limit": (
        lambda: per_example.per_example_clip_and_aggregate("1", 0.0),
        "^limit must be a number, a scalar array or a schedule, got '1'",
    ),
    "quantile uncalled": (
        lambda: per_example.per_example_clip_and_aggregate(per_example.quantile_limit, 0.0),
        r"limit must be what quantile_limit returns.* as in per_example\.quantile_limit\(\)",
    ),
    "limits of ops": (
        lambda: ops.clip_by_norm(jnp.ones(1), np.ones(2)),
        r"clip_norm must be a scalar, got an array of shape \(2,\)$",
    ),
    "part of a sparse leaf": (
        lambda: ops.clip_by_norm([SPARSE], 1.0, axes=1),
        r"'0' cannot be divided, so axes must be all 2 of its axes, got 1; .* leaf\.todense\(\)",
    ),
    **{
        f"injected {name}": (
            lambda scope=scope: optax.inject_hyperparams(clip_by)(scope, 1.0).init(jnp.ones(1)),
            r"a scope was called .* static_args=\(\"scope\",\) to optax\.inject_hyperparams",
        )
        for name, scope in {"tree": scopes.tree(), "unit": scopes.unit()}.items()
    },
    "state of three trees": (
        lambda: clip_by(scopes.leaf(), 1.0).update([jnp.ones(1)], jax.vmap(STATE)([jnp.ones(3)])),
        r"3 entries for its 1 groups, .* jax\.vmap too",
    ),
    "model": (lambda: ops.global_norm({"f": jnp.tanh, "w": jnp.ones(1)}), "'f' .* eqx.filter"),
    "vector loss": (lambda: grads_of(lambda w, x: w * x), r"one example, got shape \(2,\)"),
    "no aux": (
        lambda: grads_of(lambda w, x: jnp.sum(w * x), has_aux=True),
        r"must return \(loss, aux\)",
    ),
    "three": (
        lambda: grads_of(lambda w, x: (dot(w, x), 1, 2), has_aux=True),
        r"\(loss, aux\), got",
    ),
    "no batch": (lambda: per_example.clipped_grad(jnp.sum, 1.0)(jnp.ones(2)), "at least one; got"),
    "half a position": (lambda: grads_of(dot, argnums=(0.5,)), "argnums must be an int or"),
    "sparse": (
        lambda: per_example.clip_sum(SPARSE, 1.0),
        "grads must be dense; leaf 'leaf' is",
    ),
    "sparse, as in Optax": (
        lambda: optaxclip.per_example_global_norm_clip(SPARSE, 1.0),
        "grads must be dense; leaf 'leaf' is",
    ),
    "twice": (lambda: grads_of(dot, argnums=(0, 0)), r"argnums \(0, 0\) .* at most once"),
    "batch twice": (lambda: grads_of(dot, batch_argnums=(1, -1)), "batch_argnums .* at most once"),
    "nowhere": (lambda: grads_of(dot, argnums=7), "argnums .* positions among 2"),
    "no position": (lambda: grads_of(dot, argnums="w"), "argnums must be an int or several"),
    "half a batch": (lambda: grads_of(dot, microbatch_size=1.5), "microbatch_size must be an int"),
    "word for a key": (lambda: private("seed"), "key must be one key .* got 'seed'"),
    "number for a key": (lambda: private(0.5), "key must be one key .* got 0.5"),
    "many keys": (lambda: private(jax.random.split(jax.random.key(0))), "key must be one key"),
    "half a window": (
        lambda: optaxclip.autoclip(window=1.5),
        "window must be an int of at least 1",
    ),
}


def dot(w, x):
    return jnp.dot(w, x)


def grads_of(loss, **options):
    return per_example.clipped_grad(loss, 1.0, **options)(jnp.ones(2), jnp.ones((3, 2)))


def private(key):
    return per_example.per_example_clip_and_aggregate(1.0, 1.0, key)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_message_says_what_came_and_what_to_do(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        make()


WITHOUT_A_LIMIT = (
    *("zclip", "adagc", "clip_by_quantile", "clip_by_ema_norm", "clip_by_median_norm"),
    *("clip_by_window_norm", "clip_by_moving_max", "normalize_by_norm_history"),
)


@pytest.mark.parametrize("name", WITHOUT_A_LIMIT)
def test_a_number_alone_is_no_limit_of_what_finds_its_own(name):
    make = getattr(optaxclip, name)
    said = rf"^{name}\(\) takes only keyword arguments, got 1.0; it computes"
    with pytest.raises(TypeError, match=said) as raised:
        make(1.0)
    takes_cap = "max_norm" in inspect.signature(make).parameters
    assert ("or pass max_norm=1.0 for a cap on it" in str(raised.value)) == takes_cap
    with pytest.raises(TypeError, match="positional"):
        optaxclip.clip_by_second_moment(1.0)


@pytest.mark.parametrize("number", [0.95, np.float32(0.5), 0.01])
def test_a_percentile_that_looks_like_a_share_is_warned_of(number):
    share = f"fewer than 1 in .* for a share of .* pass {100 * number:g}"
    for make in (optaxclip.autoclip, optaxclip.thresholds.percentile):
        with pytest.warns(UserWarning, match=share) as warned:
            make(percentile=number)
        assert warned[0].filename == __file__


def test_other_percentiles_pass_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for percentile in (0, 0.0, 1, 1.0, 95, np.float64(99.5), jnp.float32(0.5)):
            optaxclip.autoclip(percentile)


@pytest.mark.slow
def test_numbers_of_numpy_are_numbers():
    options = {
        "argnums": np.int64(0),
        "batch_argnums": np.array([1]),
        "microbatch_size": np.int8(2),
    }
    expected = grads_of(dot).grads
    np.testing.assert_array_equal(grads_of(dot, **options).grads, expected)
    np.testing.assert_array_equal(grads_of(dot, argnums=-2, batch_argnums=-1).grads, expected)
    assert grads_of(dot, argnums=np.array([0])).grads[0].shape == expected.shape
    optaxclip.autoclip(window=np.int64(3)).init(jnp.ones(2))
    optaxclip.skip_above(optax.identity(), 1.0, np.int32(3))


NO_KEYS = [
    1.5,
    jnp.float32(3),
    jnp.ones(2),
    jnp.uint32([[0, 3]]),
    jax.random.split(jax.random.key(0)),
]


@pytest.mark.parametrize("key", NO_KEYS, ids=range(len(NO_KEYS)))
def test_what_is_no_key(key):
    with pytest.raises(TypeError, match="key must be one key"):
        private(key)


@pytest.mark.parametrize("key", [3, np.int32(3), jax.random.key(3), jax.random.PRNGKey(3)])
def test_all_that_is_a_key(key):
    private(key).init(jnp.ones(2))


WHOLE = {"a": jnp.arange(3), "b": np.array([True])}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "clip",
    [
        lambda tree: optaxclip.clip(1.0).update(tree, None),
        lambda tree: clip_by_global_norm(1.0).update(tree, None),
        lambda tree: clip_tree(tree, 1.0, scope=scopes.tree()),
    ],
)
def test_nothing_to_clip_is_said(clip):
    with pytest.warns(UserWarning, match="no leaf has floating-point entries.* 'int32'") as warned:
        clip(WHOLE)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without_gradients = {"a": np.zeros(2, jax.dtypes.float0)}
        for tree in ({}, None, WHOLE | {"c": jnp.ones(1)}, without_gradients):
            clip(tree)
        clip_by_global_norm(1.0).init(WHOLE)
