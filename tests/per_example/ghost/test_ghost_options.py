"""What `clipped_grad` takes, with the method "ghost"; `grad_norms` and `explain`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_losses import CASES, planned

from optaxclip import per_example, scopes

RNG = np.random.default_rng(0)
PARAMS = {"v": RNG.normal(size=(7, 2)), "w": RNG.normal(size=(5, 7)), "b": RNG.normal(size=7)}
PARAMS = {name: x.astype(np.float32) for name, x in PARAMS.items()}
X, Y = RNG.normal(size=(10, 5)).astype(np.float32), RNG.normal(size=(10, 2)).astype(np.float32)
IS_PADDING = np.arange(10) == 7


def loss_fn(params, x, y):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y))


def result_of(method, **options):
    clip = per_example.clipped_grad(
        loss_fn, options.pop("threshold", 5.0), method=method, **options
    )
    return jax.jit(clip)(PARAMS, X, Y, is_padding=IS_PADDING)


OPTIONS = {
    "leaves": {"scope": scopes.leaf(), "split": "size"},
    "groups": {"scope": scopes.group({"v": "head", "w": "body", "b": "body"}), "threshold": 3.0},
    "thresholds by name": {"scope": scopes.leaf(), "threshold": {"b": 1.0, "v": 4.0, "w": 2.0}},
    "a small threshold": {"threshold": 1e-3},
    "no threshold": {"threshold": np.inf},
    "normalize": {"response": "normalize"},
    "auto_s": {"response": "auto_s"},
    "smooth": {"response": "smooth"},
    "microbatches": {"microbatch_size": 4},
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_ghost_results_match_vmap_method(name):
    found, expected = (result_of(method, **OPTIONS[name]) for method in ("ghost", "vmap"))
    counts = ("num_clipped", "num_unclipped", "num_dropped")
    for field in counts:
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    for field in ("grads", "norms", "losses"):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5),
            getattr(found, field),
            getattr(expected, field),
        )


@pytest.mark.slow
def test_ghost_supports_keys_aux_and_argument_positions():
    def loss(scale, example, params):
        noise = jax.random.normal(example["key"], ())
        total = scale * jnp.sum(jnp.tanh(example["x"] @ params["w"]))
        return total + noise, {"x": example["x"], "noise": noise}

    batch = {"key": jax.random.split(jax.random.key(1), 10), "x": X}
    options = {"argnums": 2, "batch_argnums": 1, "has_aux": True, "microbatch_size": 3}
    args = (jnp.float32(0.1), batch, PARAMS)
    found, expected = (
        jax.jit(per_example.clipped_grad(loss, 1.0, method=method, **options))(*args)
        for method in ("ghost", "vmap")
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found.aux, expected.aux)
    norms, losses, aux = jax.jit(per_example.grad_norms(loss, **options))(*args)
    np.testing.assert_array_equal(norms, found.norms)
    np.testing.assert_array_equal(losses, found.losses)
    np.testing.assert_array_equal(aux["x"], X)


def by_size(flat):
    """A scope of a user: small leaves share a norm."""
    is_small = {
        name: x.size < 10 for name, x in zip(flat.names(), flat.inexact_leaves(), strict=True)
    }
    return scopes.group({name: "small" if is_small[name] else "large" for name in is_small})(flat)


@pytest.mark.gpu
@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.tree(), scopes.leaf(), by_size])
def test_grad_norms_agree_between_methods(scope):
    fns = (per_example.grad_norms(loss_fn, scope=scope, method=way) for way in ("ghost", "vmap"))
    (found, losses), (expected, _) = (jax.jit(fn)(PARAMS, X, Y) for fn in fns)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(losses, jax.jit(jax.vmap(loss_fn, (None, 0, 0)))(PARAMS, X, Y), 1e-5)


def recurrent(params, x):
    def body(h, x):
        return jnp.tanh(h @ params["w"] + x), h

    return jnp.sum(jnp.sin(lax.scan(body, x[0], x)[1]))


def of_gradients(params, x):
    each = jax.vmap(jax.grad(recurrent), (None, 0))(params, x)["w"]
    return jnp.sum(jnp.sqrt(jnp.sum(jnp.square(each), (1, 2))))


def of_norms(params, x):
    return jnp.sum(per_example.grad_norms(recurrent)(params, x)[0])


@pytest.mark.slow
def test_grad_norms_derivatives_match_in_loops():
    x = np.random.default_rng(1).normal(size=(3, 5, 4)).astype(np.float32)
    params = {"w": np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32) / 3}

    def after_two_steps(penalty, scan, params):
        def step(params, _):
            found = jax.grad(penalty)(params, x)
            return jax.tree.map(lambda w, g: w - 0.01 * g, params, found), None

        return penalty(scan(step, params)[0], x)

    def in_a_loop(step, params):
        return lax.scan(step, params, None, length=2)

    def unrolled(step, params):
        return step(step(params, None)[0], None)

    @jax.jit
    def derivatives(params):
        ways = ((of_gradients, unrolled), (of_norms, unrolled), (of_norms, in_a_loop))
        return [jax.grad(functools.partial(after_two_steps, *way))(params)["w"] for way in ways]

    expected, outside, inside = derivatives(params)
    size = np.abs(expected).max()
    np.testing.assert_allclose(outside, expected, atol=2e-3 * size)
    np.testing.assert_allclose(inside, outside, atol=1e-5 * size)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [None, 3])
def test_ghost_without_differentiable_params_returns_zero_norms(size):
    params = {"steps": jnp.arange(3), "none": None}
    clip = per_example.clipped_grad(
        lambda params, x: jnp.mean(x), 1.0, method="ghost", microbatch_size=size
    )
    result = jax.jit(clip)(params, X)
    np.testing.assert_array_equal(result.norms, np.zeros(10))
    assert result.num_unclipped == 10


def shapes(examples, x, **params):
    """The shapes of parameters and of a batch."""
    return jax.eval_shape(
        lambda: ({name: jnp.zeros(n) for name, n in params.items()}, jnp.zeros((examples, x)))
    )


def chosen(loss, *args):
    call, plan = planned(loss, *args)
    return plan.microbatch_size(call.examples)


def test_ghost_microbatch_size_respects_memory_limit():
    def dense(params, x):
        return jnp.sum(jnp.sin(params["b"]) * x)

    def two_dense(params, x):
        return jnp.sum(jnp.sin(params["b"]) * jnp.cos(params["c"]) * x)

    def layer(w, x):
        return jnp.tanh(x @ w)

    def in_checkpoint(params, x):
        return jnp.sum(jax.checkpoint(layer)(params["w"], x))

    def in_loop(layer, params, x):
        return jnp.sum(lax.scan(lambda x, _: (layer(params["w"], x), None), x, None, 7)[0])

    # 256 MiB hold 256 gradients of 1 MiB each; so do twice the parameters, where these are larger.
    size = 2**18
    assert chosen(dense, *shapes(100, size, b=(size,))) == 100
    assert chosen(dense, *shapes(1024, size, b=(size,))) == 256
    assert chosen(dense, *shapes(1024, size, b=(size,), w=(255, size))) == 512
    assert chosen(two_dense, *shapes(1024, size, b=(size,), c=(size,))) == 128
    assert chosen(dense, *shapes(1, size, b=(size,))) == 1
    # Data and output of the layer have 4 KiB each.
    size = 2**10
    assert chosen(in_checkpoint, *shapes(2**16, size, w=(size, size))) == 2**15
    in_both = functools.partial(in_loop, jax.checkpoint(layer))
    assert chosen(in_both, *shapes(2**16, size, w=(size, size))) == 2**15 // 7
    # Plain backpropagation keeps the data of a loop too.
    assert chosen(functools.partial(in_loop, layer), *shapes(2**16, size, w=(size, size))) == 2**16


def test_ghost_scans_over_automatic_microbatches():
    def loss(params, x):
        return jnp.vdot(jnp.sin(params["b"]), x)

    for fn in per_example.grad_norms(loss), per_example.clipped_grad(loss, 1.0, method="ghost"):
        eqns = jax.make_jaxpr(fn)(*shapes(1024, 2**18, b=(2**18,))).eqns
        assert [eqn.params["length"] for eqn in eqns if "length" in eqn.params] == [4]


def test_ghost_does_not_compare_many_rows_pairwise():
    def loss(params, ids):
        return jnp.sum(jnp.sin(params["w"][ids]))

    args = jax.eval_shape(lambda: ({"w": jnp.zeros((50, 8))}, jnp.zeros((2, 300), int)))
    assert "300,300" not in str(jax.make_jaxpr(per_example.grad_norms(loss))(*args))


def test_ghost_accepts_empty_batch():
    found = jax.jit(per_example.clipped_grad(loss_fn, 1.0, method="ghost"))(PARAMS, X[:0], Y[:0])
    jax.tree.map(np.testing.assert_array_equal, found.grads, jax.tree.map(np.zeros_like, PARAMS))
    assert found.norms.shape == (0,)


@pytest.mark.slow
def test_ghost_exports_with_symbolic_batch_size():
    (count,) = jax.export.symbolic_shape("count")
    clip = per_example.clipped_grad(loss_fn, 5.0, method="ghost")
    shapes = [jax.ShapeDtypeStruct((count, x.shape[1]), x.dtype) for x in (X, Y)]
    stored = jax.export.export(jax.jit(clip))(PARAMS, *shapes).serialize()
    result = jax.export.deserialize(stored).call(PARAMS, X, Y)
    assert isinstance(result, per_example.PerExampleResult)
    np.testing.assert_allclose(result.norms, jax.jit(clip)(PARAMS, X, Y).norms, rtol=1e-6)


def test_ghost_rejects_transforms_and_several_groups_per_leaf():
    with pytest.raises(ValueError, match=r'None with method="ghost".* use method="vmap"'):
        per_example.clipped_grad(
            loss_fn, 1.0, method="ghost", pre_clipping_transform=lambda tree: tree
        )
    for scope in (scopes.unit(), scopes.leaf(stacked={"b": 0, "v": 1, "w": 0})):
        with pytest.raises(
            ValueError, match=r"scope must not .* method=\"ghost\", but it splits leaf 'v'"
        ):
            per_example.clipped_grad(loss_fn, 1.0, method="ghost", scope=scope)(PARAMS, X, Y)
        with pytest.raises(
            ValueError, match=r"scope must not .* method=\"ghost\", but it splits leaf 'v'"
        ):
            per_example.grad_norms(loss_fn, scope=scope)(PARAMS, X, Y)


def test_invalid_per_example_losses_raise():
    with pytest.raises(TypeError, match="must return a floating-point scalar, but"):
        per_example.explain(lambda params, x: jnp.argmax(x @ params["w"]), PARAMS, X)
    for make in (per_example.grad_norms, lambda loss: per_example.clipped_grad(loss, 1.0)):
        with pytest.raises(ValueError, match="must return a scalar"):
            make(lambda params, x: x @ params["w"])(PARAMS, X)
    # A pair is needed, and a tuple: neither an array of two nor three outputs.
    for found in (lambda x: x[0], lambda x: x[:2], lambda x: (x[0], x, x)):
        with pytest.raises(TypeError, match=r"must return \(loss, aux\)"):
            per_example.grad_norms(lambda _, x, found=found: found(x), has_aux=True)(PARAMS, X)


def test_explain_reports_norm_method_and_reason():
    def loss(params, x):
        return jnp.sum(x @ params["w"] @ params["v"]) + jnp.sum(params["v"] ** 2)

    text = per_example.explain(loss, *jax.eval_shape(lambda: (PARAMS, X)))
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines] == ["parameter", "b", "v", "w"]
    assert "not used" in text.splitlines()[1]
    assert "'integer_pow'" in text.splitlines()[2]
    assert "56 B" in text.splitlines()[2]
    assert "inputs and output cotangents" in text.splitlines()[3]


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("tokens", "72 B"),  # two Gram matrices of 3 positions
        ("many_tokens", "96 B"),  # a gradient
        ("tied_and_small", "112 B"),  # likewise
        ("rows", "240 B"),  # for 6 positions a row of 4 entries, and which of them have one row
        ("layers_of_layers", "0 B"),
        ("stacked_wide_layers", "96 B"),  # for each of 3 layers two Gram matrices of 2 positions
        ("tied", "288 B"),  # two Gram matrices of 2 positions of the product and 4 of the table
        ("kernel_of_patches", "640 B"),  # 4 patches of 32 pixels, and two Gram matrices
        ("kernel", "2.391 KiB"),  # 30 patches of 18 pixels, and a gradient of 72 entries
    ],
)
def test_explain_reports_memory_per_example(name, memory):
    loss, params, batch, _ = CASES[name]
    assert per_example.explain(loss, params, *batch).endswith(f"  {memory}")


def test_explain_formats_aligned_table():
    def loss(params, x):
        others = sum(jnp.sum(jnp.sin(params[name])) for name in "abc")
        return others * jnp.sum(x @ params["w"])

    sizes = {"a": (256,), "b": (3 * 2**18,), "c": (2**28,), "unused": (2,), "w": (3, 4)}
    params = {name: jax.ShapeDtypeStruct(size, np.float32) for name, size in sizes.items()}
    text = per_example.explain(loss, params, jax.ShapeDtypeStruct((2, 3), np.float32))
    lines = text.splitlines()
    assert [re.split("  +", line) for line in lines] == [
        ["parameter", "shape", "norms from", "positions", "memory"],
        ["a", "(256,)", "gradients of examples, because it is used by 'sin'", "-", "1 KiB"],
        ["b", "(786432,)", "gradients of examples, because it is used by 'sin'", "-", "3 MiB"],
        ["c", "(268435456,)", "gradients of examples, because it is used by 'sin'", "-", "1 GiB"],
        ["unused", "(2,)", "is not used: norm 0", "-", "0 B"],
        ["w", "(3, 4)", "norms of inputs and output cotangents", "1", "0 B"],
    ]
    assert {len(line) for line in lines} == {len(lines[3])}


def test_clipped_grad_accepts_list_padding_and_scalar_aux():
    def loss_and_number(*args):
        return loss_fn(*args), 1.0

    for method in ("ghost", "vmap"):
        clip = per_example.clipped_grad(loss_and_number, 1.0, method=method, has_aux=True)
        padded = functools.partial(clip, is_padding=IS_PADDING.tolist())
        assert jax.eval_shape(padded, PARAMS, X, Y).aux.shape == (10,)
