"""Norms and responses by themselves, where their formulas have a special case."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import norms, ops, responses

SIZES = np.float32([0.0, 1e-30, 0.5, 3.0, 1e30])


def test_clip_with_eps_returns_new_norm():
    threshold = jnp.full(5, 2.0)
    found = responses.clip_with_eps(1.0)(SIZES, threshold, threshold)
    np.testing.assert_allclose(found, [0, 1e-30, 0.5, 1.5, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: responses.auto_s(np.inf), "gamma must be finite and at least 0, got inf"),
        (lambda: responses.clip_with_eps(-1), "eps must be finite and at least 0, got -1"),
        (lambda: responses.band(2.0), "low must be between 0 and 1, got 2.0"),
        (
            lambda: responses.band(min_factor=2, max_factor=1),
            "max_factor must be between 2 and inf, got 1",
        ),
    ],
)
def test_response_arguments_must_be_in_range(make, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        make()


def test_responses_match_formulas():
    norm = np.float32([0.0, 0.1, 1.0, 2.0, 8.0, 0.1])
    trigger, target = np.float32([2, 2, 2, 2, 2, np.inf]), np.float32([1, 1, 1, 1, 1, np.inf])
    finite = norm[:5]
    expected = (
        (responses.clip, [0, 0.1, 1, 2, 1]),  # a norm at the trigger stays
        (responses.normalize, np.ones(5)),
        (responses.smooth, finite / np.sqrt(1 + finite**2)),
        (responses.auto_s(), finite / (finite + 0.01)),
        (responses.band(), [0, 1 / 3, 1, 2, 1]),
        (responses.band(0.0, min_factor=0.5), [0, 0.1, 1, 2, 4]),
        (responses.band(1.0, max_factor=2.0), [0, 0.2, 1, 2, 1]),
        (responses.band(min_factor=1, max_factor=1), finite),
        (responses.clip_with_eps(), [0, 0.1, 1 / (1 + 1e-6), 1, 1]),
    )

    @jax.jit
    def all_of_them(norm, trigger, target):
        found = [response(norm, trigger, target) for response, _ in expected]
        return found, responses.clip_with_eps(1.0).factor(norm, trigger, 4 * target)

    found, factor = all_of_them(norm, trigger, target)
    for (response, new), each in zip(expected, found, strict=True):
        np.testing.assert_allclose(each, [*new, 0.1], rtol=1e-6, atol=1e-9, err_msg=response)
    np.testing.assert_allclose(factor, [1, 1, 1, 1, 4 / 9, 1], rtol=1e-6)


def test_lp_returns_named_norms_and_validates_range():
    assert [norms.lp(p) for p in (1, 2.0, np.inf)] == [norms.l1, norms.l2, norms.linf]
    assert norms.lp(64).degree == 64
    for wrong in (0, 64.5):
        with pytest.raises(ValueError, match=rf"p must be positive and at most 64 .* got {wrong}"):
            norms.lp(wrong)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", [norms.lp(0.5), norms.lp(3), norms.l2], ids=repr)
def test_lp_norm_of_power_of_two_equals_element(norm):
    for size in (0.5, 1.0, 4.0):
        np.testing.assert_allclose(ops.global_norm(jnp.array([size, 0.0]), norm=norm), size)
        np.testing.assert_allclose(norm.finalize(norm.map(jnp.float32(size)), jnp.float32(1)), size)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", [norms.lp(0.5), norms.lp(3), norms.rms], ids=repr)
def test_norm_derivatives_equal_zero_at_zero(norm):
    slope = jax.grad(lambda x: norm.finalize(jnp.sum(norm.map(x)), jnp.float32(1)))
    np.testing.assert_allclose(slope(np.float32([4.0, 0.0])), [1, 0], rtol=1e-6)
    np.testing.assert_array_equal(slope(jnp.zeros(2)), [0, 0])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_rms_and_average_l2_survive_extreme_elements(scale):
    entries = jnp.float32([3, 4]) * np.float32(scale)
    for norm, expected in (("rms", 12.5**0.5), ("average_l2", 2.5)):
        found = ops.global_norm(entries, norm=norm) / np.float32(scale)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_norms_show_names_in_repr():
    assert [repr(norm) for norm in (norms.l2, norms.lp(2.5))] == ["Norm('l2')", "Norm('l2.5')"]


@pytest.mark.parametrize("p", ["3", None, True, 3j, [3], np.ones(2), jnp.float32(3)], ids=str)
def test_lp_rejects_non_numbers(p):
    with pytest.raises(TypeError, match=r"p must be a Python or NumPy number, got .* of type "):
        norms.lp(p)


def test_lp_accepts_numpy_numbers():
    assert norms.lp(np.float32(2.5)) is norms.lp(np.array(2.5)) is norms.lp(2.5)
