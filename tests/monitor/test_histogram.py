"""Histograms have the counts of NumPy in float64, and say what other number formats lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import monitor, scopes
from optaxclip._base.ranges import TOO_LARGE, too_large

SATURATING = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
FORMATS = [
    name
    for name in dir(jnp)
    if name.startswith(("float", "bfloat")) and isinstance(getattr(jnp, name), type(jnp.float32))
]
FORMATS = [jnp.dtype(name) for name in FORMATS if name not in ("float_", "float8_e8m0fnu")]


def entries_of(dtype, seed=0):
    """Entries of all sizes that a format has, with the ends of other formats and all powers."""
    rng, info = np.random.default_rng(seed), jnp.finfo(dtype)
    low, high = np.log2(float(info.smallest_subnormal)) - 1, np.log2(float(info.max))
    ends = np.array([x.value for x in TOO_LARGE])
    with np.errstate(all="ignore"):
        sizes = np.concatenate(
            [
                2.0 ** rng.uniform(low, high, 4000),
                2.0 ** np.arange(np.ceil(low), high),
                *(np.nextafter(ends, to) for to in (0, np.inf)),
                *(np.nextafter(ends.astype(np.float32), np.float32(to)) for to in (0, np.inf)),
                ends,
                [0, -0.0, np.inf, -np.inf, np.nan],
            ]
        )
        return (sizes * rng.choice([-1, 1], len(sizes))).astype(dtype)


def moduli(x):
    with np.errstate(invalid="ignore"):
        return np.abs(x.astype(np.float64))


def assert_counts(found, sizes):
    finite = sizes[np.isfinite(sizes) & (sizes > 0)]
    bins = np.searchsorted(found.edges, finite, side="left") - 1
    np.testing.assert_array_equal(found.counts, np.bincount(bins, minlength=len(found.counts)))
    assert found.zeros == np.sum(sizes == 0)
    assert found.nonfinite == np.sum(~np.isfinite(sizes))
    assert found.num_nan == np.sum(np.isnan(sizes))


def histograms_of(tree, **options):
    tx = monitor.histogram(**options)
    return monitor.histograms(jax.jit(lambda x: tx.update(x, tx.init(x))[1])(tree))


NARROW = [dtype for dtype in FORMATS if dtype != np.float64 and dtype.name not in SATURATING[1:]]


def test_counts_and_shares_are_those_of_casts():
    tree = {dtype.name: entries_of(dtype) for dtype in NARROW}
    found = histograms_of(jax.tree.map(jnp.asarray, tree))
    for name, x in tree.items():
        sizes = moduli(x)
        assert_counts(found[name], sizes)
        finite = sizes[np.isfinite(sizes) & (sizes > 0)]
        for dtype in FORMATS:
            with np.errstate(over="ignore"):
                cast = finite.astype(dtype).astype(np.float64)
            assert found[name].below(dtype) == np.mean(cast == 0), (name, dtype)
            lost = ~np.isfinite(cast)
            if dtype.name in SATURATING:
                lost = finite >= too_large(dtype).value
            assert found[name].above(dtype) == np.mean(lost), (name, dtype)


def test_the_first_step_counts_and_every_third_after_it():
    tx = monitor.histogram(3, scope=scopes.tree())

    def step(state, x):
        return tx.update(x, state)[1], state

    xs = jnp.asarray(np.repeat(2.0 ** np.arange(8)[:, None], 5, axis=1), jnp.float32)
    _, states = jax.jit(lambda xs: jax.lax.scan(step, tx.init(xs[0]), xs))(xs)
    for i, (last, size) in enumerate([(-1, None), *3 * [(0, 1)], *3 * [(3, 8)], (6, 64)]):
        found = monitor.histograms(jax.tree.map(lambda x, i=i: x[i], states))["tree"]
        assert found.step == last
        upper = [] if size is None else [size] * 5
        np.testing.assert_array_equal(np.repeat(found.edges[1:], found.counts), upper)


@pytest.mark.parametrize("of", ["gradients", 1])
def test_of_something_else_is_refused(of):
    with pytest.raises(ValueError, match='of must be "updates" or "params"'):
        monitor.histogram(of=of)
