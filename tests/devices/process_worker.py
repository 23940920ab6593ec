"""One of the processes that train a model together; `test_processes.py` starts them.

It prints one line of JSON: for each way of placing the arrays, what every step reported.
"""

import argparse
import faulthandler
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor

NUM_STEPS, NUM_DEVICES = 8, 4
# What is added to the gradient's last row, which only the last process holds.
FAULTS = {3: 50.0, 5: np.nan}
# The processes differ along "data". `scale` is whole on every device.
SPECS = {
    "inner": P("data", "model"),
    "bias": P("model"),
    "outer": P("model", "data"),
    "scale": P(),
}
SHAPES = {"inner": (8, 16), "bias": (16,), "outer": (16, 4), "scale": (4,)}
BATCH = {"x": (12, 8), "y": (12, 4)}


def start() -> argparse.Namespace:
    """The devices, bounded in time, whatever happens to the other processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--patience", type=int, default=10, help="seconds to wait for a peer")
    parser.add_argument("--bound", type=int, default=90, help="seconds in all")
    parser.add_argument("--dies-at", type=int, help="the step at which this process is killed")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.bound, exit=True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // options.of)
    if options.of > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{options.port}",
            options.of,
            options.process,
            initialization_timeout=3 * options.patience,
            heartbeat_timeout_seconds=options.patience,
        )
    return options


def forward(params, x):
    return jnp.tanh(x @ params["inner"] + params["bias"]) @ params["outer"] * params["scale"]


def loss_fn(params, batch):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def split_loss_fn(params, batch):
    """The same on what one device holds."""

    def whole(x, spec):
        for axis, name in enumerate(spec):
            x = lax.all_gather(x, name, axis=axis, tiled=True)
        return x

    gathered = {name: whole(x, SPECS[name]) for name, x in params.items()}
    return lax.pmean(loss_fn(gathered, batch), ("data", "model"))


def train_step(tx, loss_fn, params, state, batch, fault):
    """A step of training; `fault` is added to one leaf of the gradient."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    grads["inner"] += fault
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss, grads["inner"]


def optimizer(specs=None):
    clips = (
        optaxclip.zclip(warmup_steps=2, max_norm=None, specs=specs),
        optaxclip.clip_by_global_norm(2.0, specs=specs),
    )
    return optaxclip.skip_nonfinite(optax.chain(*clips, optax.adamw(0.1)), specs=specs)


def train(how, mesh):
    """What each step reports: the loss, the clips' records, and how many NaNs are here."""

    def put(array, spec):
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    rng = np.random.default_rng(0)

    def draw(shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {name: put(draw(shape), SPECS[name]) for name, shape in SHAPES.items()}
    batch = {name: put(draw(shape), P("data")) for name, shape in BATCH.items()}
    if how == "jit":
        tx = optimizer({name: NamedSharding(mesh, spec) for name, spec in SPECS.items()})
        step = functools.partial(train_step, tx, loss_fn)
        state = jax.jit(tx.init)(params)
    else:
        tx = optimizer()
        state = jax.jit(tx.init)(params)
        state_specs = jax.tree.map_with_path(
            lambda path, _: SPECS.get(getattr(path[-1], "key", None), P()), state
        )
        step = jax.shard_map(
            functools.partial(train_step, tx, split_loss_fn),
            mesh=mesh,
            in_specs=(SPECS, state_specs, P("data"), P("data")),
            out_specs=(SPECS, state_specs, P(), SPECS["inner"]),
        )
    step = jax.jit(step)
    for number in range(NUM_STEPS):
        fault = np.zeros((SHAPES["inner"][0], 1), np.float32)
        fault[-1] = FAULTS.get(number, 0)
        params, state, loss, grads = step(params, state, batch, put(fault, P("data")))
        num_nan = sum(int(np.isnan(shard.data).sum()) for shard in grads.addressable_shards)
        yield {
            "loss": float(loss),
            "scale": np.asarray(params["scale"]).tolist(),
            "nan_here": num_nan,
            **monitor.scalars(state),
        }


def report(dies_at=None):
    """What both ways give on the first devices."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = {}
    for how in ("jit", "shard_map"):
        found[how] = []
        for number, step in enumerate(train(how, mesh)):
            found[how].append(step)
            if number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return found


def main():
    options = start()
    print(json.dumps(report(options.dies_at)), flush=True)


if __name__ == "__main__":
    main()
