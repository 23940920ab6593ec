"""A wrapper that resets the moments of an optimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip._border.devices as devices
import optaxclip.scopes as scopes
from optaxclip._base.arguments import checked_count
from optaxclip._base.states import check_state, increased, own_arrays, registered_state
from optaxclip._base.trees import flatten
from optaxclip._base.types import ClipState, PyTree, Threshold
from optaxclip._border.crossing import Transformation, transformation
from optaxclip._border.entries import as_arrays
from optaxclip._engine.clip import norms_by
from optaxclip._engine.options import Options, PlaceOptions, takes
from optaxclip._engine.record import initial_info
from optaxclip._engine.respond import Multiplier
from optaxclip._engine.scale import scale
from optaxclip.methods.judging import judged, zero_where
from optaxclip.methods.parts import marked, named, names_in
from optaxclip.methods.skipping import as_inner
from optaxclip.thresholds.calling import params_for
from optaxclip.thresholds.fixed import LimitLike, as_limit, rule_for


@registered_state
class ResetState(NamedTuple):
    """State of `reset_state`.

    Attributes:
      since: int32[], steps since the latest reset, or since the first step.
      num_resets: int32[], resets so far.
      judge: the `ClipState` of the rule `when`, for `optaxclip.monitor`; its `num_clipped` counts
        norms above the limit. It is `()` without a rule.
      inner_state: the wrapped optimizer's state.
    """

    since: Array
    num_resets: Array
    judge: ClipState | tuple[()]
    inner_state: PyTree


@takes(PlaceOptions)
def reset_state(
    inner: optax.GradientTransformation,
    *,
    every: int | None = None,
    when: LimitLike | None = None,
    only: Sequence[str] = ("mu", "nu"),
    warmup: int = 0,
    **options: Unpack[PlaceOptions],
) -> Transformation[ResetState]:
    """Sets an optimizer's moments to 0, regularly or after spikes (SPAM's momentum reset).

    A clip bounds what one gradient adds to the moments; a reset removes what is in them already.
    After every `every` steps, and after each step whose gradient a rule finds too large, the named
    parts of the optimizer's state become 0, even inside of a chain, `partition`, `masked`,
    `MultiSteps` (where each microbatch counts as a step), or a skip. The wrapper may itself be
    inside of these; it does not count a step that a skip around it drops. A field `count` or
    `steps` beside such a part becomes 0 too, so that bias correction starts again; counts of
    schedules go on. Structure, shapes, dtypes and shardings stay.

    The step that causes a reset is taken all the same. To keep a spike from moving the parameters
    too, wrap a skip, or put a clip in front. After a reset, Adam's next step is as long as its
    first step; `warmup` shortens it.

    When not to use it: the published gains are from runs with many spikes and many resets. In a
    calm run each reset throws away what the second moment has learned, which costs some steps of
    progress. A skip keeps most spikes out of the moments in the first place.

    Source: Huang et al., 2025, SPAM, arXiv 2501.06842, with `every=500, warmup=150`. In that code
    the bias correction does not start again, and the warm-up begins at 0.01.

    Args:
      inner: the optimizer.
      every: how many steps from one reset to the next; if None, there are no regular resets.
      when: a limit of the incoming gradient's global norm: a number, a schedule, or a rule from
        `optaxclip.thresholds`, whose trigger counts. There is a reset after a step with a norm
        above the limit, or one that is not finite. If None, no gradient causes a reset.
      only: the names of the parts: fields or keys of the state, such as "trace" of
        `optax.sgd(momentum=)`. Each must be in the state. They are not looked for among the names
        of parameters and hyperparameters.
      warmup: for this many steps after a reset, updates are multiplied by
        `(1 - cos(pi * t / warmup)) / 2`, where `t` counts these steps from 0.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

    Returns:
      A transformation with a `ResetState`, which passes all extra arguments on. Outside of a
      warm-up the updates are the optimizer's, bit for bit.

    Raises:
      ValueError: if neither `every` nor `when` is given, for a number out of its range, for a limit
        that is negative, NaN or not a scalar; in `init`, for a part that the state does not have.
      TypeError: if `inner` is not a transformation, or an argument has the wrong type.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.reset_state(optax.sgd(0.1, momentum=0.5), every=2, only=("trace",))
      >>> state = tx.init(jnp.ones(2))
      >>> for step in range(3):
      ...     updates, state = tx.update(jnp.array([4.0, 2.0]), state)
      ...     print(state.inner_state[0].trace, state.num_resets)
      [4. 2.] 0
      [0. 0.] 1
      [4. 2.] 1

      After spikes too:

      >>> rule = optaxclip.thresholds.zscore(z_thresh=6.0)
      >>> tx = optaxclip.reset_state(optax.adam(0.1), every=500, when=rule, warmup=150)
    """
    if every is None and when is None:
        raise ValueError("every or when must be given, because they say when to reset; got neither")
    inner, checked = as_inner(inner), Options.checked(**options)
    every = None if every is None else checked_count(every, "every")
    warmup, only = checked_count(warmup, "warmup", minimum=0), _checked_names(only)
    judge = None if when is None else _Judge(as_limit(when, "when"), checked)

    def init(params: PyTree) -> ResetState:
        params = devices.to_device(params)
        inner_state = inner.init(params)
        _check_parts(only, inner_state, params, checked.name)
        return ResetState(
            since=jnp.zeros((), jnp.int32),
            num_resets=jnp.zeros((), jnp.int32),
            judge=() if judge is None else judge.init(params),
            inner_state=inner_state,
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ResetState]:
        check_state(state, ResetState, checked.name, _WRAP_STATE, updates=updates)
        reset, judge_state = jnp.zeros((), bool), state.judge
        if judge is not None:
            reset, judge_state = judge.update(updates, state.judge, params)
        if every is not None:
            reset |= increased(state.since) >= every
        new, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        if isinstance(warmup, Array) or warmup:
            new = _warmed_up(new, state, warmup)
        flags, leaves, treedef = marked(inner_state, only, (updates, params))
        rows = zip(flags, leaves, strict=True)
        leaves = [zero_where(reset, leaf) if flag else leaf for flag, leaf in rows]
        return new, ResetState(
            since=jnp.where(reset, 0, increased(state.since)),
            num_resets=increased(state.num_resets, reset),
            judge=judge_state,
            inner_state=treedef.unflatten(leaves),
        )

    return transformation(init, update)


_WRAP_STATE = (
    "If the optimizer ran without resets until now, put its state into a fresh one: "
    "opt_state = tx.init(params)._replace(inner_state=old_opt_state)"
)


class _Judge(NamedTuple):
    """Decides from the gradient's norm whether to reset."""

    limit: Threshold | dict[str, Any]
    options: Options

    @property
    def rule(self) -> Threshold:
        """The rule for the global norm."""
        return rule_for(self.limit, [("tree", ())])

    def init(self, params: PyTree) -> ClipState:
        """The state before the first step."""
        grouping = scopes.tree()(flatten(params, "params"))
        info = initial_info(self.options.name, grouping)
        rule_state = own_arrays(self.rule.init(jnp.zeros(())))
        return ClipState(jnp.zeros((), jnp.int32), rule_state, info)

    def update(
        self, updates: PyTree, state: ClipState, params: PyTree | None
    ) -> tuple[Array, ClipState]:
        """Whether this gradient causes a reset, and the state after it."""
        relative_to = params_for(self.rule, params, self.options.name)
        param_norm = None if relative_to is None else self.norm(relative_to, "params")
        norm = self.norm(updates, "updates")
        found = judged(self.rule, state.rule, norm, self.options.name, param_norm)
        info = found.recorded(state.info, jnp.zeros((), bool))
        return found.is_out, ClipState(increased(state.steps), found.rule_state, info)

    def norm(self, tree: PyTree, argument: str) -> Array:
        """The global norm."""
        flat = flatten(tree, argument)
        return norms_by(scopes.tree(), flat, self.options)


def _warmed_up(updates: PyTree, state: ResetState, warmup: int | Array) -> PyTree:
    """The updates, shortened if the last reset was less than `warmup` steps ago."""
    share = state.since.astype(jnp.float32) / jnp.maximum(warmup, 1).astype(jnp.float32)
    is_over = (state.num_resets == 0) | (state.since >= warmup)
    # This is (1 - cos(pi * share)) / 2, which would lose digits if the cosine is near 1.
    factor = jnp.where(is_over, 1, jnp.square(jnp.sin(0.5 * jnp.pi * share)))
    by, flat = Multiplier(jnp.ones_like(factor), factor), flatten(updates, "updates")
    leaves = as_arrays(flat.measured_leaves())
    scaled = [scale(x, by, axes=tuple(range(x.ndim)), strict=False) for x in leaves]
    return flat.rebuild(scaled)


def _checked_names(only: Any) -> tuple[str, ...]:
    if isinstance(only, str) or not isinstance(only, Sequence):
        raise TypeError(f"only must be a sequence of names, such as ('mu', 'nu'), got {only!r}")
    if not only or not all(isinstance(name, str) for name in only):
        raise ValueError(f"only must hold strings, at least one, got {only!r}")
    return tuple(only)


def _check_parts(only: Sequence[str], state: PyTree, params: PyTree, name: str) -> None:
    """Checks that the optimizer's state has each named part, unless there are no parameters."""
    if not jax.tree.leaves(params):
        return
    missing = [part for part in only if not named(state, part, params)]
    if missing:
        raise ValueError(
            f"{name}: the optimizer's state has no parts named {missing}; for only= choose among "
            f"{names_in(state, params)}"
        )
