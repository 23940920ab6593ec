"""Bounds on the rounding errors of norms and sums, for any order of summation.

A sum of `n` products in floating point, added up in any order, is `sum_i x_i y_i (1 + e_i)` with
`|e_i| <= g(n)`, where `g(n) = n u / (1 - n u)` and `u` is the unit roundoff (Higham, 2002, Accuracy
and Stability of Numerical Algorithms, 3.1). And `(1 + g(m)) (1 + g(n)) <= 1 + g(m + n)`. On a
platform that makes products of float32 from products of bfloat16, such as a TPU, the error of a
product is larger than `u`; `PRODUCT` roundings allow for it.

Write `x_t` and `d_t` for the inputs and the cotangents of a layer at position `t` of `T`, `K` and
`N` for the numbers of their entries, `A = sum_t |x_t| |d_t|`, and `G = sum_t x_t d_t'` for the
gradient, whose norm is at most `A`.

**From Gram matrices** `X_ts = x_t . x_s` and `D_ts = d_t . d_s` the square of the norm is
`S = sum_ts X_ts D_ts`. Let `X'` and `D'` be the computed matrices. Their entries are off by at most
`g_K |x_t| |x_s|` and `g_N |d_t| |d_s|`, where `g_K = g(K + PRODUCT)`; a term of an inner product of
`K` terms that is computed in `m` parts takes part in `K / m + m - 1` additions. Because

    X D - X' D' = -(X' - X) D' - X' (D' - D) + (X' - X) (D' - D),

and because each product is rounded once and added up along its row of `T` terms, and then over the
rows of all `G` matrices of the parameter, the computed `S` is off by at most

    g_K sum_ts |x_t| |x_s| |D'_ts| + g_N sum_ts |X'_ts| |d_t| |d_s| + g_K g_N A^2
        + g(T + G T + 1) sum_ts |X'_ts D'_ts|.

The norms `|x_t|` and `|d_t|` come from the diagonals. As `|x_t|^2 (1 - g_K) <= X'_tt + K tiny`,
where `tiny` is the least normal number, `|x_t|` is at most `(1 + g_K) sqrt(X'_tt + K tiny)`; this
leaves `g_K / 2`, more than 4 roundings, for the computation of the bound itself. If squares
overflow, the bound is infinite, and the norm comes from the gradient.

If positions are far from parallel, as in an ordinary example, these sums are a small multiple of
`S`, while `A^2` is about `T S`. If a table is also a factor, what its rows add is bounded in the
same way. Products that underflow are off by `tiny` at most, which adds
`tiny * (K (sum_t |d_t|)^2 + N (sum_t |x_t|)^2 + T^2)`, and a multiple of `tiny^2`.

**The gradient itself** has entries `sum_t x_tk d_tn (1 + e_tkn)` with `|e| <= g(T + PRODUCT)`. The
matrix of the errors of position `t` has at most the norm `g(T + PRODUCT) |x_t| |d_t|`, so the
computed gradient is off by at most `g(T + PRODUCT) * A = delta * A`. A gradient that is kept in
bfloat16, for its norm and for the sum, is off by another `ROUNDED` of its norm.

**The sum** of the clipped examples has `c d_t` in place of `d_t`, or `c x_t` in place of `x_t`,
where `c` is the factor of the example, multiplied in as two numbers. So what one example adds to it
is off from `c G` by at most `g(T + PRODUCT + 2) * c A`, and has at most the norm
`c (|G| + delta' A)`. The other examples of a batch are added as they are; their sum is rounded,
like all floating-point sums. If there are so many positions that `delta'` would matter, the
gradient and the sum are added up in `m` pieces one after another, and `T / m + m` takes the place
of `T`; but sums for kernels of convolutions are not cut.

So an example is clipped by `bound = (an upper bound of |G|) + delta' A`, which is never less than
its norm: with a factor of at most `threshold / bound` it adds at most `threshold`. All of this is computed
for each example alone. But the sum adds terms of the size `c A`, whose rounding depends on all
others: so factors are computed from at least `CANCELLED * A`. Of extreme examples `c d_t` would
leave the range, so `x_t` is divided by a power of two near its size, and `d_t` multiplied by it:
`x_t` is about 1, and `c d_t` at most `c A`. What is lost below the normal numbers is taken from the
threshold, of which it is a part that can be seen below 1e-28. Several layers that
share a parameter count as one layer with all of their positions; for stacked layers, `A^2` and the
squares of the norms are sums over the layers, by the inequality of Minkowski.
"""

import math
from typing import Any

import jax.numpy as jnp

PRODUCT = 8
"""How many roundings are allowed for the error of one product."""

OTHER_ERRORS = 2.0**-16
"""The largest relative error of a float32 number as the sum of two of bfloat16 (8 digits each)."""

ROUNDED = 2.0**-8 + 2.0**-15
"""The largest relative error of a number that is rounded to bfloat16."""

CANCELLED = 2.0**-10
"""Factors are computed from at least this share of `A`."""

CANCELLATION_LIMIT = 0.135
"""The norm has lost digits if the root of what rounding may add exceeds this share of it."""


def relative_error(count: int, unit: float) -> float:
    """`g(count)`, the bound on the relative error of `count` roundings."""
    return count * unit / (1 - count * unit) if count * unit < 0.5 else float("inf")


def unit_roundoff(dtype: Any, is_half: bool = False) -> float:
    """The unit roundoff of sums in `dtype`, float32 or float64.

    Matrix units truncate the sums of products of factors with 16 bits; others round to nearest.
    """
    eps = float(jnp.finfo(dtype).eps)
    return eps if is_half else eps / 2


def additions(size: int, pieces: int) -> int:
    """How many additions a term takes part in, for an inner product that is summed in pieces."""
    return size // pieces + pieces - 1 + PRODUCT


def pieces_of_inner(size: int) -> int:
    """How many pieces to sum an inner product of this size in, so that few digits are lost."""
    numbers = [n for n in (1, 2, 4, 8, 16, 32, 64) if size % n == 0]
    longest = size if size <= 4096 else 2048
    return next((n for n in numbers if size <= longest * n), numbers[-1])


def pieces(positions: int, size: int) -> int:
    """How many pieces to add up products over positions in, so that an ordinary example loses none.

    The norm of an ordinary example is about `A / sqrt(T)`. The pieces must divide `size`.
    """
    for number in (1, 2, 4, 8, 16, 32, 64):
        lost = (positions / number + number) * math.sqrt(positions) * 2.0**-24
        if size % number == 0 and lost < 0.002:
            return number
    return next(number for number in (64, 32, 16, 8, 4, 2, 1) if size % number == 0)
