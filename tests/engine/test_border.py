"""Rules of the border by themselves: partial sums on a GPU, specs, and which options are equal."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NEEDS_JAX_0_10_2
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip._backend.kernels as kernels
import optaxclip._backend.meshes as meshes_lib
import optaxclip._backend.reductions as reductions
from optaxclip import norms
from optaxclip._backend.global_view import (
    MeshSharding,
    memory_spaces,
    move_to_device_memory,
    put_on_device,
    template_on_device,
)
from optaxclip._base.validation import validate_call
from optaxclip._engine.options import Options, ShardingOptions, document_options

# Shape, summed axes, whether no axis may be split, and the shape of the partial sums.
FOLDED = {
    "a matrix": ((4096, 4), (0,), True, (16, 4)),
    "one that may be split": ((4096, 4), (0,), False, (16, 4)),
    "few rows": ((32, 4), (0,), True, (1, 4)),
    "few rows that may be split": ((32, 4), (0,), False, (32, 4)),
    "256 rows": ((256, 3), (0,), True, (1, 3)),
    "257 rows": ((257, 3), (0,), True, (257, 3)),
    "a prime number of rows": ((509, 3), (0,), True, (509, 3)),
    "the most columns": ((128, 1535), (0,), True, (1, 1535)),
    "many columns": ((128, 1536), (0,), True, (128, 1536)),
    "a convolution": ((3, 3, 64, 32), (0, 1, 2), True, (1, 1, 3, 32)),
    "one that may be split there": ((3, 3, 64, 32), (0, 1, 2), False, (3, 3, 8, 32)),
    "an axis in front": ((2, 128, 5), (1,), True, (2, 1, 5)),
    "axes apart": ((2, 3, 128, 5), (0, 2), True, (2, 3, 1, 5)),
    "all axes": ((128, 2), (0, 1), True, (128, 2)),
    "no axes": ((128, 2), (), True, (128, 2)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", FOLDED)
def test_sums_in_float64_fold_tall_columns(case):
    shape, axes, in_one_piece, expected = FOLDED[case]
    options = {"axes": [axes], "groups": [0], "norm": norms.l1, "in_one_piece": in_one_piece}
    leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    program = jax.make_jaxpr(lambda x: kernels.GPU_SUMS.sums_in_float64([x], **options))(leaf)
    (inner,) = [eqn.params["jaxpr"] for eqn in program.eqns if "jaxpr" in eqn.params]
    sums = [eqn.invars[0].aval for eqn in inner.eqns if eqn.primitive.name == "reduce_sum"]
    assert sums[-1].shape == expected


def test_reductions_use_documented_product_scales():
    assert reductions.overflow_bound(jnp.float32) == 2.0 ** (40 - 126 + 23 + 2 * 88)
    assert reductions.scale_step(jnp.float64) == 2.0**704
    assert reductions.overflow_bound(jnp.float64) == np.finfo(np.float64).max / 2.0**40
    assert reductions.prescale_factors(
        norms.Norm("n", jnp.abs, jnp.add, degree=0), jnp.float32
    ) == (1.0,)


def test_spec_names_reads_partition_specs():
    spec = P("a", None, ("b", "c"))
    assert [meshes_lib.spec_names(x) for x in spec] == [("a",), (), ("b", "c")]
    assert meshes_lib.spec_names(P.UNCONSTRAINED) == ()
    assert meshes_lib.axes_of(spec) == {"a", "b", "c"}
    assert meshes_lib.axes_of(P()) == frozenset()
    assert meshes_lib.spec_of(spec) is spec
    assert meshes_lib.spec_of(jnp.ones(2)) == P()
    assert meshes_lib.spec_names(["b", "c"]) == ("b", "c")


def test_sharding_detects_mixed_meshes_and_replication():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    meshes = [jax.make_mesh((2, 2), ("a", "b"), kinds) for kinds in ((auto, explicit), (auto,) * 2)]
    assert meshes_lib.is_unsharded([jnp.ones(2), np.ones(2)])
    for mesh, explicit in zip(meshes, (P("b"), P()), strict=True):
        split = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, P("b")))
        assert not meshes_lib.is_unsharded([split])
        assert meshes_lib.spec_of(split) == explicit


def test_mesh_sharding_chooses_axes_dividing_examples():
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Explicit,) * 2)
    split = MeshSharding(mesh, P(("a", "b"), None))
    found = [split.axes_dividing(number) for number in (16, 8, 6, 4, 3)]
    assert found == [("a", "b"), ("a", "b"), ("a",), ("a",), None]


def test_options_ignore_sharding_in_equality():
    """A step also gets its placement, so a program is compiled for each placement anyway."""
    plain = Options.create(name="mine")
    for given in ({"specs": {"w": P("a")}}, {"axis_name": "a"}):
        other = Options.create(name="mine", **given)
        assert other == plain
        assert hash(other) == hash(plain)
    for given in ({"strict": True}, {"norm": "l1"}, {"known_norm": "n"}, {"nonfinite": "zero"}):
        assert Options.create(name="mine", **given) != plain
    assert (plain.record, plain.strict, plain.known_norm, plain.axis_names) == (
        True,
        False,
        None,
        None,
    )


def test_options_decorator_accepts_function_without_docstring():
    """As all are with `python -OO`."""

    @validate_call(transformation=True)
    @document_options(ShardingOptions)
    def made(window=3, **options):
        return window, options

    assert made.__doc__ is None
    assert made(axis_name="x") == (3, {"name": "made", "axis_name": "x"})
    parameters = inspect.signature(made).parameters
    assert [*parameters] == ["window", "axis_name", "specs", "name"]
    assert [parameters[x].default for x in parameters] == [3, None, None, "made"]
    with pytest.raises(
        TypeError, match=r"^made\(\) got an unexpected .*'strict'; it accepts \['wi"
    ):
        made(strict=True)


@NEEDS_JAX_0_10_2
def test_memory_moves_arrays_to_device_and_back():
    x, host = jnp.ones(2), jax.memory.Space.Host
    away = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    assert memory_spaces({"a": away, "b": x, "c": 3.0}) == [host, None, None]
    here = put_on_device({"a": away, "b": x})
    assert memory_spaces(here) == [None, None]
    assert here["b"] is x
    template = template_on_device(away)
    assert (template.shape, template.sharding.memory_kind) == ((2,), x.sharding.memory_kind)
    assert template_on_device(x) is x
    seen = []
    jax.jit(lambda *arrays: seen.append(memory_spaces(arrays)))(away, x, jax.random.key(0))
    assert seen == [[host, None, None]]
    arguments, back = move_to_device_memory({"a": away}, {"b": x}, None)
    assert memory_spaces(arguments) == [None, None]
    results = back({"a": x}, {"b": x}, 5)
    assert memory_spaces(results) == [host, None, None]
    assert results[2] == 5
    trees, back = move_to_device_memory({"a": x})
    assert trees[0]["a"] is x
    assert back(away) == (away,)


def test_pmax_shares_derivative_among_ties():
    def along(x, dx):
        return jax.jvp(lambda x: meshes_lib.pmax(x, frozenset({"i"})), (x,), (dx,))

    x, changes = np.float32([[3, 1, 3, 2], [1, 1, 3, 2]]), np.float32([1, 2, 4, 8])
    over_devices = jax.vmap(along, axis_name="i")
    found, slopes = jax.jit(jax.vmap(over_devices, in_axes=(0, None)))(x, changes)
    np.testing.assert_array_equal(found, np.full((2, 4), 3))
    np.testing.assert_array_equal(slopes, [[2.5] * 4, [4] * 4])  # equal ones share it


def test_sharding_reads_types_on_explicit_mesh():
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Explicit,))
    x, other = jax.device_put(jnp.arange(4), jax.NamedSharding(mesh, P("a"))), jnp.ones(2)
    types = [jax.typeof(y) for y in (other, x)]
    assert meshes_lib.unique_avals([x, x, other]) == types[::-1]
    assert meshes_lib.explicit_sharding(types[1]) == (types[1].sharding.mesh, P("a"))
    assert meshes_lib.explicit_sharding(types[0]) is None
    assert meshes_lib.explicit_mesh(types) == types[1].sharding.mesh
    assert meshes_lib.explicit_mesh(types[:1]) is meshes_lib.find_mesh(AxisType.Auto, types) is None
    whole = meshes_lib.replicate(x)
    np.testing.assert_array_equal(whole, x)
    assert meshes_lib.axes_of(jax.typeof(whole).sharding.spec) == frozenset()
    assert meshes_lib.replicate(other) is other
    with jax.set_mesh(mesh):
        zeros = jax.eval_shape(lambda: meshes_lib.zeros_like_aval(types[1], (3,)))
    assert (zeros.shape, zeros.dtype) == ((3, 4), jnp.int32)
    assert zeros.sharding.spec == P(None, "a")
    assert meshes_lib.zeros_like_aval(types[0]).shape == (2,)
    tree = {"n": other, "k": 3}
    assert meshes_lib.place_on_mesh_of(tree, x) is tree  # outside of a trace
    typed = []

    def traced(x, other):
        typed.append(meshes_lib.place_on_mesh_of({"n": other, "k": 3, "x": x}, x))
        typed.append(meshes_lib.place_on_mesh_of(tree, other))
        return x

    jax.eval_shape(traced, x, other)
    assert jax.typeof(typed[0]["n"]).sharding.mesh == types[1].sharding.mesh
    assert jax.typeof(typed[0]["x"]).sharding.spec == P("a")
    assert typed[0]["k"] == 3
    assert typed[1] is tree


def test_sums_inherit_gradients_sharding_on_automatic_mesh():
    meshes = [jax.make_mesh((2,), ("a",), (kind,)) for kind in (AxisType.Auto, AxisType.Explicit)]
    auto, explicit = (jax.device_put(jnp.ones(4), jax.NamedSharding(x, P("a"))) for x in meshes)
    found = jax.jit(lambda like: meshes_lib.shard_like(jnp.zeros(4, jnp.float16), like))(auto)
    assert (found.sharding.spec, found.dtype) == (P("a"), jnp.float16)
    np.testing.assert_array_equal(found, np.zeros(4))
    zeros, stays = jnp.zeros(4), []
    stays.append(meshes_lib.shard_like(zeros, explicit) is zeros)

    def part(like):
        zeros = jnp.zeros(2)
        stays.append(meshes_lib.shard_like(zeros, like) is zeros)
        return like

    jax.eval_shape(jax.shard_map(part, mesh=meshes[0], in_specs=P("a"), out_specs=P("a")), auto)
    assert stays == [True, True]
