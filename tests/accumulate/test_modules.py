"""Models of Flax NNX and Equinox: refused as they are, and right as the page takes them apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shown_code
from flax import nnx

from optaxclip import accumulate, per_example

PAGE = "docs/recipes/modules.md"
X = jnp.array([[3.0, 4.0], [1.0, 2.0], [5.0, 1.0], [2.0, 2.0]])
NORMS = [70.0, 13.416408, 61.188236, 22.627417]  # with BatchStat they would be 72.75, 15.87, ...


class Centred(nnx.Module):
    def __init__(self, mean):
        self.w, self.mean = nnx.Param(jnp.ones(2)), mean

    def __call__(self, x):
        return (x - self.mean) @ self.w[...]


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def clipped_norms(model):
    return per_example.clipped_grad(loss_fn, 1.0)(model, X).norms


GRAD_FN = accumulate.value_and_grad(loss_fn, microbatch_size=2)
TAKERS = {
    "accumulate": lambda model: GRAD_FN(model, X),
    "init": lambda model: GRAD_FN.init(model, X),
    "clipped_grad": clipped_norms,
    "sensitivity": lambda model: per_example.clipped_grad(loss_fn, {"w": 1.0}).sensitivity(
        params=model
    ),
    "norms": lambda model: per_example.grad_norms(loss_fn)(model, X)[0],
    "explain": lambda model: per_example.explain(loss_fn, model, X),
}


@pytest.mark.parametrize("name", TAKERS)
def test_nnx_modules_with_statistics_raise(name):
    model = Centred(nnx.BatchStat(jnp.zeros(2)))
    for params in (model, nnx.state(model)):
        with pytest.raises(TypeError, match=r"BatchStat 'mean'(.|\n)*merge\(.*, copy=True\)"):
            TAKERS[name](params)


def equinox():
    return pytest.importorskip("equinox")


def mlp():
    return equinox().nn.MLP(2, 1, 3, 1, key=jax.random.key(0))


def changed_in_the_loss():
    graph, params, rest = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param, ...)
    per_example.grad_norms(lambda params, x: loss_fn(nnx.merge(graph, params, rest), x))(params, X)


MERGE, COMBINE = r"nnx\.merge\(graph, params, rest, copy=True\)", r"eqx\.combine\(params, static\)"
REFUSED = {
    "key": (lambda: (Centred(nnx.RngKey(jnp.ones(2))), 1.0), "RngKey '0/mean'", MERGE),
    "array": (lambda: Centred(jnp.zeros(2)), "NNX array 'mean' instead of a Param", MERGE),
    "state": (
        lambda: nnx.state(Centred(jnp.zeros(2))),
        "NNX array 'mean' instead of a Param",
        MERGE,
    ),
    "two places": (
        lambda: nnx.List([nnx.Param(jnp.ones(2))] * 2),
        "the shared NNX Param '0', also at '1'",
        MERGE,
    ),
    "changed": (changed_in_the_loss, "Cannot mutate", MERGE),
    "function": (mlp, "non-array leaf 'activation' = <.* of an Equinox", COMBINE),
    "number": (
        lambda: (1.0, equinox().nn.Dropout(0.5)),
        "non-array leaf '1/p' = 0.5 of an",
        COMBINE,
    ),
    "no function": (
        lambda: equinox().filter(mlp(), equinox().is_inexact_array),
        "'NoneType' object is not callable",
        COMBINE,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_modules_raise_with_remedy(name):
    make, said, remedy = REFUSED[name]
    with pytest.raises(Exception, match=rf"(?s){said}.*{remedy}"):
        TAKERS["norms"](make())


@pytest.mark.parametrize("text", ["mine", "NoneType"])
def test_loss_errors_stay_unchanged(text):
    def wrong(params, x):
        raise ValueError(text)

    with pytest.raises(ValueError, match=text) as raised:
        per_example.grad_norms(wrong)(
            equinox().nn.Linear(2, 1, key=jax.random.key(0)) if text == "mine" else jnp.ones(2), X
        )
    assert "eqx" not in "".join(getattr(raised.value, "__notes__", []))


def test_modules_accept_nnx_models_with_only_params():
    model = Centred(0.0)
    np.testing.assert_allclose(TAKERS["norms"](model), NORMS, rtol=1e-6)
    np.testing.assert_allclose(clipped_norms(model), NORMS, rtol=1e-6)
    (value, grads, _), expected = GRAD_FN(model, X), nnx.value_and_grad(loss_fn)(model, X)
    np.testing.assert_allclose([value, *grads.w], [expected[0], *expected[1]["w"]], rtol=1e-6)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.w[...], 1 - expected[1]["w"][...], rtol=1e-6)


def test_modules_accept_chosen_variables_and_integers():
    graph, chosen, rest = nnx.split(Centred(nnx.BatchStat(jnp.zeros(2))), nnx.BatchStat, ...)
    of_chosen = per_example.grad_norms(lambda chosen, x: loss_fn(nnx.merge(graph, chosen, rest), x))
    np.testing.assert_allclose(of_chosen(chosen, X)[0], [392**0.5, 72**0.5, 288**0.5, 128**0.5])
    with jax.numpy_dtype_promotion("standard"):
        norms = TAKERS["norms"](Centred(jnp.zeros(2, int)))
    np.testing.assert_allclose(norms, NORMS, rtol=1e-6)


@jax.jit(static_argnames=("graph", "average"))
def by_nnx(graph, params, rest, x, key, average=False):
    model = nnx.view(nnx.merge(graph, params, rest, copy=True), use_running_average=average)
    nnx.reseed(model, default=key)
    found = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x[:, :1]) ** 2))(model)
    return *found, nnx.state(model, nnx.BatchStat)


def assert_close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 1e-6), found, expected)


def mean(trees):
    return jax.tree.map(lambda *rows: jnp.mean(jnp.stack(rows), 0), *trees)


def test_modules_page_matches_nnx():
    found = shown_code.run(shown_code.blocks(PAGE)[0], PAGE)
    graph, *model = (found[name] for name in ("graph", "params", "rest"))
    x, keys = found["x"], found["keys"]
    (value, statistics), grads, _ = found["grad_fn"](*model, x, x[:, :1], keys)
    expected = [by_nnx(graph, *model, x[i::3], keys[i]) for i in range(3)]
    statistics = jax.tree.map(lambda row: row.mean(0), statistics)
    assert_close((value, grads, statistics), mean(expected))
    assert np.std([float(loss) for loss, *_ in expected]) > 1e-4  # of different masks
    of_each = [by_nnx(graph, *model, x[i : i + 1], keys[i], average=True) for i in range(6)]
    assert_close(found["losses"], jnp.stack([loss for loss, *_ in of_each]))
    norms = [optax.tree.norm(grads) for _, grads, _ in of_each]
    assert_close(found["norms"], jnp.stack(norms))
    assert found["rest"]["layers"][1]["mean"][...].any()


@pytest.mark.slow
def test_modules_page_matches_equinox():
    eqx = pytest.importorskip("equinox")
    found = shown_code.run(shown_code.blocks(PAGE)[1], PAGE)
    (x, _, keys), model = found["batch"], found["trained"]

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def by_equinox(model, x, keys):
        return jnp.mean((jax.vmap(model)(x, key=keys) - x) ** 2)

    value, grads, _ = found["grad_fn"](found["params"], x, x, keys)
    assert_close((value, grads), mean([by_equinox(model, x[i::3], keys[i::3]) for i in range(3)]))
    of_each = [by_equinox(model, x[i : i + 1], keys[i : i + 1]) for i in range(6)]
    assert_close(found["losses"], jnp.stack([loss for loss, _ in of_each]))
    assert_close(found["norms"], jnp.stack([optax.tree.norm(grads) for _, grads in of_each]))


def test_states_refuse_leaves_without_dtype():
    state = nnx.State({"w": nnx.Param(jnp.ones(2)), "mean": object()})
    with pytest.raises(TypeError, match="the NNX array 'mean' instead of a Param"):
        GRAD_FN.init(state, X)
