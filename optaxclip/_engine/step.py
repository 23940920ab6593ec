"""The traced part of a clip: leaves and limits in, clipped leaves, rule state and record out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

import optaxclip._engine.masked as masked
import optaxclip.nonfinite as policies
from optaxclip._base.trees import is_sparse
from optaxclip._base.types import ClipInfo, NonFinite, NormTree, PyTree, Threshold
from optaxclip._engine.alike import for_each
from optaxclip._engine.blocks import Blocks
from optaxclip._engine.measure import already_measured, measure
from optaxclip._engine.record import updated_info
from optaxclip._engine.scale import multiplier, scale
from optaxclip.norms import Norm, as_norm
from optaxclip.responses import Response, as_response
from optaxclip.scopes import Grouping


@dataclasses.dataclass(frozen=True)
class Method:
    """What a clip does with the norms, limits apart; static under `jit`."""

    norm: Norm
    response: Response
    nonfinite: NonFinite
    strict: bool
    name: str

    @classmethod
    def checked(
        cls,
        norm: str | Norm,
        response: str | Response,
        nonfinite: str,
        strict: bool,
        name: str,
    ) -> "Method":
        """A method from what a user passed."""
        policy = policies.as_policy(nonfinite)
        return cls(as_norm(norm), as_response(response), policy, bool(strict), name)


def _norms(leaves: list[Any], *, grouping: Grouping, norm: Norm) -> NormTree:
    blocks, measured = measure(_as_arrays(leaves), grouping, norm)
    return blocks.pack([block.norm for block in measured])


def _clip(
    leaves: list[Any],
    params: list[Any] | None,
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    given: Array | None,
    *,
    grouping: Grouping,
    method: Method,
    names: tuple[str, ...],
) -> tuple[list[Any], PyTree, ClipInfo]:
    """The way of the data: measure, limit, respond, scale."""
    leaves, bad = _as_arrays(leaves), []
    if method.nonfinite == "mask":
        leaves, bad = masked.mask(leaves, grouping)
    if given is None:
        blocks, measured = measure(leaves, grouping, method.norm)
    else:
        blocks = Blocks.of(grouping)
        measured = already_measured(given, sum(leaf.size for leaf in leaves))
    norms = [block.norm for block in measured]
    triggers, targets, rule_state = _limits(rule, rule_state, blocks, norms, params, method.norm)
    multipliers = [
        multiplier(*block, response=method.response, nonfinite=method.nonfinite)
        for block in zip(measured, triggers, targets, strict=True)
    ]
    bad = blocks.gather(bad) if bad else [~jnp.isfinite(block.norm) for block in measured]
    if method.nonfinite == "error":
        for flags, slot in zip(blocks.per_slot(bad), grouping.slots, strict=True):
            policies.check(flags, method.name, [names[i] for i in slot.members])
    info = updated_info(info, blocks, norms, triggers, multipliers, bad)
    rows = list(zip(leaves, blocks.per_leaf(multipliers), strict=True))
    scaled = for_each(scale, rows, [(axes, method.strict) for axes in grouping.axes])
    return scaled, rule_state, info


def _limits(
    rule: Threshold,
    state: PyTree,
    blocks: Blocks,
    norms: list[Array],
    params: list[Any] | None,
    norm: Norm,
) -> tuple[list[Array], list[Array], PyTree]:
    """The triggers and targets of all blocks, and the rule's state."""
    of_params = None
    if params is not None:
        theirs, measured = measure(_as_arrays(params), blocks.grouping, norm)
        of_params = [block.norm for block in measured]
        if theirs.slots != blocks.slots:
            of_params = blocks.gather(theirs.per_slot(of_params))
    if rule.memoryless:
        limits, state = rule.update(norms, state, of_params)
        return list(limits.trigger), list(limits.target), state
    packed = None if of_params is None else blocks.pack(of_params)
    limits, state = rule.update(blocks.pack(norms), state, packed)
    return blocks.unpack(limits.trigger), blocks.unpack(limits.target), state


_compiled_clip = jax.jit(_clip, static_argnames=("grouping", "method", "names"))
_compiled_norms = jax.jit(_norms, static_argnames=("grouping", "norm"))


def run(*operands: Any, method: Method, **static: Any) -> tuple[list[Any], PyTree, ClipInfo]:
    """`_clip` as one cached compiled call in eager mode; under a trace, part of that trace."""
    # In eager mode `checkify` raises at once, which a compiled call would not let it.
    inline = method.nonfinite == "error" or _is_traced(operands)
    return (_clip if inline else _compiled_clip)(*operands, method=method, **static)


def run_norms(leaves: list[Any], grouping: Grouping, norm: Norm) -> NormTree:
    """The norms alone, in the same way."""
    return (_norms if _is_traced(leaves) else _compiled_norms)(leaves, grouping=grouping, norm=norm)


def zero_norms(grouping: Grouping, dtype: jnp.dtype) -> NormTree:
    """Zeros of the norms' structure and shapes, from which rules make their state."""
    return jax.tree.map(
        jnp.zeros_like, grouping.pack([jnp.zeros(slot.shape, dtype) for slot in grouping.slots])
    )


def _is_traced(operands: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))


def _as_arrays(leaves: list[Any]) -> list[Any]:
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]
