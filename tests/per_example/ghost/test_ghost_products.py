"""Products of norms and sums do not round their factors, on any platform."""

import functools
import math

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax import lax
from small_losses import CASES, planned

import optaxclip.per_example._ghost_rounding_bounds as rounding_bounds
from optaxclip._engine.scale import Multiplier
from optaxclip.per_example._ghost_clip import Norms
from optaxclip.per_example._ghost_norms import _sum_rows_first
from optaxclip.per_example._ghost_plan import add_direct_gradients, differentiate
from optaxclip.per_example._ghost_sites import BackpropResult
from optaxclip.per_example._ghost_sums import _product_in_parts, split_float32_to_bfloat16
from optaxclip.scopes import tree

DTYPES = ["float32", "bfloat16", "float16"]
PRODUCTS = {"dot_general", "conv_general_dilated"}


def equations(jaxpr):
    """Those of a program and of all programs inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()),
            is_leaf=lambda x: isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr)),
        ):
            if isinstance(inner, jex.ClosedJaxpr):
                yield from equations(inner.jaxpr)
            elif isinstance(inner, jex.Jaxpr):
                yield from equations(inner)


def own_products(loss, params, batch):
    """The products that find norms and sums; those of the loss itself are as its author asks."""
    call, plan = planned(loss, params, *batch)
    measured, grouping = call.params.inexact_leaves(), tree()(call.params)
    backward = jax.eval_shape(functools.partial(differentiate, plan), measured, batch)

    def norms_and_sums(backward, by):
        norms = Norms.create(plan, backward, grouping, jnp.zeros(call.examples, bool))
        sums = [norms.sum_weighted([by], are_ordinary=flag) for flag in (False, True)]
        return norms.recompute_exact() if norms.needs_exact else norms.upper, sums

    by = Multiplier(*[jax.ShapeDtypeStruct((call.examples,), jnp.float32)] * 2)
    program = jax.make_jaxpr(norms_and_sums)(backward, by)
    return [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name in PRODUCTS]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", slow_unless(lambda x: x != "float16", DTYPES))
def test_ghost_products_use_exact_operands(dtype):
    in_loops = ("stacked_kernels", "stacked_wide_layers")
    for name in ("many_tokens", "kernel", "kernel_of_patches", "tied", *in_loops):
        loss, *args, _ = CASES[name]
        args = jax.tree.map(
            lambda x: jnp.asarray(x, dtype) if x.dtype == np.float32 else jnp.asarray(x), args
        )
        found = own_products(loss, *args)
        assert found, name
        for eqn in found:
            assert all(v.aval.dtype in (jnp.float32, jnp.dtype(dtype)) for v in eqn.invars), name
            assert eqn.outvars[0].aval.dtype == jnp.float32, name
            are_exact = all(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
            highest = (lax.Precision.HIGHEST,) * 2
            assert are_exact or eqn.params["precision"] == highest, (name, eqn)


@pytest.mark.parametrize(
    ("positions", "inputs", "outputs", "longest"),
    [(2**13, 8, 8, 2**8), (3, 2**13, 8, 2**11), (2**13, 2**15, 2**15, 2**11)],
)
def test_ghost_products_sum_no_more_terms_than_bounded(positions, inputs, outputs, longest):
    """Of many positions and of long inner products the sums are cut into pieces."""

    def loss(params, x, d):
        """The axes of positions differ in data and cotangents."""
        return jnp.vdot(lax.dot_general(params["w"], x, (((0,), (1,)), ((), ()))), d)

    shapes = (inputs, outputs), (2, positions, inputs), (2, outputs, positions)
    w, *batch = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    found = own_products(loss, {"w": w}, batch)
    terms = []
    for eqn in found:
        (summed, _), _ = eqn.params["dimension_numbers"]
        terms.append(math.prod(eqn.invars[0].aval.shape[axis] for axis in summed))
    assert max(terms) == longest


def test_ghost_mixed_products_split_float32_into_bfloat16():
    loss, *args, _ = CASES["tied"]
    args = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else jnp.asarray(x), args
    )
    factors = {str(v.aval) for eqn in own_products(loss, *args) for v in eqn.invars}
    assert {"bfloat16[2,5,3,20]", "bfloat16[2,5,3,30]"} <= factors
    assert {"float32[5,3,20]", "float32[5,3,30]"} <= factors  # on a CPU


@pytest.mark.parametrize("dtype", DTYPES)
def test_ghost_gradients_keep_bfloat16_of_params(dtype):
    loss, *args, _ = CASES["many_tokens"]
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, dtype), args)
    call, plan = planned(loss, params, *batch)

    def gradients(measured, batch):
        return add_direct_gradients(plan, differentiate(plan, measured, batch)).gradients

    (found,) = jax.eval_shape(gradients, call.params.inexact_leaves(), batch).values()
    assert found.dtype == (jnp.bfloat16 if dtype == "bfloat16" else jnp.float32)


@pytest.mark.parametrize("name", ["many_tokens", "layer"])
def test_ghost_norms_and_sums_read_same_values(name):
    """Fused with what made the numbers, one of both could leave out a rounding."""
    loss, *args, _ = CASES[name]
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), args)
    call, plan = planned(loss, params, *batch)

    def numbers(measured, batch):
        found = add_direct_gradients(plan, differentiate(plan, measured, batch))
        return found.data, found.cotangents, found.gradients

    jaxpr = jax.make_jaxpr(numbers)(call.params.inexact_leaves(), batch).jaxpr
    barriers = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier")
    assert {*jaxpr.outvars} <= {v for eqn in barriers for v in eqn.outvars}


def test_ghost_sums_compile_to_two_reductions():
    """A single sum over rows and columns could take more additions than the bounds count."""
    text = jax.jit(_sum_rows_first).lower([jnp.ones((2, 3, 8, 8))]).compile().as_text()
    assert text.count(" reduce(") == 2


def test_ghost_materializes_gradients_in_limited_chunks():
    """Of 1000 gradients of 4 MiB each: in 8 MiB on a CPU, in 256 MiB elsewhere."""
    shapes = (1024, 1024), (1000, 16, 1024), (1000, 16, 1024)
    w, x, d = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    _, plan = planned(lambda p, x, d: jnp.vdot(x @ p["w"], d), {"w": w}, x, d)
    (part,) = plan.parts[0]
    lengths = []
    for with_care in (False, True):
        program = jax.make_jaxpr(
            lambda x, d, flag=with_care: part.estimate(
                BackpropResult([x], [d], {}, None), jnp.float32, exact=flag
            )
        )(x, d)
        eqns = equations(program.jaxpr)
        lengths.append([eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"])
    assert lengths == [[], [500, 15]]


def test_split_float32_to_bfloat16_loses_few_digits():
    d = np.random.default_rng(0).normal(size=999).astype(np.float32) * np.float32(1e-20)
    found = np.asarray(jax.jit(split_float32_to_bfloat16)(d), float)
    error = np.abs(found.sum(0) - d.astype(float)) / np.abs(d)
    assert 1e-7 < np.max(error) <= rounding_bounds.OTHER_ERRORS


@pytest.mark.parametrize("wide", [0, 1])
def test_mixed_product_splits_float32_operand_into_two(wide):
    """As more terms of the sum, or as columns if these are the smaller ones."""
    rng = np.random.default_rng(0)
    numbers = (((0, 2), (1, 3)), ((1,), (0,)))
    dtypes = [jnp.bfloat16, jnp.float32][:: -1 if wide == 0 else 1]

    def run(*both):
        return _product_in_parts(*both, numbers=numbers, dtype=jnp.float32)

    for positions, are_terms in ((10, True), (11, False)):
        shapes = (2, 3, positions, 5), (3, 2, 6, positions)
        both = [jnp.asarray(rng.normal(size=n), d) for n, d in zip(shapes, dtypes, strict=True)]
        expected = np.einsum("bgtk,gbnt->gkn", *(np.asarray(x, float) for x in both))
        found = jax.jit(run)(*both)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
        (eqn,) = (
            eqn
            for eqn in equations(jax.make_jaxpr(run)(*both).jaxpr)
            if eqn.primitive.name in PRODUCTS
        )
        assert {v.aval.dtype for v in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
        assert len(eqn.params["dimension_numbers"][0][0]) == 2 + are_terms
    (examples,) = jax.export.symbolic_shape("b")
    both = [
        jax.ShapeDtypeStruct(n, d)
        for n, d in zip([(examples, 3, 4, 5), (3, examples, 6, 4)], dtypes, strict=True)
    ]
    assert jax.eval_shape(run, *both).shape == (3, 5, 6)
