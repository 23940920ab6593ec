"""Rules and schedules that users write: what they take and return is checked when it is traced."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import ThresholdRule, Thresholds, clip_by, ops, scopes, skip_above, thresholds

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
RETURNS = {
    "norms": (
        lambda n, s: n,
        r"must return a tuple \(Thresholds\(trigger, target\), state\), but returned float32\[2\]",
    ),
    "only thresholds": (lambda n, s: Thresholds(n, n), "returned Thresholds without a state"),
    "swapped": (lambda n, s: (s, Thresholds(n, n)), "returned them in reverse order"),
    "a pair": (
        lambda n, s: ((n, n), s),
        r"returned a tuple of a tuple of float32\[2\] and float32\[2\]",
    ),
    "nothing": (lambda n, s: None, "returned None of type NoneType"),
    "three": (lambda n, s: (Thresholds(n, n), s, s), "state.*, but returned a tuple of Thresholds"),
    "a dict": (lambda n, s: {"trigger": n}, "returned {.* of type dict"),
    "floats": (
        lambda n, s: (Thresholds(1.0, 1.0), s),
        r"returned 1\.0 of type float for trigger; use jnp\.full_like\(norms",
    ),
    "one float": (
        lambda n, s: (Thresholds(n, 1), s),
        r"with the same shape as norms, float32\[2\], but returned 1 of type int for target; use",
    ),
    "one scalar": (
        lambda n, s: (Thresholds(n, jnp.max(n)), s),
        r"returned float32\[\] for target; use",
    ),
    "too few": (lambda n, s: (Thresholds(n[:1], n), s), r"returned float32\[1\] for trigger"),
    "a list": (lambda n, s: (Thresholds(n, [n]), s), r"returned a list of float32\[2\] for target"),
    "bools": (lambda n, s: (Thresholds(n > 1, n), s), r"returned bool\[2\] for trigger"),
    "complex": (
        lambda n, s: (Thresholds(n, n.astype(complex)), s),
        r"returned complex64\[2\] for target",
    ),
    "no state": (
        lambda n, s: (Thresholds(n, n), None),
        r"previous state, int32\[\], but returned None of type",
    ),
    "more state": (
        lambda n, s: (Thresholds(n, n), (s, n)),
        r"int32\[\], but returned a tuple of int32\[\] and",
    ),
    "wide state": (
        lambda n, s: (Thresholds(n, n), s + jnp.zeros(2, int)),
        r"int32\[\], but returned int32\[2\]",
    ),
    "float state": (
        lambda n, s: (Thresholds(n, n), s + 1.0),
        r"int32\[\], but returned float32\[\]",
    ),
}


def own(update, state=0):
    return ThresholdRule(
        lambda norms: jnp.asarray(state), lambda norms, state, _: update(norms, state)
    )


@pytest.mark.by_day(5)
@pytest.mark.parametrize("wrong", RETURNS)
def test_invalid_rule_updates_raise(wrong):
    update, said = RETURNS[wrong]
    tx = clip_by(scopes.leaf(), own(update))
    with pytest.raises(
        (TypeError, ValueError), match=f"^clip_by: the update function of .* {said}"
    ):
        jax.jit(tx.update)(GRADS, tx.init(GRADS))
    by_label = clip_by(scopes.group({"w": "a", "b": "b"}), {"a": 1.0, "b": own(update)})
    if wrong not in ("floats", "one float", "one scalar", "too few", "bools", "complex"):
        with pytest.raises(
            (TypeError, ValueError), match=r"^the threshold of 'b': the update function of "
        ):
            by_label.update(GRADS, by_label.init(GRADS))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("wrap", [skip_above, "loss", "tree"])
def test_invalid_rule_raises_in_skip_and_clip_tree(wrap):
    rule = own(lambda norms, state: (Thresholds(1.0, 1.0), state))
    if wrap == "tree":
        with pytest.raises(
            TypeError, match="clip_tree: the update function of a threshold rule must return"
        ):
            optaxclip.clip_tree(GRADS, rule, scope=scopes.leaf())
        return
    threshold_values = (
        {"threshold": rule} if wrap is skip_above else {"threshold": 1.0, "loss_threshold": rule}
    )
    tx = skip_above(optax.sgd(1.0), **threshold_values)
    with pytest.raises(
        TypeError, match="skip_above: the update function of a threshold rule must return"
    ):
        tx.update(GRADS, tx.init(GRADS), value=1.0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda n, s: (Thresholds(jnp.full_like(n, 2), n), s + 1), 2.0),
        (lambda n, s: (Thresholds(jnp.where(n > 1, 2, 3), n), s + jnp.int32(1)), 2.0),
        (lambda n, s: (Thresholds(n.astype(jnp.bfloat16), n), s), 5.0),
    ],
)
def test_valid_custom_rules_pass_checks(update, expected):
    tx = clip_by(scopes.leaf(), own(update))
    state = tx.init(GRADS)
    for _ in range(2):
        _, state = jax.jit(tx.update)(GRADS, state)
    assert state.info.threshold[1] == expected


def test_rule_state_of_python_number_becomes_array():
    tx = clip_by(scopes.tree(), own(lambda n, s: (Thresholds(n, n), 1)))
    assert tx.update(GRADS, tx.init(GRADS))[1].rule == 1


def test_rules_with_wrong_signature_raise():
    calls = {"update": r"\(norms, state, param_norms\)", "init": r"\(norms\)"}
    update, init = (
        rf"threshold\.{x} must be a function that accepts the arguments {calls[x]}, got "
        for x in calls
    )
    rules = {
        f"{update}<function": ThresholdRule(lambda norms: (), lambda norms, state: norms),
        f"{init}<function": ThresholdRule(lambda: (), lambda norms, state, param_norms: norms),
        f"{init}1.0": ThresholdRule(1.0, lambda *args: args),
    }
    for said, rule in rules.items():
        with pytest.raises(TypeError, match=said):
            clip_by(scopes.tree(), rule)
        with pytest.raises(TypeError, match=f"loss_{said}"):
            skip_above(optax.sgd(1.0), 1.0, loss_threshold=rule)


def test_stateless_rule_accepts_empty_checkpoint_state():
    rule = ThresholdRule(lambda norms: (), lambda norms, state, _: (Thresholds(norms, norms), ()))
    tx = clip_by(scopes.leaf(), rule)
    for nothing in (None, {}, ()):
        _, after = jax.eval_shape(tx.update, GRADS, tx.init(GRADS)._replace(rule=nothing))
        assert after.rule == ()


def test_functions_without_signature_raise_only_if_called():
    """As many functions in C are; what is wrong with one is said when it is called."""
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(max)
    with pytest.raises(
        TypeError,
        match=r"max_norm must be a schedule .*, but calling it with an int32 scalar raised "
        "TypeError: ",
    ):
        optaxclip.clip_by_global_norm(max)
    clip_by(scopes.tree(), ThresholdRule(max, max))


MAKERS = {
    "max_norm": optaxclip.clip_by_global_norm,
    "threshold": functools.partial(clip_by, scopes.leaf()),
    "threshold['a']": lambda fn: clip_by(scopes.group("a"), {"a": fn}),
    "clipping": optaxclip.adaptive_grad_clip,
    "ratio": thresholds.relative_to_params,
    "fn": thresholds.schedule,
    "loss_threshold": lambda fn: skip_above(optax.sgd(1.0), 1.0, loss_threshold=fn),
    "max_delta": optaxclip.clip,
    "min_value": lambda fn: optaxclip.clip_by_value(fn, 1.0),
    "clipping_threshold": lambda fn: optaxclip.scale_by_stable_adam(clipping_threshold=fn),
    "tau": lambda fn: optaxclip.clip_attention_logits(fn, heads=lambda path, leaf: None),
}
ANY_SHAPE = ("max_delta", "min_value")
NO_SCHEDULES = {
    "of norms": (
        lambda norms: 0.5 * norms,
        "of the step count\\), got a function with the parameter 'norms'; use .*ThresholdRule",
    ),
    "of a norm": (
        lambda grad_norm: 0.5,
        "got a function with the parameter 'grad_norm'; use .*ThresholdRule",
    ),
    "of gradients": (lambda grads: 0.5, "got a function with the parameter 'grads'"),
    "of a tree": (
        lambda x: x["w"],
        r"calling it with an int32 scalar raised TypeError: .*; use .*ThresholdRule",
    ),
    "of two": (
        lambda count, state: 1.0,
        "with an int32 scalar raised TypeError: .* missing 1 required",
    ),
    "a rule": (
        lambda x: (Thresholds(x, x), ()),
        "returns a number, but it returned a tuple of Thresholds",
    ),
    "of an array": (
        lambda x: x[0],
        "with an int32 scalar raised (IndexError|ValueError|TypeError): ",
    ),
    "a vector": (lambda count: jnp.ones(3), r"returns a scalar, but it returned float32\[3\]"),
    "a bool": (lambda count: count > 3, r"returns a number, but it returned bool\[\]"),
    "nothing": (lambda count: None, "returns a number, but it returned None"),
    "a transformation": (optax.adam, "calling it with an int32 scalar raised TypeError: "),
    "a branch": (
        lambda count: "a" if count > 1 else None,
        "returns a number, but it returned None",
    ),
}


@pytest.mark.by_day(60)
@pytest.mark.parametrize("wrong", NO_SCHEDULES)
@pytest.mark.parametrize("argument", MAKERS)
def test_functions_other_than_schedules_raise(wrong, argument):
    if wrong == "a vector" and argument in ANY_SHAPE:
        MAKERS[argument](NO_SCHEDULES[wrong][0])
        return
    fn, said = NO_SCHEDULES[wrong]
    with pytest.raises((TypeError, ValueError)) as raised:
        MAKERS[argument](fn)
    assert str(raised.value).startswith(
        f"{argument} must be a schedule (a function of the step count)"
    )
    with pytest.raises((TypeError, ValueError), match=f"(?s){said}"):
        MAKERS[argument](fn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Warmup:
    """A schedule with an array, which is callable and a pytree, as a module of Equinox is."""

    top: jax.Array

    def __call__(self, step):
        return jnp.minimum(step / 10, 1) * self.top


SCHEDULES = {
    "from 0": optax.linear_schedule(0.0, 1.0, 10),
    "warm-up": optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100),
    "named otherwise": lambda n: 0.1 * n,
    "norm in a word": lambda normal_step: 1.0,
    "a step of gradients": lambda grad_step: 1.0,
    "keywords": lambda step, *, max_norm=1.0: max_norm + step,
    "a number": lambda count: 2,
    "integers": lambda count: jnp.where(count < 10, 1, 2),
    "partial": functools.partial(lambda top, count: top + count, 1.0),
    "compiled": jax.jit(lambda count: count + 1.0),
    "a module": Warmup(jnp.float32(1.0)),
    "eager": lambda count: 1.0 if count < 10 else 2.0,
    "eager number": lambda count: 1.0 + int(count),
    "NumPy": lambda count: np.float32(1) + np.asarray(count),
    "infinite": lambda count: jnp.where(count < 10, jnp.inf, 1.0),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_accept_any_initial_value(name):
    with jax.numpy_dtype_promotion("standard"):
        tx = optaxclip.clip_by_global_norm(SCHEDULES[name])
        _, state = tx.update(GRADS, tx.init(GRADS))
        assert state.info.threshold == SCHEDULES[name](jnp.int32(0))


def test_schedules_accept_traced_numbers_and_axis_index():
    def clipped(top):
        tx = optaxclip.clip_by_global_norm(lambda count: top * 0.9 ** count.astype(float))
        return ops.global_norm(tx.update(GRADS, tx.init(GRADS))[0])

    found = jax.jit(jax.vmap(clipped))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(found, [1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(clipped)(2.0), 1.0, rtol=1e-6)
    tx = optaxclip.clip_by_norm(lambda count: jax.lax.axis_index("rows") + 1)
    rows = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    clip = jax.vmap(lambda row: tx.update(row, tx.init(row))[0], axis_name="rows")
    np.testing.assert_allclose(jnp.linalg.norm(clip(rows), axis=1), [1.0, 2.0], rtol=1e-6)


def test_schedule_check_calls_function_once_without_computation():
    calls = []

    def schedule(count):
        calls.append(count)
        jax.debug.callback(lambda: calls.append("computed"))
        return 1.0

    optaxclip.clip_by_global_norm(schedule)
    jax.effects_barrier()
    assert [count.dtype for count in calls] == [jnp.int32]


def test_schedule_check_tolerates_implicit_promotion():
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    tx = optaxclip.clip_by_global_norm(SCHEDULES["warm-up"])
    with jax.numpy_dtype_promotion("standard"):
        tx.update(GRADS, tx.init(GRADS))
