"""Whether a lower rate for some steps after a spike helps, on the study's spikes.

One batch in about 200 counts 100 times as much. The final loss of "lower" is to be seen beside that
of runs without a guard, with ZClip, and with `skip_above`; "zclip, lower" clips and lowers.

  python -m benchmarks.research.lower_rate
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip
from benchmarks.research.study import plan, running, tasks
from benchmarks.research.study.methods import METHODS, Method, Setting

CALM = 20
"""After a spike the rate rises from a twentieth to its whole in so many steps."""
CASES = (("lstm", "adamw", 1e-2), ("conv", "adamw", 1e-3), ("conv", "sgd", 0.1))
SEEDS, STEPS = 6, 400


def lowered(clips: bool) -> Method:
    """ZClip's rule finds the spikes; the gradient is clipped or not, and the rate is lowered."""

    def make(setting: Setting) -> optax.GradientTransformation:
        rule, inner = optaxclip.zclip(), METHODS["none"].make(setting)

        def init(params: Any) -> tuple:
            return rule.init(params), inner.init(params), jnp.int32(CALM)

        def update(grads: Any, state: tuple, params: Any = None) -> tuple:
            clipped, found = rule.update(grads, state[0])
            since = jnp.where(found.info.factor.min() < 1, 0, state[2] + 1)
            updates, moments = inner.update(clipped if clips else grads, state[1], params)
            rate = jnp.minimum((since + 1) / CALM, 1)
            updates = jax.tree.map(lambda u: (u * rate).astype(u.dtype), updates)
            return updates, (found, moments, since)

        return optax.GradientTransformation(init, update)

    return Method(make)


METHODS_TRIED = {name: METHODS[name] for name in ("none", "ZClip", "skip above")} | {
    "lower": lowered(clips=False),
    "zclip, lower": lowered(clips=True),
}


def main() -> None:
    """Prints the final losses, mean over the seeds."""
    effort = plan.Effort(steps=STEPS, seeds=SEEDS, tuning=1, chunk=SEEDS)
    print("| task | fault |", " | ".join(METHODS_TRIED), "|")
    print("|---" * (2 + len(METHODS_TRIED)) + "|")
    for task, optimizer, rate in CASES:
        runners = {
            name: running.Runner(tasks.ALL[task](), optimizer, method, effort)
            for name, method in METHODS_TRIED.items()
        }
        for fault in ("none", "spike"):
            cells = []
            for runner in runners.values():
                found, _ = runner([rate] * SEEDS, [fault] * SEEDS, range(SEEDS), 0.0)
                cells.append(f"{np.mean(plan.final(found.held_out)):.3f}")
            print(f"| {task}, {optimizer} {rate:g} | {fault} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
