"""The multipliers of groups, from norms and thresholds, at both ends of the range."""

import functools

import jax
import numpy as np
import pytest

from optaxclip import responses
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.scale import _scale_leaf, compute_multiplier

INF, NAN = np.inf, np.nan
SLACK = 2.0**-20


@functools.partial(jax.jit, static_argnames=("response", "nonfinite", "strict"))
def multipliers(norm, trigger, target, response=responses.clip, nonfinite="nan", strict=False):
    measured = ScaledNorms.from_value(norm, 1.0)
    measured = measured.add_error_bound(SLACK) if strict else measured
    how = {"response": response, "nonfinite": nonfinite, "strict": strict}
    return compute_multiplier(measured, trigger, target, **how)


def factors(norms, triggers, targets=None, **how):
    """In float64, in which no product of the two numbers leaves the range."""
    norms, triggers = np.broadcast_arrays(np.float32(norms), np.float32(triggers))
    targets = triggers if targets is None else np.broadcast_to(np.float32(targets), norms.shape)
    power, ratio = (np.float64(x) for x in multipliers(norms, triggers, targets, **how))
    assert np.all(np.frexp(power)[0] == 0.5)
    return power * ratio, power


NORMS = [0, 1, 2, 8, INF, NAN, 1e30, 8, 8, 0, 8]
THRESHOLDS = [2, 2, 2, 2, 2, 2, 2, INF, 0, NAN, NAN]


@pytest.mark.parametrize(("nonfinite", "bad"), [("nan", NAN), ("zero", 0)])
def test_clip_multiplier_matches_expected_factors(nonfinite, bad):
    found, power = factors(NORMS, THRESHOLDS, nonfinite=nonfinite)
    expected = [1, 1, 1, 0.25, bad, bad, 2e-30, 1, 0, NAN, NAN]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(power[[0, 1, 2, 3, 7]], 1)


def test_other_responses_match_expected_factors():
    found, _ = factors(NORMS, THRESHOLDS, response=responses.normalize)
    expected = [1, 2, 1, 0.25, NAN, NAN, 2e-30, 1, 0, NAN, NAN]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # Between the norm to reach and the one above which to act, nothing is done.
    found, _ = factors([3, 4, 8, 1], 4, 2)
    np.testing.assert_allclose(found, [1, 1, 0.25, 1], rtol=1e-6)
    found, power = factors([8, 1, 3], 2, response=responses.clip_with_eps(1.0))
    np.testing.assert_allclose(found, [2 / 9, 1, 0.5], rtol=1e-7)
    np.testing.assert_array_equal(power, 1)


def test_multiplier_represents_factors_beyond_float32_range():
    for response in (responses.clip, responses.clip_with_eps(0.0)):
        found, _ = factors([1e30, 1e30, 3e38], [1e-30, 1e-20, 1e-37], response=response)
        np.testing.assert_allclose(found, [1e-60, 1e-50, 1e-37 / 3e38], rtol=2e-6)
    found, _ = factors([1e-30, 1e-20, 1.5e-38], [1e30, 1e20, 1], response=responses.normalize)
    np.testing.assert_allclose(found, [1e60, 1e40, 1 / 1.5e-38], rtol=2e-6)


def test_strict_multiplier_lowers_factors_slightly():
    norms = np.random.default_rng(0).uniform(3, 9, 50).astype(np.float32)
    for response in (responses.clip, responses.clip_with_eps(0.0)):
        found, _ = factors([*norms, 1], 2, response=response, strict=True)
        new = found[:-1] * norms * (1 + SLACK)
        assert np.all(new < 2)
        assert np.all(new > 2 * (1 - 2e-6))
        assert found[-1] == 1


def test_scale_applies_multiplier_and_keeps_unclipped_bits():
    subnormal, far = np.float32(1e-40), np.float32(2.0**100)
    x = np.array([[1, subnormal, INF, 3], [far, 2, NAN, -3]], np.float32)
    power, ratio = np.float32([far, 1, 1, 1]), np.float32([1 / far, 1, 0, 0.5])

    @functools.partial(jax.jit, static_argnames="zeroes")
    def scaled(x, *columns, zeroes):
        return _scale_leaf(x, by=columns, axes=(0,), strict=False, zero_nonfinite=zeroes)

    found = scaled(x, power, ratio, zeroes=True)
    np.testing.assert_array_equal(found[:, 1:], [[subnormal, 0, 1.5], [2, 0, -1.5]])
    np.testing.assert_array_equal(scaled(x, power, ratio, zeroes=False)[:, 2], [NAN, NAN])
    # With a third number, entries of at most this modulus stay, whatever the factor.
    above = np.float32([0, 0, 0, 3])
    found = scaled(x, power, ratio, above, zeroes=False)
    np.testing.assert_array_equal(found[:, 3], x[:, 3])
