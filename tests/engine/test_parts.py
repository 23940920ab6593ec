"""Norms and responses by themselves, where their formulas have a special case."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import norms, ops, responses

SIZES = np.float32([0.0, 1e-30, 0.5, 3.0, 1e30])


def test_a_response_with_a_factor_tells_the_new_norm_too():
    limit = jnp.full(5, 2.0)
    found = responses.clip_with_eps(1.0)(SIZES, limit, limit)
    np.testing.assert_allclose(found, [0, 1e-30, 0.5, 1.5, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: responses.auto_s(np.inf), "gamma must be a finite number and at least 0, got inf"),
        (lambda: responses.clip_with_eps(-1), "eps must be a finite number and at least 0, got -1"),
        (lambda: responses.band(2.0), "low must be a number of at most 1 and at least 0, got 2.0"),
        (
            lambda: responses.band(min_factor=2, max_factor=1),
            "max_factor must be a number of at most inf and at least 2, got 1",
        ),
    ],
)
def test_the_range_of_a_number_of_a_response_is_said(make, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        make()


def test_auto_s_without_gamma_is_normalize():
    limit = jnp.full(5, 2.0)
    found = responses.auto_s(0)(SIZES, limit, limit)
    np.testing.assert_array_equal(found, responses.normalize(SIZES, limit, limit))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", [norms.lp(0.5), norms.lp(3), norms.l2], ids=repr)
def test_powers_of_two_are_entries_like_others(norm):
    for size in (0.5, 1.0, 4.0):
        np.testing.assert_allclose(ops.global_norm(jnp.array([size, 0.0]), norm=norm), size)
        np.testing.assert_allclose(norm.finish(norm.map(jnp.float32(size)), jnp.float32(1)), size)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", [norms.lp(0.5), norms.lp(3), norms.rms], ids=repr)
def test_zeros_have_the_derivative_zero(norm):
    slope = jax.grad(lambda x: norm.finish(jnp.sum(norm.map(x)), jnp.float32(1)))
    np.testing.assert_allclose(slope(np.float32([4.0, 0.0])), [1, 0], rtol=1e-6)
    np.testing.assert_array_equal(slope(jnp.zeros(2)), [0, 0])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_means_of_squares_that_leave_the_range(scale):
    entries = jnp.float32([3, 4]) * np.float32(scale)
    for norm, expected in (("rms", 12.5**0.5), ("average_l2", 2.5)):
        found = ops.global_norm(entries, norm=norm) / np.float32(scale)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_norms_are_shown_by_their_names():
    assert [repr(norm) for norm in (norms.l2, norms.lp(2.5))] == ["Norm('l2')", "Norm('l2.5')"]


@pytest.mark.parametrize("p", ["3", None, True, 3j, [3], np.ones(2), jnp.float32(3)], ids=str)
def test_p_that_is_no_number(p):
    with pytest.raises(
        TypeError, match=r"p must be a number of Python or NumPy, .* got .* of type "
    ):
        norms.lp(p)


def test_p_may_be_a_number_of_numpy():
    assert norms.lp(np.float32(2.5)) is norms.lp(np.array(2.5)) is norms.lp(2.5)
