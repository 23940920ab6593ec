"""Bounds on the rounding errors of norms and sums, for any order of summation.

A sum of `n` products in floating point, in any order, is `sum_i x_i y_i (1 + e_i)` with
`|e_i| <= g(n)`, where `g(n) = n u / (1 - n u)` and `u` is the unit roundoff (Higham, 2002, Accuracy
and Stability of Numerical Algorithms, 3.1). Furthermore, `(1 + g(m)) (1 + g(n)) <= 1 + g(m + n)`.
TPUs and other platforms compute float32 products from bfloat16 products. `PRODUCT` roundings allow
for the larger error.

Let `x_t` and `d_t` be the inputs and the cotangents of a layer at position `t` of `T`, let `K` and
`N` be the numbers of their elements, and let `A = sum_t |x_t| |d_t|`. The gradient is
`G = sum_t x_t d_t'`, and its norm is at most `A`.

**Norms from Gram matrices.** The squared norm is `S = sum_ts X_ts D_ts`, with the Gram matrices
`X_ts = x_t . x_s` and `D_ts = d_t . d_s`. Let `X'` and `D'` be the computed matrices. The errors of
their elements are at most `g_K |x_t| |x_s|` and `g_N |d_t| |d_s|`, where `g_K = g(K + PRODUCT)`. If
an inner product of `K` terms is computed in `m` pieces, a term is part of `K / m + m - 1`
additions. The errors are related by

    X D - X' D' = -(X' - X) D' - X' (D' - D) + (X' - X) (D' - D).

The products are rounded once and summed along their rows of `T` terms, and then over the rows of
all `G` matrices of the parameter. Therefore, the error of the computed `S` is at most

    g_K sum_ts |x_t| |x_s| |D'_ts| + g_N sum_ts |X'_ts| |d_t| |d_s| + g_K g_N A^2
        + g(T + G T + 1) sum_ts |X'_ts D'_ts|.

The norms `|x_t|` and `|d_t|` are computed from the diagonals. Let `tiny` be the smallest normal
number. Since `|x_t|^2 (1 - g_K) <= X'_tt + K tiny`, `|x_t|` is at most
`(1 + g_K) sqrt(X'_tt + K tiny)`. The difference of `g_K / 2`, which is more than 4 roundings,
allows for the computation of the bound. If squares overflow, the bound is infinite, and the norm is
computed from the gradient.

If positions are far from parallel, as in typical examples, these sums are a small multiple of `S`,
while `A^2` is about `T S`. The row terms of a table that is also a factor are bounded in the same
way. The error of products that underflow is at most `tiny`, which adds
`tiny * (K (sum_t |d_t|)^2 + N (sum_t |x_t|)^2 + T^2)` and a multiple of `tiny^2`.

**Norms from gradients.** The gradient has elements `sum_t x_tk d_tn (1 + e_tkn)` with
`|e| <= g(T + PRODUCT)`. The matrix of the errors at position `t` has a norm of at most
`g(T + PRODUCT) |x_t| |d_t|`, so the error of the gradient is at most
`g(T + PRODUCT) * A = delta * A`. If a gradient is stored in bfloat16, for its norm and for the sum,
its error increases by a fraction `ROUNDED` of its norm.

**Sums.** The sum of the clipped examples contains `c d_t` instead of `d_t`, or `c x_t` instead of
`x_t`, where `c` is the factor of the example, which is multiplied in as two numbers. Therefore, the
contribution of an example differs from `c G` by at most `g(T + PRODUCT + 2) * c A`, and its norm is
at most `c (|G| + delta' A)`. The contributions of all examples are summed unchanged, and their sum
is rounded like any floating-point sum. If many positions make `delta'` too large, the gradient and
the sum are computed in `m` pieces, one after another, and `T` is replaced by `T / m + m`. However,
sums for convolution kernels are not split.

**Factors.** Examples are clipped according to `bound = (an upper bound on |G|) + delta' A`. If the
factor is at most `threshold / bound`, the contribution is at most `threshold`. An example's bound
only depends on that example. However, the sum adds terms of size `c A`, and their rounding depends
on the rest of the batch. Therefore, factors are computed from at least `CANCELLED * A`.

For extreme examples, `c d_t` would be out of range. Therefore, `x_t` is divided by a power of two
near its size, and `d_t` is multiplied by it. Then `x_t` is about 1, and `c d_t` is at most `c A`.
The threshold is reduced by the possible underflow, which only matters for thresholds below 1e-28.

Layers that share a parameter count as one layer with all of their positions. For stacked layers,
`A^2` and the squared norms are sums over the layers, by the Minkowski inequality.
"""

import math
from typing import Any

import jax.numpy as jnp

PRODUCT = 8  # The number of roundings that are allowed for the error of a product.
# The maximum relative error of a float32 number as a sum of two bfloat16 numbers of 8 bits.
OTHER_ERRORS = 2.0**-16
ROUNDED = 2.0**-8 + 2.0**-15  # The maximum relative error of rounding to bfloat16.
CANCELLED = 2.0**-10  # The minimum fraction of `A` from which factors are computed.
# Norms whose relative `cancellation_error` exceeds this threshold are computed from gradients.
CANCELLATION_LIMIT = 0.135


def relative_error(count: int, unit: float) -> float:
    """Returns `g(count)`, a bound on the relative error of `count` roundings."""
    return count * unit / (1 - count * unit) if count * unit < 0.5 else float("inf")


def unit_roundoff(dtype: Any, is_half: bool = False) -> float:
    """Returns the unit roundoff of sums in `dtype`, for factors with 16 bits if `is_half`."""
    # Matrix units truncate sums of 16-bit products. Other sums are rounded to the nearest number.
    eps = float(jnp.finfo(dtype).eps)
    return eps if is_half else eps / 2


def additions(size: int, pieces: int) -> int:
    """Returns the number of additions per term of an inner product that is summed in pieces."""
    return size // pieces + pieces - 1 + PRODUCT


def pieces_of_inner(size: int) -> int:
    """Returns the number of pieces for which an inner product loses few digits."""
    numbers = [n for n in (1, 2, 4, 8, 16, 32, 64) if size % n == 0]
    longest = size if size <= 4096 else 2048
    return next((n for n in numbers if size <= longest * n), numbers[-1])


def pieces(positions: int, size: int) -> int:
    """Returns a divisor of `size`, the number of pieces for which sums lose no digits."""
    # Typical examples have norms of about `A / sqrt(T)`.
    for number in (1, 2, 4, 8, 16, 32, 64):
        lost = (positions / number + number) * math.sqrt(positions) * 2.0**-24
        if size % number == 0 and lost < 0.002:
            return number
    return next(number for number in (64, 32, 16, 8, 4, 2, 1) if size % number == 0)
