"""Draws the picture of the page on low precision: a transformer in several formats.

  python docs/formats.py  # some minutes; `pictures.py` runs it too

Weights, moments and updates are float32. The loss converts the weights, so activations and
gradients have the format. For float8, only the weights and their gradients are rounded to it, and
products are bfloat16. All runs have the same seed.
"""

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # where `benchmarks` is

import jax
import jax.numpy as jnp
import optax
from jax import Array
from matplotlib.figure import Figure

import optaxclip
from benchmarks.research import text_model
from benchmarks.research.text_model import Params, normalize
from optaxclip import monitor, plots
from optaxclip.plots.style import legend_below

SIZE = text_model.Size(batch=8)
STEPS, WARMUP, RATE = 300, 30, 3e-3
GROWTH = 50
"""The loss scale doubles after this many good steps, because training is short."""
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)


class Way(NamedTuple):
    """A format, and whether the loss is scaled."""

    dtype: str
    is_scaled: bool = False


WAYS = {
    "float32": Way("float32"),
    "bfloat16": Way("bfloat16"),
    "float16": Way("float16"),
    "float16, `scale_loss`": Way("float16", is_scaled=True),
    "float8": Way("float8_e4m3fn"),
    "float8, `scale_loss`": Way("float8_e4m3fn", is_scaled=True),
}


class Run(NamedTuple):
    """Stores the held-out loss, and the state with the last histograms."""

    loss: float
    state: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def converted(x: Array, dtype: str) -> Array:
    """Rounds a weight and its gradient to a format."""
    rounded = x.astype(dtype)
    return rounded.astype(jnp.bfloat16) if jnp.dtype(dtype) == FLOAT8 else rounded


converted.defvjp(
    lambda x, dtype: (converted(x, dtype), None),
    lambda dtype, _, grad: (grad.astype(dtype).astype(jnp.float32),),
)


def loss_fn(params: Params, tokens: Array, dtype: str) -> Array:
    """Returns the loss; JAX's attention does not support float16 on CPUs (as of JAX 0.10.2)."""
    params = jax.tree.map(lambda x: converted(x, dtype), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs] + params["positions"][None]
    is_past = jnp.tril(jnp.ones((SIZE.context, SIZE.context), bool))

    def layer(x: Array, weights: Params) -> tuple[Array, None]:
        h = normalize(x, weights["attention_gain"]) @ weights["query_key_value"]
        q, k, v = jnp.split(h.reshape(*h.shape[:2], SIZE.heads, -1), 3, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(is_past, scores, jnp.finfo(scores.dtype).min)
        attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + attended.reshape(x.shape) @ weights["out"]
        h = normalize(x, weights["up_gain"]) @ weights["up"]
        return x + jax.nn.gelu(h) @ weights["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = normalize(x, params["gain"]) @ params["head"]
    found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return found.mean().astype(jnp.float32)


def optimizer(way: Way) -> optax.GradientTransformation:
    """Returns AdamW with clipping and a histogram of the unscaled gradients."""
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, STEPS)
    chain = optax.chain(
        monitor.histogram(every=1),
        optaxclip.clip_by_global_norm(1.0),
        optax.adamw(rate),
    )
    return (
        optaxclip.scale_loss(chain, growth_interval=GROWTH)
        if way.is_scaled
        else chain
    )


def train(way: Way, text: text_model.Text) -> Run:
    """Trains one run."""
    tx = optimizer(way)

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        params, state = carry
        scale = monitor.loss_scale(state) if way.is_scaled else 1.0
        tokens = text_model.batch(text.train, key, SIZE)
        grads = jax.grad(lambda p: scale * loss_fn(p, tokens, way.dtype))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: Params, state: Any, keys: Array) -> tuple[Any, Array]:
        (params, state), _ = jax.lax.scan(step, (params, state), keys)
        return state, loss_fn(params, text.held_out, way.dtype)

    params = text_model.initial(jax.random.key(0), SIZE)
    state, loss = run(
        params, tx.init(params), jax.random.split(jax.random.key(1), STEPS)
    )
    return Run(float(loss), state)


def draw(path: Path, dpi: int) -> None:
    """Trains in all formats, prints the table of the page, and draws float32 gradients."""
    text = text_model.read(SIZE)
    print(
        "| format | held-out loss | zero gradients | final loss scale | skipped steps |"
    )
    print("|---|---|---|---|---|")
    first = None
    for name, way in WAYS.items():
        run = train(way, text)
        first = first or run
        rows = monitor.histograms(run.state).values()
        zeros = sum(x.num_zero for x in rows) / sum(
            x.num_zero + x.counts.sum() for x in rows
        )
        cells = [f"{run.loss:.2f}", f"{100 * zeros:.1f}%"]
        if way.is_scaled:
            log = monitor.scalars(run.state)
            scale, skipped = (
                log[f"scale_loss/{x}"] for x in ("loss_scale", "num_skipped")
            )
            cells += [f"{scale:g}", f"{skipped:g}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    assert first is not None
    print(monitor.dtype_fit(first.state, FORMATS[0]))
    figure = Figure(figsize=(5.6, 7.4), layout="constrained")
    ax = plots.element_histogram(
        monitor.histograms(first.state), dtypes=FORMATS, ax=figure.subplots()
    )
    legend_below(ax)
    figure.savefig(path, dpi=dpi)


if __name__ == "__main__":
    draw(Path(__file__).with_name("numbers.png"), 200)
