"""Where the leaves of an update lie, as it is found from types and from what the user says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip._backend.leaf_shardings import (
    AutomaticShardings,
    ExplicitShardings,
    LeafShardings,
    MappedShardings,
    MeshShardings,
    apply_scope,
    infer_shardings,
)
from optaxclip._base.trees import Group, Grouping, flatten
from optaxclip._engine.options import Options

# Of `x` each column has a norm, and `y` has one.
COLUMNS = Grouping((Group(("x",), (0,), (6,)), Group(("y",), (1,))), ((0,), (0,)), "dict")
TREE = Grouping((Group(("tree",), (0, 1)),), ((0, 1), (0,)), "scalar")
LEAVES = {"x": jnp.ones((4, 6)), "y": jnp.ones(4)}
NONE, A, B = frozenset(), frozenset("a"), frozenset("b")


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("a", "b"), (kind,) * 2)


AUTO, EXPLICIT = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)


def place(tree, grouping=COLUMNS, **options):
    return infer_shardings(
        grouping, flatten(tree, "updates"), Options.create(name="mine", **options).sharding_hints
    )


def in_region(specs, given=None, grouping=COLUMNS, tracked=True, **options):
    """The placement that is found inside of `shard_map`, of what one device holds."""
    found = []

    def look(tree):
        found.append(place(tree, grouping, specs=given, **options))
        return tree

    region = jax.shard_map(look, mesh=AUTO, in_specs=(specs,), out_specs=specs, check_vma=tracked)
    jax.eval_shape(region, LEAVES)
    return found[0]


def assert_place(found, cls, reduced, kept=(((),), ()), *, is_unsharded=False, **others):
    assert found == cls(reduced, kept, is_unsharded, **others)


def test_placement_of_plain_arrays_has_no_axes():
    found = place(LEAVES)
    assert_place(found, LeafShardings, (NONE, NONE), is_unsharded=True)
    assert found.all_axes == NONE
    assert found.num_shards(0) == 1
    assert found.map_shards(len) is len
    assert found.replicate(3) == 3


def test_placement_on_automatic_mesh_records_mesh():
    found = place(jax.device_put(LEAVES, NamedSharding(AUTO, P("a"))))
    assert_place(found, AutomaticShardings, (NONE, NONE), mesh=found.mesh)
    assert set(found.mesh.axis_names) == {"a", "b"}


def test_specs_outside_shard_map_require_mesh():
    specs = {"x": P("a", "b"), "y": P()}
    shardings = {name: NamedSharding(AUTO, spec) for name, spec in specs.items()}
    found = place(LEAVES, specs=shardings)
    place_specs = {"mesh": AUTO, "specs": (P("a", "b"), P())}
    assert_place(found, MeshShardings, (A, NONE), ((("b",),), ()), **place_specs)
    assert (found.all_axes, found.axes_of(0), found.axes_of(1)) == (A | B, A | B, NONE)
    assert found.num_shards(0) == 1  # outside of the region leaves are whole
    assert place(jax.device_put(LEAVES, NamedSharding(AUTO, P("a"))), specs=shardings) == found
    with pytest.raises(
        ValueError, match=r"specs must .* if no mesh is set, .* set the mesh with jax.set_mesh"
    ):
        place(LEAVES, specs=specs)
    assert_place(place({}, Grouping((), (), "dict"), specs=P()), LeafShardings, (), ())


def under_vmap(fn):
    found = []
    jax.vmap(lambda _: found.append(fn()), axis_name="lanes")(jnp.zeros(2))
    return found


def test_placement_on_explicit_mesh_reads_types():
    placed = {
        "x": jax.device_put(LEAVES["x"], NamedSharding(EXPLICIT, P("a", "b"))),
        "y": jax.device_put(LEAVES["y"], NamedSharding(EXPLICIT, P())),
    }
    found = place(placed)
    mesh = jax.typeof(placed["x"]).sharding.mesh
    assert_place(found, ExplicitShardings, (A, NONE), ((("b",),), ()), mesh=mesh, specs=found.specs)
    assert [tuple(filter(None, spec)) for spec in found.specs] == [("a", "b"), ()]
    # What `axis_name` means, types do not show.
    (named,) = under_vmap(lambda: place(placed, axis_name="lanes"))
    lanes = frozenset({"lanes"})
    assert_place(named, MappedShardings, (lanes, lanes))
    # Over axes of one device nothing is split.
    alone = jax.make_mesh((1, 2), ("a", "b"), (AxisType.Explicit,) * 2)
    x = jax.device_put(LEAVES["x"], NamedSharding(alone, P("a")))
    found = place({"x": x, "y": LEAVES["y"]})
    assert_place(found, LeafShardings, (NONE, NONE), is_unsharded=True)


def test_placement_ignores_types_with_sparse_leaves():
    sparse = BCOO((jnp.ones(2), jnp.array([[0], [1]])), shape=(4,))
    y = jax.device_put(LEAVES["y"], NamedSharding(EXPLICIT, P("a")))
    grouping = Grouping((Group(("tree",), (0, 1)),), ((0,), (0,)), "scalar")
    found = place({"x": sparse, "y": y}, grouping)
    assert_place(found, LeafShardings, (NONE, NONE), ((), ()), is_unsharded=True)


def test_placement_in_tracked_region_reads_varying_axes():
    found = in_region({"x": P("a", "b"), "y": P()}, grouping=TREE)
    assert_place(found, MappedShardings, (A | B, NONE), ((), ()))
    specs = {"x": P("a", "b"), "y": P("b")}
    found = in_region(specs, given=specs)
    assert_place(found, MappedShardings, (A, B), ((("b",),), ()))
    with pytest.raises(ValueError, match=r"specs is required because a leaf .* has several norms"):
        in_region({"x": P("a"), "y": P()})
    with pytest.raises(ValueError, match=r"that also varies over \['b'\]"):
        in_region(specs, given=P("a"))
    # Along axes that are not named, each device has gradients of its own.
    found = in_region({"x": P(("a", "b")), "y": P()}, axis_name="a")
    assert_place(found, MappedShardings, (A, NONE))
    with pytest.raises(
        ValueError, match=r"axis_name must contain only the axes \['a', 'b'\] .* got \['lanes'\]"
    ):
        under_vmap(lambda: in_region({"x": P("a"), "y": P()}, axis_name=("a", "lanes")))


def test_placement_in_untracked_region_requires_specs():
    region = functools.partial(in_region, {"x": P("a", "b"), "y": P()}, tracked=False)
    found = region(given={"x": P("a", "b"), "y": P()})
    assert_place(found, MappedShardings, (A, NONE), ((("b",),), ()))
    assert_place(region(axis_name="a"), MappedShardings, (A, A))
    assert_place(
        region(axis_name=("a", "b"), grouping=TREE), MappedShardings, (A | B, A | B), ((), ())
    )
    assert_place(region(given=P()), MappedShardings, (NONE, NONE))
    with pytest.raises(ValueError, match=r"specs or axis_name is required .* along \['a', 'b'\]"):
        region()


def test_placement_totals_and_redistributes_partial_sums():
    specs = {"x": P("a", "b"), "y": P()}
    # A norm for each index along the second axis, which is split, and the third, which is not.
    groups = (Group(("x",), (0,), (6, 3)), Group(("y",), (1,)))
    grouping = Grouping(groups, ((0,), (0,)), "dict")

    def sums_and_parts(tree):
        where = place(tree, grouping, specs=specs)
        results = []
        for by_max, combine in ((False, jnp.sum), (True, jnp.max)):
            parts = [(combine(tree["x"], 0),), (combine(tree["y"]),)]
            (of_x,), (of_y,) = where.local_sums(parts, [(6, 3), ()], use_max=by_max)
            (total,) = where.all_reduce([jnp.append(of_x, of_y)], use_max=by_max)
            of_all = total[:18].reshape(6, 3)
            arrays = [jnp.stack([of_all, -of_all]), total[18]]
            results.append((total, *where.local_slices(arrays, [*tree.values()], grouping.axes)))
        return results

    out_specs = [(P(), P(None, "b"), P())] * 2
    region = jax.shard_map(
        sums_and_parts, mesh=AUTO, in_specs=(specs,), out_specs=out_specs, check_vma=False
    )
    rng = np.random.default_rng(0)
    x, y = (rng.integers(1, 99, shape).astype(np.float32) for shape in ((4, 6, 3), 4))
    expected = ((x.sum(0), y.sum()), (x.max(0), y.max()))
    for whole, found in zip(expected, jax.jit(region)({"x": x, "y": y}), strict=True):
        total, of_x, of_y = found
        np.testing.assert_array_equal(total, np.append(*whole))
        np.testing.assert_array_equal(of_x, [whole[0], -whole[0]])
        assert of_y == whole[1]


def test_placement_computes_global_shapes():
    specs = {"x": P("a", "b"), "y": P()}

    def shapes(tree, **options):
        found = []

        def scope(flat):
            found.append([*flat.global_shapes])
            return COLUMNS

        apply_scope(
            scope, flatten(tree, "updates"), Options.create(name="mine", **options).sharding_hints
        )
        return found[0]

    def in_region(tracked, **options):
        found = []

        def look(tree):
            found.append(shapes(tree, **options))
            return tree

        region = jax.shard_map(
            look, mesh=AUTO, in_specs=(specs,), out_specs=specs, check_vma=tracked
        )
        jax.eval_shape(region, LEAVES)
        return found[0]

    assert shapes(LEAVES) == []
    assert shapes(LEAVES, axis_name="lanes") == [None, None]
    assert in_region(tracked=True) == [None, (4,)]
    assert in_region(tracked=True, axis_name=("a", "lanes")) == [None, None]
    assert in_region(tracked=False) == [None, None]
    for tracked in (True, False):
        assert in_region(tracked, specs=specs) == [(4, 6), (4,)]
    # A type is believed where specs split what is whole.
    assert in_region(tracked=True, specs=P("a")) == [(4, 3), (4,)]
    names = Grouping((Group(("b",), (0,)), Group(("a",), (1,))), ((0, 1), (0,)), "vector")
    with pytest.raises(ValueError, match="leaf names must not clash with names of stacked layers"):
        apply_scope(
            lambda flat: names,
            flatten(LEAVES, "updates"),
            Options.create(name="mine").sharding_hints,
        )
