"""What `accumulate` and `per_example` cannot make sense of, with what the errors say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

import optaxclip
from optaxclip import accumulate, per_example, responses, scopes, thresholds

X, W, BATCH = jnp.ones((6, 2)), jnp.ones(2), (jnp.ones(2), jnp.ones((6, 2)), jnp.ones((6, 2)))
SPARSE = BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 2))
AGGREGATE = optaxclip.per_example_clip_and_aggregate
KEYS = jax.random.split(jax.random.key(0))

quantile_threshold = per_example.quantile_threshold


def loss_fn(w, x):
    return jnp.mean(x @ w)


def made(loss_fn=loss_fn, **options):
    return accumulate.value_and_grad(**{"loss_fn": loss_fn, "microbatch_size": 2, **options})


def called(*args, state=None, **options):
    return jax.jit(made(**options))(*args, **({} if state is None else {"state": state}))


def weighted(weight, batch_argnums=(1, 2)):
    return made(lambda w, x, y: 0.0, batch_argnums=batch_argnums, weight=weight)(*BATCH)


def dot(w, x):
    return jnp.dot(w, x)


def grads_of(loss, **options):
    return per_example.clipped_grad(loss, 1.0, **options)(jnp.ones(2), jnp.ones((3, 2)))


def clip_sum(threshold, grads=np.ones((2, 1)), **options):  # noqa: B008
    return per_example.clip_sum(grads, threshold, **options)


def to_ints(name):
    return optax.stateless(lambda updates, _: updates | {name: updates[name].astype(int)})


def noisy(noise=1.0, key=KEYS[0], size=4, bound=1.0, **options):
    result = clip_sum(1.0)._replace(bound=bound)
    return per_example.noisy_mean(result, noise, key, size, **options)


TYPE_ERRORS = {
    "microbatch_size must be an int": lambda: made(microbatch_size=2.0),
    "argnums must be an int or a sequence of ints, got 'w'": lambda: made(argnums="w"),
    "loss_fn must be a function, got 3": lambda: made(3),
    "weight must be a function, got 2.0": lambda: made(weight=2.0),
    "reject_rule must be the result of calling zscore": lambda: made(reject_rule=thresholds.zscore),
    "reject_rule must be a single global-norm threshold, got": lambda: made(reject_rule={"w": 1.0}),
    "reject_rule must be .* optaxclip function zclip": lambda: made(reject_rule=optaxclip.zclip),
    "clip must be a number": lambda: made(clip="norm"),
    "clip must be a transformation or a global-norm threshold": lambda: made(clip={"w": 1.0}),
    r"clip must be the result of .* use optaxclip\.zclip": lambda: made(clip=optaxclip.zclip),
    r"clip .* itself; use optaxclip\.clip_by\(\)": lambda: made(clip=optaxclip.clip_by),
    "clip must be the result of calling ema": lambda: made(clip=thresholds.ema),
    "compute_norms must be True or False": lambda: made(compute_norms=0),
    "axis_name must be a name": lambda: made(axis_name=3),
    r"value_and_grad\(\) requires the arguments \['loss_fn', 'microbatch_size'\]": (
        accumulate.value_and_grad
    ),
    "a real number, but returned None": lambda: called(W, X, weight=lambda x: None),
    "a floating-point scalar, but returned int32": lambda: called(W, X, loss_fn=lambda w, x: 3),
    "loss_fn must return a real scalar, not 'no'": lambda: called(W, X, loss_fn=lambda w, x: "no"),
    "loss_fn must return": lambda: called(W, X, loss_fn=lambda w, x: None),
    r"must return \(loss, aux\) if has_aux=True, not .*Tracer": lambda: called(W, X, has_aux=True),
    "pass has_aux=True": lambda: called(W, X, loss_fn=lambda w, x: (loss_fn(w, x), 1)),
    r"weight must accept all batch arguments \(2\), but calling it fails: .* "
    r"weight\(x, ": lambda: weighted(lambda x: x.sum()),
    r"must accept all batch arguments \(2\), .*; for example, use weight\(x, ": lambda: weighted(
        lambda *, mask: mask.sum()
    ),
    r"must accept all batch arguments \(1\), .* use weight\(x, ": lambda: weighted(
        lambda x, y: x.sum() + y.sum(), 1
    ),
    r"weight must accept all batch arguments \(2\), .*; for example, use": lambda: weighted(
        lambda: 1.0
    ),
    "^threshold must be a number or scalar array, got <function .* "
    "per_example_clip_and_aggregate": lambda: clip_sum(lambda count: 1.0),
    r"^threshold must be a number or scalar array, got "
    r"QuantileThreshold\(.* the threshold of the current step": lambda: per_example.clipped_grad(
        dot, per_example.quantile_threshold()
    ),
    r"^threshold\['a'\] must be a number or scalar array, got <function": lambda: clip_sum(
        {"a": lambda count: 1.0}
    ),
    "^threshold must be a number or scalar array, got '1' of type str$": lambda: clip_sum("1"),
    "^threshold must be a number, a scalar array, or a schedule, got '1'": lambda: AGGREGATE(
        "1", 0.0
    ),
    r"threshold must be the result of calling quantile_threshold, .* "
    r"per_example\.quantile_threshold\(\)": lambda: AGGREGATE(per_example.quantile_threshold, 0.0),
    "must come from optaxclip.scopes.* got 'leaf'": lambda: clip_sum(1.0, scope="leaf"),
    r"scope must .* use scopes\.leaf\(\)": lambda: per_example.clipped_grad(
        dot, 1.0, scope=scopes.leaf
    ),
    "must come from optaxclip.scopes.* 0.0": lambda: AGGREGATE(1.0, 0.0, scope=0.0),
    r"response must .* use responses\.band\(\)": lambda: clip_sum(1.0, response=responses.band),
    "leaf 'leaf' of grads must be dense, not a BCOO": lambda: clip_sum(1.0, SPARSE),
    "^leaf 'leaf' of grads must be dense, not a BCOO array": lambda: (
        optaxclip.per_example_global_norm_clip(SPARSE, 1.0)
    ),
    r"must return \(loss, aux\)": lambda: grads_of(lambda w, x: jnp.sum(w * x), has_aux=True),
    r"\(loss, aux\) if has_aux=True, not \(": lambda: grads_of(
        lambda w, x: (dot(w, x), 1, 2), has_aux=True
    ),
    "argnums must be an int or a sequence of ints, got .0.5": lambda: grads_of(dot, argnums=(0.5,)),
    "argnums must be an int or a sequence of ints": lambda: grads_of(dot, argnums="w"),
    "^microbatch_size must be an int": lambda: grads_of(dot, microbatch_size=1.5),
    "key must be a single JAX PRNG key or an int seed, got 'seed'": lambda: AGGREGATE(
        1.0, 1.0, "seed"
    ),
    "key must be a single JAX PRNG key or an int seed, got 0.5": lambda: AGGREGATE(1.0, 1.0, 0.5),
    r"key must be a single JAX PRNG key or an int seed, got Array\(\(2,\)": lambda: AGGREGATE(
        1.0, 1.0, KEYS
    ),
    r"key must be a single JAX PRNG key or an int seed, got Array\(3\.": lambda: AGGREGATE(
        1.0, 1.0, jnp.float32(3)
    ),
    r"key must be a single JAX PRNG key or an int seed, got Array\(\[1\., 1\.\]": lambda: AGGREGATE(
        1.0, 1.0, jnp.ones(2)
    ),
    r"key must be a single JAX PRNG key or an int seed, got Array\(\[\[0, 3\]\]": lambda: AGGREGATE(
        1.0, 1.0, jnp.uint32([[0, 3]])
    ),
    "batch_size .* of type str": lambda: AGGREGATE(1.0, 0.0, batch_size="a"),
    "key must be a single JAX PRNG key or an int seed, got True": lambda: AGGREGATE(1.0, 1.0, True),
    "noise_multiplier must be .* got '1'": lambda: noisy(noise="1"),
    "key must be a single JAX PRNG key, got 0.*; pass a new key": lambda: noisy(key=0),
    "result must be a PerExampleResult .* got Array": lambda: per_example.noisy_mean(
        X, 1.0, KEYS[0], 4
    ),
    "pre_clipping_transform must be a function.* 3": lambda: grads_of(
        dot, pre_clipping_transform=3
    ),
    "pre_clipping_transform must be a function.* 'scaled'": lambda: grads_of(
        dot, pre_clipping_transform="scaled"
    ),
    "is_padding must have dtype bool, got dtype float": lambda: clip_sum(
        1.0, is_padding=jnp.zeros(2)
    ),
}
VALUE_ERRORS = {
    "^PRNG keys must generate .* but 'rbg' derives .* impl='threefry2x32'": lambda: (
        per_example.clipped_grad(lambda w, key: w * jax.random.uniform(key), 1.0)(
            1.0, jax.random.split(jax.random.key(0, impl="rbg"))
        )
    ),
    "microbatch_size must be an int >= 1, got 0": lambda: made(microbatch_size=0),
    "batch_argnums must not overlap argnums=0, got 0; remove 0 from batch_argnums": lambda: made(
        batch_argnums=0
    ),
    r"batch_argnums must .* argnums=\(0, 1\), got 0; remove 0": lambda: made(
        batch_argnums=0, argnums=(0, 1)
    ),
    r"batch_argnums must .* argnums=0, got 0; remove 0": lambda: made(
        batch_argnums=0, argnums=np.int32(0)
    ),
    r"batch_argnums must .* got \(1, -1\); remove -1": lambda: made(
        argnums=(0, -1), batch_argnums=(1, -1)
    ),
    "reject_rule must be 'nonfinite', None, or a rule": lambda: made(reject_rule="nan"),
    "reject_rule must not be negative": lambda: made(reject_rule=-1.0),
    "clip must not be negative": lambda: made(clip=-1.0),
    "dtype must be float32 or wider, got bfloat16": lambda: made(dtype=jnp.bfloat16),
    "dtype must be float32 or wider, got int32": lambda: made(dtype=jnp.int32),
    "clip and reject_rule must be None .*, got None and 'nonfinite'": lambda: made(
        compute_norms=False
    ),
    "must divide the batch size, got 4 for 6 examples; use 3 or pad": lambda: called(
        W, X, microbatch_size=4
    ),
    "got 12 for 6 examples; use 6 or ": lambda: called(W, X, microbatch_size=12),
    "got 2 for 5 examples; use 1 or ": lambda: called(W, X[:5]),
    "the batch has no examples": lambda: called(W, X[:0]),
    "the batch has no examples; pass at least one example": lambda: called(W, {}),
    "batch_argnums must be distinct positions between 0 and 0": lambda: called(W),
    r"leaves of the batch must have a leading example axis .* \(\)": lambda: called(W, 3.0),
    "^all leaves of the batch must have a leading example axis": lambda: called(W, (X, X[:2])),
    "batch_argnums must not be empty": lambda: called(W, X, batch_argnums=-2),
    r"not overlap argnums=\(0,\), got \(\) \(the number of arguments is 1\)": lambda: called(
        W, loss_fn=lambda w: w[0], batch_argnums=None
    ),
    r"must be of type AccumulateState, got .*; pass the previous accumulated\.state": lambda: (
        called(W, X, state=3)
    ),
    "weight must return a positive number, but returned -1.0": lambda: called(
        W, X, weight=lambda x: -1.0
    ),
    "weight must return a positive number, but returned 0": lambda: called(
        W, X, weight=lambda x: 0
    ),
    "weight must return a positive number, but returned nan": lambda: called(
        W, X, weight=lambda x: np.nan
    ),
    r"scalar.*\(2,\).*; sum over": lambda: called(W, X, weight=lambda x: x[:, 0]),
    r"loss_fn must return a scalar \(the mean.*shape \(2,\)": lambda: called(
        W, X, loss_fn=lambda w, x: x @ w
    ),
    "clip must return a tree with the same structure": lambda: called(
        W, X, clip=optax.stateless(lambda updates, _: {"w": updates})
    ),
    "clip must return a .* and floating-point leaves as the grad": lambda: called(
        {"v": W, "w": W}, X, loss_fn=lambda p, x: loss_fn(p["v"] + p["w"], x), clip=to_ints("w")
    ),
    "axis_name must name a mapped axis, got 'i'": lambda: called(W, X, axis_name="i"),
    r"threshold must be a scalar, got an array of shape \(2,\); "
    r"pass a dict to set a threshold per group": lambda: clip_sum(np.ones(2)),
    r"one example, which has no.*but returned an array of shape \(2,\)": lambda: grads_of(
        lambda w, x: w * x
    ),
    "must not be empty and must not overlap argnums=.* got": lambda: per_example.clipped_grad(
        jnp.sum, 1.0
    )(jnp.ones(2)),
    r"argnums must be distinct .* got \(0, 0\)": lambda: grads_of(dot, argnums=(0, 0)),
    "batch_argnums must be distinct": lambda: grads_of(dot, batch_argnums=(1, -1)),
    "argnums must be distinct positions between 0 and 1": lambda: grads_of(dot, argnums=7),
    r"batch_argnums must not overlap argnums=0, got 0": lambda: grads_of(dot, batch_argnums=0),
    "batch_size must be at least 1, got 0": lambda: AGGREGATE(1.0, 0.0, batch_size=0),
    "key is required to add noise; pass a JAX PRNG key or an int seed": lambda: AGGREGATE(1.0, 1.0),
    "noise_multiplier must not be negative": lambda: AGGREGATE(1.0, -1.0),
    "threshold must not be negative or NaN": lambda: AGGREGATE(np.nan, 0.0),
    "reduction must be one of": lambda: AGGREGATE(1.0, 0.0, reduction="median"),
    "state must be of type PerExampleState": lambda: AGGREGATE(1.0, 0.0).update(X, ()),
    r"noise_multiplier must be less than 2 \* count_noise": lambda: AGGREGATE(
        quantile_threshold(count_noise=0.5), 1.0, key=0
    ),
    "^key is required unless count_noise is 0, but it is 1.0; pass": lambda: quantile_threshold(
        count_noise=1.0
    ).update(W[0], 3, 4, batch_size=4),
    "key is required unless count_noise is 0, but it is .*; pass": lambda: jax.jit(
        lambda x: quantile_threshold(count_noise=x).update(x, 3, 4, batch_size=4)
    )(1.0),
    "^key is required to add noise; pass .* seed, or pass noise_multiplier=0": lambda: AGGREGATE(
        quantile_threshold(count_noise=1.0), 0.0
    ),
    "^noise_multiplier must": lambda: noisy(noise=-1.0),
    "^noise_multiplier must not be": lambda: noisy(noise=np.nan),
    "noise_multiplier must be finite if noise is added": lambda: noisy(noise=np.inf),
    "batch_size must .* got 0": lambda: noisy(size=0),
    "batch_size must .* got nan": lambda: noisy(size=np.nan),
    "key must be a single JAX PRNG key, got None; pass a new key": lambda: noisy(key=None),
    "relation must be one of": lambda: noisy(relation="neighbours"),
    "result.bound is required to add noise": lambda: noisy(bound=None),
    "result.bound must be finite if noise is added, got inf": lambda: noisy(bound=np.inf),
    r"params are required if threshold is a dict; pass the": lambda: per_example.clipped_grad(
        dot, {"all": 2.0}
    ).sensitivity(),
    r"relation must be one of \['add_or_remove_one', .* got 'replace'": lambda: (
        per_example.clipped_grad(dot, 1.0).sensitivity("replace")
    ),
    r"relation must be one of \['add_or_remove_one', .* got None": lambda: per_example.clipped_grad(
        dot, 1.0
    ).sensitivity(None),
    "split must be one of": lambda: clip_sum(1.0, split="even"),
    r"is_padding must have shape \(2,\), got shape \(3,\)": lambda: clip_sum(
        1.0, is_padding=jnp.zeros(3, bool)
    ),
    "^microbatch_size must be an int >= 1, got 0": lambda: grads_of(dot, microbatch_size=0),
    "threshold must not be negative or NaN, got -1.0": lambda: per_example.clipped_grad(dot, -1.0),
    "leaves of the batch must have a leading example axis": lambda: per_example.clipped_grad(
        dot, 1.0
    )(W, X, X[:3]),
    "must be distinct positions between 0 and 1, got": lambda: grads_of(dot, batch_argnums=2),
    "method must be one of": lambda: per_example.grad_norms(dot, method="gost"),
}
