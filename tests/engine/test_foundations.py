"""What the engine stands on: checks of arguments, names and counters of states, groups of trees."""

import functools
import importlib
import json
import math
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
import optaxclip._backend.packing as packing
import optaxclip._base.trees as trees
import optaxclip._base.validation as validation
from optaxclip._base.state import StaticNames, call_on_import, safe_increment
from optaxclip._base.trees import Group, Grouping

MOST = 2**31 - 1


@pytest.mark.parametrize("value", [2, np.int64(2), np.array(2)])
def test_check_int_accepts_integers_above_minimum(value):
    assert validation.check_int(value, 2, "size") == 2
    with pytest.raises(ValueError, match=r"^size must be an int >= 3, got "):
        validation.check_int(value, 3, "size")


@pytest.mark.parametrize("value", [True, np.True_, 2.0, "2", None, jnp.int32(2)])
def test_check_int_rejects_non_integers(value):
    with pytest.raises(TypeError, match=r"^size must (be an int >= 1|not be a JAX array)"):
        validation.check_int(value, 1, "size")


def test_check_int_or_scalar_accepts_arrays_and_saturates():
    count = functools.partial(validation.check_int_or_scalar, argument="steps")
    assert [count(x) for x in (1, 2**40, MOST)] == [1, MOST, MOST]
    assert count(jnp.int32(1)) == 1
    assert jax.jit(count)(0) == 0  # a traced number is not compared
    assert count(jnp.int32(0), minimum=0) == 0
    for wrong, kind, said in (
        (jnp.int32(0), ValueError, "steps must be at least 1, got 0"),
        (0, ValueError, "steps must be an int >= 1, got 0"),
        (jnp.float32(2), TypeError, "steps must be an integer, got an array of dtype float32"),
        (jnp.ones(1, int), ValueError, r"steps must be a scalar, got an array of shape \(1,\)"),
    ):
        with pytest.raises(kind, match=f"^{said}$"):
            count(wrong)


def test_short_repr_truncates_values_to_single_line():
    for size, shown in ((78, "'" + "x" * 78 + "'"), (79, "'" + "x" * 76 + "...")):
        assert validation.short_repr("x" * size) == shown
    assert validation.short_repr(np.zeros((2, 1))) == "array([[0.], [0.]])"


def test_gradient_arguments_extend_error_message():
    """Where the call fails, the message says that the function takes no gradients."""
    grads = {"w": jnp.ones(2), "n": jnp.ones(2, int)}

    @validation.validate_call(transformation=True, one_shot_call="once(grads)")
    def make(*args):
        raise (TypeError if len(args) == 1 else ValueError)("wrong")

    said = r"make returns a transformation\. To clip gradients, call once\(grads\) or tx\.update\("
    for given in ((grads,), (np.ones(1),)):
        with pytest.raises(TypeError, match=rf"^wrong\. {said}"):
            make(*given)
    with pytest.raises(ValueError, match=rf"^wrong\. {said}"):
        make(1.0, grads)
    for given in ((1.0, jnp.float32(2)), ()):
        with pytest.raises(ValueError, match=r"^wrong$"):
            make(*given)
    for given in ((jnp.ones(2, int),), (optax.sgd(0.1),)):
        with pytest.raises(TypeError, match=r"^wrong$"):
            make(*given)


def test_uncalled_factories_of_package_get_detected():
    assert validation.is_uncalled_factory(optaxclip.clip, "optaxclip.transforms")
    for other in (optaxclip.clip(1.0).update, optax.clip, 3, StaticNames.index):
        assert not validation.is_uncalled_factory(other, "optaxclip.transforms")
    assert not validation.is_uncalled_factory(optaxclip.clip, "optaxclip.method")


def test_names_behave_like_tuples():
    names = StaticNames(("a", "b"), (), is_user_label=True)
    assert (list(names), len(names), names[1], names[:1], names.index("b")) == (
        ["a", "b"],
        2,
        "b",
        ("a",),
        1,
    )
    assert repr(names) == "('a', 'b')"
    assert names == ("a", "b")
    assert names != ("a",)
    assert names == StaticNames() == names
    assert names == StaticNames(("a", "b"), ((1,), (2,)), is_user_label=True)
    assert names != StaticNames(("a", "b"))
    assert names != StaticNames(("a", "c"), (), is_user_label=True)
    assert names != 3
    assert len({names, StaticNames()}) == 1


def test_safe_increment_saturates_or_wraps_counters():
    def counted(count):
        return (
            safe_increment(count),
            safe_increment(count, count > 5),
            safe_increment(count, period=3),
        )

    found = jax.jit(counted)(jnp.int32([0, 6, MOST]))
    np.testing.assert_array_equal(found, [[1, 7, MOST], [0, 7, MOST], [1, 7, MOST - 2]])
    with pytest.raises(
        TypeError, match="counters in the state must be integers, but have dtype float32"
    ):
        safe_increment(jnp.float32(1))


def test_many_norms_warn():
    def grouped(*sizes):
        groups = tuple(
            Group((name,), (i,), (n,)) for i, (name, n) in enumerate(zip("ab", sizes, strict=True))
        )
        return Grouping(groups, ((),) * len(sizes), "dict")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trees.warn_if_many_norms(grouped(2**23, 2**23), "mine")
    said = r"^mine: .* have 16,777,217 norms, including 8,388,609 for 'b';"
    with pytest.warns(UserWarning, match=said):
        trees.warn_if_many_norms(grouped(2**23, 2**23 + 1), "mine")


def test_packing_concatenates_and_splits_arrays():
    shapes = ((2, 2), (), (3,), (0,), (2,))
    sizes = [math.prod(shape) for shape in shapes]

    def there_and_back(vector):
        pieces = packing.split_and_reshape(vector, shapes)
        rows = packing.split_and_reshape(jnp.stack([vector, -vector]), shapes)
        return pieces, rows, packing.ravel_and_concatenate(pieces)

    vector = np.arange(10, dtype=np.float32)
    pieces, rows, again = jax.jit(there_and_back)(vector)
    expected = np.split(vector, np.cumsum(sizes)[:-1])
    for shape, piece, row, x in zip(shapes, pieces, rows, expected, strict=True):
        np.testing.assert_array_equal(piece, x.reshape(shape))
        np.testing.assert_array_equal(row, np.stack([x, -x]).reshape(2, *shape))
    np.testing.assert_array_equal(again, vector)
    assert packing.ravel_and_concatenate([]).shape == (0,)


def test_align_with_state_restores_missing_groups():
    of_step = Grouping((Group(("b",), (0,), (2,)),), ((),), "dict")
    stored = StaticNames(("a", "b", "c"), ((3,), (2,), ()))
    found = of_step.align_with_state(stored, 3, "mine")
    assert found.groups == (Group(("a",), (), (3,)), *of_step.groups, Group(("c",), (), ()))
    assert (list(found.names), found.names.shapes) == (["a", "b", "c"], ((3,), (2,), ()))
    assert found.has_leaves == [False, True, False]
    assert found.broadcast_to_leaves([1, 2, 3]) == [2]
    assert of_step.align_with_state(StaticNames(), 1, "mine") is of_step
    for names, size, said in (
        (
            StaticNames(),
            2,
            "state must have the names of its 2 groups, but has lost them.*; restore",
        ),
        (
            stored,
            6,
            r"the number of norms in state must be 3, but is 6, which happens if only init",
        ),
        (
            StaticNames(("a",)),
            1,
            r"updates must not contain groups that the params .*, but contain \['b'\]",
        ),
    ):
        with pytest.raises(ValueError, match=f"^mine: {said}"):
            of_step.align_with_state(names, size, "mine")


def test_trees_name_leaves_by_path():
    assert trees.leaf_name(()) == "leaf"
    flat = trees.flatten({"a": jnp.ones(2), "n": jnp.ones(2, int), "z": 1.0}, "params")
    assert (flat.names(), flat.shapes()) == (["a", "z"], [(2,), ()])
    assert flat.match_name_style(["['a']", ".z"]).names() == ["['a']", "['z']"]
    for others in (["['a']", "z"], ["a", "z"], []):
        assert flat.match_name_style(others).names() == ["a", "z"]


def test_dtype_of_recognizes_numeric_leaves():
    found = [trees.dtype_of(x) for x in (True, 1, 1.0, 1j, np.float16(1), jax.random.key(0))]
    assert found[:5] == [jnp.bool_, jnp.int32, jnp.float32, jnp.complex64, jnp.float16]
    assert jnp.issubdtype(found[5], jax.dtypes.prng_key)
    assert [trees.dtype_of(x) for x in ("a", None, np.array("a"), np.datetime64("2026"))] == [
        None
    ] * 4


def test_on_import_calls_back_now_or_later(tmp_path, monkeypatch):
    acted, finders = [], list(sys.meta_path)
    call_on_import("json", acted.append)
    assert acted == [json]
    (tmp_path / "imported_late.py").write_text("VALUE = 3\n")
    (tmp_path / "imported_before.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    call_on_import("imported_late", lambda module: acted.append(module.VALUE))
    for name in ("imported_before", "imported_late"):
        assert acted == [json]
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
    assert acted == [json, 3]
    assert sys.meta_path == finders
    assert importlib.import_module("imported_late").VALUE == 3
    monkeypatch.delitem(sys.modules, "imported_late")
    call_on_import("not_there", acted.append)
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        importlib.import_module("not_there")
    assert acted == [json, 3]
    assert sys.meta_path == finders
