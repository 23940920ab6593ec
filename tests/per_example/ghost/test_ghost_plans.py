"""Parameters whose uses have no common form are dense, whatever keeps the uses apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_losses import CASES, batch, drawn, ids, planned, squares

import optaxclip.per_example._ghost_primitives as primitives
import optaxclip.per_example._ghost_sites as sites
from optaxclip.per_example._ghost_plan import differentiate

TABLE, INDICES, WIDE, TALL = drawn(30, 20), ids(3, high=30), batch(2, 20), batch(2, 30)
DENSE = {}


def dense(reason, params, *arrays):
    """Adds a loss of which the parameter `w` is dense, for this reason."""

    def add(fn):
        held = params if isinstance(params, dict) else {"w": params}
        DENSE[fn.__name__] = (fn, held, arrays, reason)
        return fn

    return add


SEVERAL = "has uses of several kinds"


@dense(SEVERAL, TABLE, INDICES, WIDE, TALL)
def table_in_two_kinds_of_products(p, i, x, y):
    return squares(y @ p["w"][::-1]) + squares(p["w"][i]) + squares(x @ p["w"].T)


@dense(SEVERAL, TABLE, INDICES, WIDE)
def table_whose_rows_are_reversed(p, i, x):
    return squares(p["w"][::-1][i]) + squares(x @ p["w"].T)


@dense(SEVERAL, TABLE, INDICES, WIDE)
def table_that_is_reversed_for_a_product(p, i, x):
    return squares(p["w"][i]) + squares(x @ p["w"][::-1].T)


@dense(SEVERAL, {"w": TABLE, "u": drawn(4, 20)}, INDICES, WIDE)
def table_in_a_concatenation(p, i, x):
    return squares(p["w"][i]) + squares(x @ jnp.concatenate([p["w"], p["u"]]).T)


@dense(SEVERAL, drawn(3, 5, 4), ids(3, 2, high=5), batch(4))
def stacked_table_that_is_whole_in_a_product(p, i, x):
    rows = lax.scan(lambda _, row: (None, row[0][row[1]]), None, (p["w"], i))[1]
    return squares(rows) + squares(p["w"] @ x)


@dense("is used by 'gather'", {"w": TABLE, "u": drawn(4, 20)}, INDICES)
def rows_of_a_concatenation(p, i):
    return squares(jnp.concatenate([p["w"], p["u"]])[i])


@dense("is used by 'gather'", TABLE, INDICES)
def columns(p, i):
    return squares(p["w"][:, i])


@dense("is used by 'gather'", TABLE, INDICES)
def entries(p, i):
    return squares(p["w"][i, i % 20])


@dense("is used by 'gather'", TABLE, INDICES)
def parts_of_rows(p, i):
    return squares(jax.vmap(lambda i: lax.dynamic_slice(p["w"], (i, 0), (1, 7)))(i))


@dense("is used by 'gather'", TABLE, INDICES)
def rows_as_slices(p, i):
    return squares(jax.vmap(lambda i: lax.dynamic_slice(p["w"], (i, 0), (1, 20)))(i))


@dense("is used by 'gather'", TABLE, INDICES)
def beginnings_of_rows(p, i):
    numbers = lax.GatherDimensionNumbers((1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return squares(lax.gather(p["w"], i[:, None], numbers, slice_sizes=(1, 7)))


@dense("is used by 'gather'", TABLE, INDICES)
def one_entry_of_each_row(p, i):
    return squares(jnp.take_along_axis(p["w"][:3], i[:, None], 1))


@dense("is used by 'conv_general_dilated'", drawn(5, 5, 3), batch(2, 2, 3, 4))
def image(p, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return squares(
        lax.conv_general_dilated(p["w"][None], kernel, (1, 1), "SAME", dimension_numbers=numbers)
    )


@dense("is used by 'conv_general_dilated'", drawn(2, 3, 4), batch(6, 5, 3))
def kernel_for_groups_of_a_batch(p, x):
    return squares(_convolved(x, p["w"], batch_group_count=2))


@dense(
    "is used by 'conv_general_dilated'", {"w": drawn(2, 3, 4), "u": drawn(2, 3, 1)}, batch(6, 5, 3)
)
def concatenated_kernel(p, x):
    return squares(_convolved(x, jnp.concatenate([p["w"], p["u"]], 2)))


@dense(SEVERAL, drawn(3, 3, 3), batch(6, 5, 3))
def kernel_of_two_layouts(p, x):
    return squares(_convolved(x, p["w"])) + squares(_convolved(x, p["w"], kernel="WOI"))


@dense(SEVERAL, drawn(2, 3, 4), batch(6, 5, 3))
def kernel_with_and_without_groups(p, x):
    groups = _convolved(jnp.concatenate([x, x], 2), p["w"], feature_group_count=2)
    return squares(_convolved(x, p["w"])) + squares(groups)


def _convolved(x, w, kernel="WIO", **options):
    numbers = ("NWC", kernel, "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, **options)


@dense(SEVERAL, drawn(4, 12), batch(5, 4))
def pieces_that_overlap_with_a_slice(p, x):
    return squares(x @ jnp.split(p["w"], 3, 1)[1]) + squares(x @ p["w"][:, 3:5])


@dense("is returned by 'remat2'", drawn(4, 4), batch(4))
def returned_by_a_checkpoint(p, x):
    y, w = jax.checkpoint(lambda w, x: (jnp.tanh(x @ w), w.T))(p["w"], x)
    return squares(y @ w)


@dense("is returned by 'scan'", drawn(3, 4, 4), batch(4))
def returned_by_a_loop(p, x):
    y, w = lax.scan(lambda x, w: (jnp.tanh(x @ w), w.T), x, p["w"])
    return squares(y @ w[0])


THREE = {"w": drawn(2, 6), "u": drawn(1, 6), "v": drawn(3, 6)}


@dense("is used by 'concatenate'", THREE, batch(5, 6))
def concatenation_inside_of_another(p, x):
    first = jnp.concatenate([p["w"], p["u"]])
    return squares(x @ jnp.concatenate([first, p["v"]]))


@dense("is carried through 'scan'", drawn(4, 4), batch(5, 4))
def start_of_a_loop(p, x):
    def body(carry, x):
        return jnp.outer(jnp.tanh(carry @ x), x), None

    return squares(lax.scan(body, p["w"], x)[0])


@dense("is used by 'top_k'", drawn(4, 6), batch(4))
def largest_entries_and_their_places(p, x):
    return squares(x @ lax.top_k(p["w"], 2)[0])


@dense("has dtype complex64", drawn(4, 6) * np.complex64(1 + 1j), batch(4))
def complex_numbers(p, x):
    return squares(jnp.real(x.astype(jnp.complex64) @ p["w"]))


@dense("is the loss", {"w": np.float32(2)}, batch(4))
def loss_itself(p, x):
    return p["w"]


@dense("is used by 'scan'", {"w": drawn(2, 4, 4), "u": drawn(1, 4, 4)}, batch(4))
def layers_of_two_stacks(p, x):
    layers = jnp.concatenate([p["w"], p["u"]])
    return squares(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0])


@pytest.mark.parametrize("name", DENSE)
def test_ghost_materializes_params_without_common_form(name):
    loss, params, arrays, reason = DENSE[name]
    call, plan = planned(loss, params, *arrays)
    leaf = call.params.names().index("w")
    assert plan.materialized.get(leaf) == reason


LAYERS = (
    *("parameter_on_the_left", "experts_on_the_left", "heads", "layer_used_three_times", "tied"),
    *("kernel_with_strides_and_dilations", "depthwise", "grouped", "kernel_of_two_images"),
    *("rows_or_zeros", "one_input_and_one_feature", "autoencoder", "recurrent_in_layers"),
    *("autoencoders_in_layers_of_layers", "stacked_tables", "stacked_kernels"),
    *("concatenated_inputs", "concatenated_outputs", "concatenated_experts"),
    *("concatenated_in_a_loop", "concatenated_in_other_axes", "concatenated_before_a_loop"),
    "concatenated_layers",
)


@pytest.mark.parametrize("name", LAYERS)
def test_ghost_plan_sizes_match_data_and_cotangents(name):
    """The bounds, the choice of a way and the memory are computed from them."""
    loss, params, arrays, _ = CASES[name]
    call, plan = planned(loss, params, *arrays)
    measured = call.params.inexact_leaves()
    backward = jax.eval_shape(functools.partial(differentiate, plan), measured, arrays)

    def shapes(use, is_flipped):
        form = sites.to_gather_form if use.site.kind == primitives.GATHER else sites.to_matmul_form
        both = [backward.data[use.number], backward.cotangents[use.number]]
        x, d = (v.shape for v in jax.eval_shape(functools.partial(form, use), *both))
        assert x[:3] == d[:3]
        x = (*x, 1)
        return (*x[:3], *((d[3], x[3]) if is_flipped else (x[3], d[3])))

    for part in (part for parts in plan.parts for part in parts):
        found = [shapes(*use) for use in part.uses]
        examples, groups, _, inputs, outputs = found[0]
        positions = sum(shape[2] for shape in found)
        assert part.sizes == (groups, positions, inputs, outputs)
        assert examples == call.examples
