"""Groups and their norms as arrays: how they are stored, and how sums at scales are read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip._backend.reductions as reductions
from optaxclip import norms, scopes
from optaxclip._backend.leaf_shardings import LeafShardings
from optaxclip._base.trees import Group, Grouping, flatten
from optaxclip._engine.measure import ScaledNorms, select_in_range
from optaxclip._engine.plan import Plan
from optaxclip.scopes import _count_stacked_axes

TINY, MAX = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
INF, NAN = np.inf, np.nan


def plan_of(grouping):
    count = len(grouping.axes)
    return Plan(grouping, LeafShardings((frozenset(),) * count, ((),) * count, is_unsharded=True))


LEAVES = (Group(("a",), (1,), (3,)), Group(("b",), (0,), (2,)), Group(("c",), (), (2,)))
BY_LEAF = plan_of(Grouping(LEAVES, ((), ()), "dict"))
LABELS = plan_of(Grouping((Group(("x",), (0, 2)), Group(("y",), (1,))), ((0,),) * 3, "vector"))
TREE = plan_of(Grouping((Group(("tree",), (0, 1)),), ((0,), (0,)), "scalar"))


def test_plan_packs_leaf_groups_by_shape():
    assert BY_LEAF.order == [1, 2, 0]
    assert BY_LEAF.shape == (7,)
    assert BY_LEAF.get_named_shapes() == [("b", (2,)), ("c", (2,)), ("a", (3,))]
    arrays = [np.float32(x) for x in ([1, 2, 3], [4, 5], [6, 7])]
    packed = BY_LEAF.pack([jnp.asarray(x) for x in arrays])
    np.testing.assert_array_equal(packed, [4, 5, 6, 7, 1, 2, 3])
    for found, x in zip(BY_LEAF.unpack(packed), arrays, strict=True):
        np.testing.assert_array_equal(found, x)
    tree = BY_LEAF.arrange_by_layout(packed)
    assert list(tree) == ["a", "b", "c"]
    np.testing.assert_array_equal(tree["a"], [1, 2, 3])
    np.testing.assert_array_equal(BY_LEAF.pack_layout(tree), packed)
    first, second = BY_LEAF.slice_for_leaves(packed, [np.zeros(2), np.zeros(3)])
    np.testing.assert_array_equal(first, [4, 5])
    np.testing.assert_array_equal(second, [1, 2, 3])
    np.testing.assert_array_equal(BY_LEAF.has_leaves(), [1, 1, 0, 0, 1, 1, 1])
    assert BY_LEAF.broadcast_constants([2.0, 2.0, 2.0]) == 2.0
    np.testing.assert_array_equal(BY_LEAF.broadcast_constants([1, 2, 3.0]), [2, 2, 3, 3, 1, 1, 1])


def test_plan_keeps_order_of_labels_and_trees():
    assert (LABELS.order, LABELS.shape) == ([0, 1], (2,))
    assert LABELS.get_named_shapes() == [("x", ()), ("y", ())]
    assert (TREE.shape, TREE.get_named_shapes()) == ((), [("tree", ())])
    number = jnp.float32(3)
    assert TREE.pack([number]) is TREE.unpack(number)[0] is TREE.arrange_by_layout(number) is number
    assert TREE.pack_layout(number) is number
    empty = plan_of(Grouping((Group(("tree",), ()),), (), "scalar"))
    assert empty.has_leaves()
    assert LABELS.arrange_by_layout(number) is LABELS.pack_layout(number) is number


def test_plan_totals_sum_or_maximize_groups():
    parts = [(jnp.float32(1), jnp.float32(10)), (jnp.float32(2), jnp.float32(20))]
    parts.append((jnp.float32(3), jnp.float32(30)))
    for by_max, expected in ((False, [[4, 2], [40, 20]]), (True, [[3, 2], [30, 20]])):
        found = LABELS.reduce_groups(parts, use_max=by_max)
        np.testing.assert_array_equal(found, expected)
    added = LABELS.reduce_groups(parts, add=lambda members: members[0])
    np.testing.assert_array_equal(added, [[1, 2], [10, 20]])
    of_leaves = BY_LEAF.reduce_groups([(jnp.ones(2),), (2 * jnp.ones(3),)])
    np.testing.assert_array_equal(of_leaves, [[1, 1, 0, 0, 2, 2, 2]])


def test_select_in_range_chooses_usable_sum():
    far = reductions.scale_step(jnp.float32)
    assert far == 2.0**88
    least = reductions.underflow_bound(jnp.float32)
    assert least == 2.0 ** (40 - 126 + 23)
    assert reductions.prescale_factors(norms.l2, jnp.float32) == (1.0, 1 / far, far)
    assert reductions.prescale_factors(norms.l1, jnp.float32) == (1.0, 1 / far)
    plain, down, up = np.float32(
        [
            [0, 4, 4, INF, NAN, MAX, least, least / 2, least / 2],
            [0, 1, 1, 5, NAN, 6, 0, 0, 0],
            [0, 2, INF, INF, NAN, INF, 8, 7, 0],
        ]
    )
    total, unit = jax.jit(select_in_range)((plain, down, up))
    np.testing.assert_array_equal(total, np.float32([0, 4, 4, 5, NAN, MAX, least, 7, least / 2]))
    np.testing.assert_array_equal(unit, np.float32([1, 1, 1, far, far, 1, 1, 1 / far, 1]))
    total, unit = jax.jit(select_in_range)((plain, down))
    np.testing.assert_array_equal(total[-3:], plain[-3:])
    np.testing.assert_array_equal(unit, np.float32([1, 1, 1, far, far, 1, 1, 1, 1]))
    assert select_in_range((plain,))[0] is plain


@pytest.mark.parametrize("from_above", [False, True])
def test_scaled_norms_represent_norms_beyond_float32(from_above):
    value = np.array([0, 1, 3, 1e30, 1e-30, 1e-35, 3.4e38, 1e39, INF, NAN])
    value = np.append(value, np.random.default_rng(0).uniform(1, 4, 16))
    of_float64 = jax.jit(functools.partial(ScaledNorms.from_float64, from_above=from_above))
    with jax.enable_x64(True):
        found = of_float64(value)
    narrow = np.where(value == 1e39, MAX, value).astype(np.float32)
    np.testing.assert_allclose(found.norm, narrow, rtol=1e-6)
    size = np.asarray(found.scale)
    np.testing.assert_array_equal(np.frexp(size)[0], np.full(len(value), 0.5))
    fraction, finite = np.asarray(found.mantissa), np.isfinite(value)
    usual = finite & (np.abs(np.log10(np.where(value > 0, value, 1))) < 37)
    assert np.all((fraction[usual & (value > 0)] >= 1) & (fraction[usual & (value > 0)] < 2))
    known = usual & (value > 0)
    true = (value / size)[known]
    divisor = np.float64(found.divisor)[known]
    np.testing.assert_allclose(divisor, true, rtol=2e-7)
    assert np.all(divisor >= true) or not from_above
    assert float(found.upper_bound[0]) == 0
    of_float32 = jax.jit(ScaledNorms.from_value)(np.float32([0, 3, 1, INF]), 4.0)
    np.testing.assert_array_equal(of_float32.norm, [0, 12, 4, INF])
    np.testing.assert_array_equal(of_float32.mantissa, [0, 1.5, 1, INF])
    np.testing.assert_array_equal(of_float32.scale[:3], [1, 8, 4])
    np.testing.assert_array_equal(of_float32.divisor[:3], [1, 1.5, 1])
    above = of_float32.add_error_bound(0.25)
    np.testing.assert_array_equal(above.upper_bound, [0, 15, 5, INF])
    np.testing.assert_array_equal(above.norm, of_float32.norm)


def test_stacked_layers_have_ordered_names():
    def names(**shapes):
        tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return list(scopes.leaf(stacked=1)(flatten(tree, "params")).names)

    assert names(w=(10, 1)) == [f"w/{i}" for i in range(10)]
    assert names(w=(11, 1)) == [f"w/{i:02}" for i in range(11)]
    assert names(v=(1,), w=(0, 1)) == ["v/0"]
    flat = flatten({"v": jnp.zeros(2), "w": jnp.zeros((2, 2))}, "params")
    for counts in ({"v": 0, "w": 2}, {"w": np.int32(2)}, lambda name, leaf: 2 * (name == "w")):
        assert _count_stacked_axes(counts, flat) == [0, 2]
    for wrong, said in ((2, r"between 0 and 1 for leaf 'v' .* got 2"), (-1, "'v' .* got -1")):
        with pytest.raises(ValueError, match=f"^stacked must be an int .*{said}"):
            _count_stacked_axes(wrong, flat)
    with pytest.raises(ValueError, match=r"between 0 and 2 for leaf 'w' .* got 1\.0"):
        _count_stacked_axes({"v": 0, "w": 1.0}, flat)
