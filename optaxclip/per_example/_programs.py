"""Reads the program of one example's loss for what `vmap` over examples would do wrong."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

MIXING = frozenset({"conv_general_dilated", "custom_vjp_call"})
"""Operations after which the compiler may multiply the numbers of an example by another's zeros.

XLA (JAX 0.10.2) does so with convolutions. What a `custom_vjp` runs backward is not in the program.
"""
_RBG = {"key<rbg>": {"random_bits"}, "key<urbg>": {"random_bits", "random_split", "random_fold_in"}}
"""For types of keys, the operations that use only the first key under `vmap` (JAX 0.10.2)."""


def mixes_examples(program: Any) -> bool:
    """Returns `True` if a non-finite example may make the gradients of other examples non-finite.

    `0 * nan` is NaN, so a product with another example's zeros is not 0.
    """
    return any(
        eqn.primitive.name in MIXING or any(map(mixes_examples, _programs_in(eqn)))
        for eqn in program.eqns
    )


def refuse_shared_bits(program: Any, num_params: int) -> None:
    """Refuses random bits from keys of the examples if all examples would get the first one's."""
    depends = [i >= num_params for i in range(len(program.invars))]
    _follow(program, depends)


def _follow(program: Any, depends: Sequence[bool]) -> list[bool]:
    """For each output of a program, whether it depends on the example, as the inputs are said to.

    Raises:
      ValueError: if random bits do, and their generator draws all examples' bits from one key.
    """
    # A literal has a value, and is no variable.
    found = {v for v, flag in zip(program.invars, depends, strict=True) if flag}

    def flags(variables: Sequence[Any]) -> list[bool]:
        return [not hasattr(v, "val") and v in found for v in variables]

    for eqn in program.eqns:
        given = flags(eqn.invars)
        if not any(given):
            continue
        _refuse_rbg(eqn, given)
        outputs = [True] * len(eqn.outvars)
        for inner in _programs_in(eqn):
            outputs = _follow_inner(eqn, inner, given)
        found.update(v for v, flag in zip(eqn.outvars, outputs, strict=True) if flag)
    return flags(program.outvars)


def _follow_inner(eqn: Any, inner: Any, given: list[bool]) -> list[bool]:
    """As `_follow`, for a program inside an operation."""
    every = [True] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        first = eqn.params["num_consts"]
        end = first + eqn.params["num_carry"]
        while True:
            outputs = _follow(inner, given)
            carry = [a or b for a, b in zip(given[first:end], outputs, strict=False)]
            if carry == given[first:end]:
                return outputs
            given = [*given[:first], *carry, *given[end:]]
    if len(inner.invars) == len(given):
        outputs = _follow(inner, given)
        return outputs if len(outputs) == len(every) else every
    if len(inner.invars) + 1 == len(given) and eqn.primitive.name == "cond":
        _follow(inner, given[1:])
    else:
        _follow(inner, [True] * len(inner.invars))
    return every


def _refuse_rbg(eqn: Any, given: list[bool]) -> None:
    name, of_key = eqn.primitive.name, str(eqn.invars[0].aval.dtype)
    if given[0] and (name == "rng_bit_generator" or name in _RBG.get(of_key, ())):
        kind = {"key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}.get(of_key, "lax.rng_bit_generator")
        raise ValueError(
            "keys of examples must be of a type whose bits vmap draws from each key, as of "
            f"'threefry2x32', got {kind!r}, with which JAX draws the bits of all examples from the "
            "first key, so that all change if the first example leaves; make the keys by "
            "jax.random.key(seed, impl='threefry2x32')"
        )


def _programs_in(eqn: Any) -> Iterator[Any]:
    """The programs inside an operation, as of a loop, without their constants."""
    values = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
    yield from (getattr(x, "jaxpr", x) for x in values if hasattr(x, "eqns"))
