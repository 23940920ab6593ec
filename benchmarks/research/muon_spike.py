"""What Muon makes of one bad batch, by the limit of its group.

  python benchmarks/research/muon_spike.py

A small regression, 300 steps of `optax.contrib.muon`. The targets of the batch at step 150 are
noise, a thousand times too large. Printed are the mean losses of good batches before it and after,
and those of the last steps without it.
"""

import math

import jax
import jax.numpy as jnp
import optax

import optaxclip
from optaxclip import scopes, thresholds

STEPS, SPIKE = 300, 150
SPANS = {
    "before": (130, 150),
    "2 to 20 after": (152, 170),
    "20 to 50": (170, 200),
    "50 to 100": (200, 250),
    "120 to 150": (270, 300),
}
WEIGHTS = jax.random.normal(jax.random.key(9), (16, 8)) / 4


def loss_fn(params, x, y):
    """Of a hidden layer with tanh."""
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] + params["c"] - y) ** 2)


def muon(limit):
    """Muon behind a clip with a norm for its group and one for Adam's."""
    return optax.chain(optaxclip.clip_by(scopes.muon(), limit), optax.contrib.muon(0.02))


WAYS = {
    f"limit {limit}": muon({"adam": 1.0, "muon": limit})
    for limit in (math.inf, 100.0, 10.0, 5.0, 2.0, 1.0)
} | {
    "thresholds.zscore()": muon(thresholds.zscore()),
    "no limit, skip_above": optaxclip.skip_above(
        muon({"adam": 1.0, "muon": math.inf}), thresholds.window(6.0, 128, record="accepted")
    ),
}


def train(tx, scale):
    """The losses of all steps, and the norms of Muon's gradients."""
    first, last = jax.random.split(jax.random.key(0))
    params = {
        "a": jax.random.normal(first, (16, 32)) / 4,
        "b": jax.random.normal(last, (32, 8)) / 6,
        "c": jnp.zeros(8),
    }

    def step(carry, now):
        params, state = carry
        key, count = now
        x = jax.random.normal(key, (64, 16))
        good = jnp.sin(2 * x @ WEIGHTS)
        bad = scale * jax.random.normal(key, good.shape)
        y = jnp.where((count == SPIKE) & (scale > 1), bad, good)
        grads = jax.grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        norm = optax.tree.norm([grads["a"], grads["b"]])
        return (params, state), (loss_fn(params, x, good), norm)

    steps = jax.random.split(jax.random.key(1), STEPS), jnp.arange(STEPS)
    return jax.lax.scan(step, (params, tx.init(params)), steps)[1]


def main():
    """Prints the table."""
    print(f"{'':22}" + "".join(f"{name:>15}" for name in (*SPANS, "without it")))
    for name, tx in WAYS.items():
        losses, norms = jax.jit(jax.vmap(lambda scale, tx=tx: train(tx, scale)))(
            jnp.array([1.0, 1e3])
        )
        means = [losses[1, start:stop].mean() for start, stop in SPANS.values()]
        print(f"{name:22}" + "".join(f"{x:15.3f}" for x in (*means, losses[0, -30:].mean())))
    usual, spike = jnp.median(norms[1, 100:SPIKE]), norms[1, SPIKE]
    print(f"norms of Muon's gradients: usually {usual:.2f}, of the bad batch {spike:.0f}")


if __name__ == "__main__":
    main()
