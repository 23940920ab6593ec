"""Functions of single numbers: what each promises, at both ends of the range and at 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip._base.numerics as numerics

INFO = np.finfo(np.float32)
TINY, MAX, SUBNORMAL = float(INFO.tiny), float(INFO.max), float(INFO.smallest_subnormal)
NAN, INF = np.nan, np.inf


def compiled(fn, *columns):
    """The results of one program, which sees no number as a constant."""
    return jax.jit(fn)(*(np.asarray(column, np.float32) for column in columns))


def test_powers_of_two_match_numpy():
    x = [0.0, TINY, 0.75, 1.0, 3.0, 2.0**-126, 2.0**127, MAX, INF, NAN]

    def powers(x):
        below = numerics.floor_pow2(x)
        of_size = numerics.clamp_pow2(numerics.floor_pow2_unclamped(x))
        exact = numerics.reciprocal_pow2(below)
        return numerics.floor_pow2_unclamped(x), below, of_size, exact, numerics.nextafter_up(x)

    leading, below, of_size, exact, above = compiled(powers, x)
    most = 2.0**126
    expected = [0, TINY, 0.5, 1, 2, TINY, 2.0**127, 2.0**127, INF, INF]
    np.testing.assert_array_equal(leading, np.float32(expected))
    expected = [1, TINY, 0.5, 1, 2, TINY, most, most, 1, 1]
    np.testing.assert_array_equal(below, np.float32(expected))
    np.testing.assert_array_equal(of_size, np.float32([TINY, *expected[1:8], most, most]))
    np.testing.assert_array_equal(exact, 1 / np.float32(expected))
    finite = np.float32(x[1:7])
    np.testing.assert_array_equal(above[1:7], np.nextafter(finite, np.float32(INF)))
    assert (above[0].view(np.int32), above[7]) == (1, INF)


def test_division_and_root_derivatives_stay_finite():
    x, y = [6.0, 1.0, 0.0, -3.0, 1e-36], [2.0, 0.0, 0.0, -1e36, 1e-36]

    def quotients(x, y):
        def quotient(x, y):
            return numerics.divide_no_nan(x, y, 7.0)

        slopes = jax.vmap(jax.grad(quotient, argnums=(0, 1)))(x, y)
        roots = jax.vmap(jax.value_and_grad(numerics.safe_sqrt))(jnp.abs(x))
        return quotient(x, y), slopes, roots

    found, (of_x, of_y), (roots, of_roots) = compiled(quotients, x, y)
    np.testing.assert_allclose(found, np.float32([3, 7, 7, 3e-36, 1]), rtol=1e-6)
    np.testing.assert_allclose(of_x, np.float32([0.5, 0, 0, -1e-36, 1e36]), rtol=1e-6)
    np.testing.assert_allclose(of_y[:3], [-1.5, 0, 0], rtol=1e-6)
    assert np.isfinite(of_y).all()
    expected = np.sqrt(np.abs(np.float32(x)))
    np.testing.assert_allclose(roots, expected, rtol=1e-6)
    expected[2] = INF  # of which the derivative is 0
    np.testing.assert_allclose(of_roots, 0.5 / expected, rtol=1e-6)


def test_averages_and_products_stay_in_range():
    def numbers(old, new, share, x, log_factor):
        return numerics.lerp(old, new, share), numerics.scale_by_exp(x, log_factor)

    old, new, share = [4.0, 1e30, 2.0], [8.0, 1.0, 4.0], [0.25, 1.0, 0.0]
    x = [3.0, 0.0, INF, 2.0, TINY, MAX, 0.5, 0.5]
    logs = [np.log(2), 9.0, -9.0, 200.0, -1.0, 1.0, -200.0, 1.0]
    averages, products = compiled(numbers, old, new, share, x, logs)
    np.testing.assert_array_equal(averages, [5.0, 1.0, 2.0])
    expected = np.float32([6, 0, INF, MAX, TINY, MAX, TINY, 0.5 * np.e])
    np.testing.assert_allclose(products, expected, rtol=1e-6)


def test_combine_norms_avoids_overflow():
    def norms(x):
        return [numerics.combine_norms(each) for each in (x, x * 1e38, x * 1e-37, x[:0], x * 0)]

    found = compiled(norms, [3.0, 0.0, 0.4])
    expected = np.hypot(3, 0.4)
    np.testing.assert_allclose(
        found, np.float32([expected, expected * 1e38, expected * 1e-37, 0, 0]), rtol=1e-6
    )
    root, unit = compiled(numerics.combine_norms_factored, [3e38, 3e38])
    assert float(unit) == 2.0**126  # the product with the root is out of range
    np.testing.assert_allclose(float(root) * float(unit), np.hypot(3e38, 3e38), rtol=1e-6)


def test_saturating_cast_bounds_finite_values():
    x = np.float32([1.0, -1e6, 1e6, INF, -INF, NAN])
    np.testing.assert_array_equal(
        numerics.saturating_cast(x, jnp.dtype(jnp.float16)),
        np.float16([1, -65504, 65504, INF, -INF, NAN]),
    )
    found = numerics.saturating_cast(x, jnp.dtype(jnp.float8_e4m3fn)).astype(jnp.float32)
    np.testing.assert_array_equal(found, np.float32([1, -448, 448, 448, -448, NAN]))
    half = np.float16([2.0, INF])
    wide = numerics.saturating_cast(half, jnp.dtype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, half)
    np.testing.assert_array_equal(
        numerics.clamp_to_finite(jnp.float32([INF, -INF, 2])), np.float32([MAX, -MAX, 2])
    )
    pair = numerics.promote_dtypes([jnp.zeros(1, jnp.float16), jnp.ones(1, jnp.float32)])
    assert [each.dtype for each in pair] == [jnp.float32] * 2
    assert numerics.promote_dtypes([]) == []


def test_real_and_imaginary_parts_map_separately():
    z, x = np.complex64([1 + 2j]), np.float32([3])
    np.testing.assert_array_equal(numerics.map_real_imag(lambda part: 2 * part + 1, z), [3 + 5j])
    np.testing.assert_array_equal(numerics.map_real_imag(lambda part: 2 * part + 1, x), [7])
    assert [len(numerics.split_complex(each)) for each in (z, x)] == [2, 1]


def test_accumulation_dtypes_match_element_dtypes():
    narrow, wide = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)
    for dtype, of_sums in (
        (jnp.bfloat16, narrow),
        (jnp.complex64, narrow),
        (jnp.float64, wide),
        (jnp.complex128, wide),
    ):
        assert numerics.accumulation_dtype(dtype) == of_sums
        assert numerics.norm_dtype([jnp.float16, dtype]) == of_sums
    assert numerics.norm_dtype([]) == narrow
    assert numerics.cast_elements(jnp.ones(2, jnp.complex64), narrow).dtype == jnp.complex64
    with jax.enable_x64(True):
        assert numerics.cast_elements(jnp.ones(2, jnp.complex64), wide).dtype == jnp.complex128
        assert numerics.cast_elements(jnp.ones(2, jnp.float32), wide).dtype == wide


@pytest.mark.parametrize(
    ("value", "is_real"),
    [
        *((2, True), (0.5, True), (np.int32(3), True), (np.ones(2), True), (np.float16(1), True)),
        *((True, False), (np.True_, False), (1j, False), (np.complex64(1), False), ("1", False)),
    ],
)
def test_real_numbers_exclude_bool_complex_and_str(value, is_real):
    assert numerics.is_real(value) == is_real


def test_norm_relative_error_grows_with_size():
    eps = float(INFO.eps)
    assert numerics.norm_relative_error(1, 2, eps) == pytest.approx(1.5 * eps)
    assert numerics.norm_relative_error(2**10, 1, eps) == pytest.approx(6.5 * eps)
    assert numerics.norm_relative_error(2**10, 2, eps) == pytest.approx(4 * eps)
    assert numerics.norm_relative_error(2**10, 3, eps) == pytest.approx(9 * eps)
    assert numerics.norm_relative_error(0, 2, eps) == numerics.norm_relative_error(1, 2, eps)
    (symbol,) = jax.export.symbolic_shape("n")
    assert numerics.norm_relative_error(symbol, 2, eps) == pytest.approx(11.5 * eps)
