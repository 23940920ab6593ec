"""Names and calls of other libraries, looked for here: an error says where to go."""

import inspect
import operator
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial
from methods_table import GRADS, PARAMS, label
from public_names import public

import optaxclip
from optaxclip import clip_tree, monitor, norms, ops, per_example, responses, scopes, thresholds
from optaxclip._base.doors import SIGNS

TORCH = ["clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_"]
TORCH += ["get_total_norm"]
OTHERS = {
    "tensorflow": ["clip_by_average_norm", "global_norm", "clip_gradient_norms"],
    "keras": ["clipnorm", "clipvalue", "global_clipnorm"],
    "timm": ["agc", "adaptive_clip_grad", "dispatch_clip_grad"],
    "fastai": ["GradientClip"],
    "lightning": ["clip_gradients", "gradient_clip_val"],
    "paddle": ["ClipGradByNorm", "ClipGradByValue", "ClipGradByGlobalNorm"],
    "jax": ["clip_grads", "l2_norm"],
    "papers": ["ZClip", "AutoClip", "AGC", "AdaGC"],
    "ours": ["zscore", "history", "global_norm", "leaf", "record", "clip_sum", "suggest", "lp"],
}


def said_of(namespace, name):
    with pytest.raises(AttributeError) as raised:
        getattr(namespace, name)
    return str(raised.value)


@pytest.mark.parametrize("name", [*TORCH, *(name for names in OTHERS.values() for name in names)])
def test_a_name_of_others_leads_to_ours(name):
    for namespace in (optaxclip, ops, thresholds, monitor):
        if name not in dir(namespace):
            assert "; here it is " in said_of(namespace, name)
            assert not hasattr(namespace, name)


LIBRARIES = {
    "optax": r"clip|global_norm|if_finite|nans|^skip_|unitwise",
    "torch.nn.utils": r"clip_|total_norm",
    "tensorflow": "clip_",
    "tensorflow.compat.v1": "clip_",
    "keras.optimizers": "clip",
}


@pytest.mark.parametrize(
    "library", [x if x == "optax" else pytest.param(x, marks=pytest.mark.slow) for x in LIBRARIES]
)
def test_all_clips_of_a_library_are_known(library):
    module = pytest.importorskip(library)
    names = [name for name in dir(module) if not inspect.ismodule(getattr(module, name))]
    if library == "keras.optimizers":
        names = inspect.signature(module.SGD).parameters
    found = [name for name in names if re.search(LIBRARIES[library], name) and name[0] != "_"]
    assert found
    for name in found:
        if not hasattr(optaxclip, name) and not hasattr(ops, name):
            assert "; here it is " in said_of(optaxclip, name)


@pytest.mark.parametrize("name", SIGNS)
def test_where_a_sign_leads_there_is_something(name):
    places = re.findall(r"((?:\w+\.)*\w+)\(", SIGNS[name])
    assert places
    for place in places:
        assert callable(operator.attrgetter(place)(optaxclip)), place


def test_names_that_nobody_knows_are_as_in_any_module():
    for name in ("nope", "__nope__", "pytest_plugins", "__path__x"):
        assert not hasattr(optaxclip, name)
        with pytest.raises(AttributeError, match=f"^module 'optaxclip' has no attribute '{name}'$"):
            getattr(optaxclip, name)


def test_what_is_not_public_is_not_offered():
    assert hasattr(norms, "_divided")
    assert "here it is" not in said_of(norms, "divided")


@pytest.mark.parametrize("namespace", ["optaxclip", "optaxclip.thresholds"])
def test_an_import_of_a_name_of_others_is_told_where_to_go(namespace):
    with pytest.raises(ImportError, match="; here it is clip_by_global_norm"):
        exec(f"from {namespace} import clip_grad_norm_")


def last_line(code):
    """What Python prints last of an error, with its own proposals."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_python_proposes_no_other_name_beside_a_sign():
    said = r".*; here it is clip_by_global_norm\(max_norm\) [^?]*$"
    last = last_line("import optaxclip; optaxclip.clip_grad_norm_")
    assert re.match(f"AttributeError: {said}", last)
    assert re.match(f"ImportError: {said}", last_line("from optaxclip import clip_grad_norm_"))
    last = last_line("from optaxclip.thresholds import clip_grad_norm_")
    assert re.match(f"ImportError: {said}", last)
    last = last_line("import optaxclip; optaxclip.clip_by_globl_norm")
    assert last.endswith("Did you mean: 'clip_by_global_norm'?")


def test_packages_that_are_no_public_names_can_be_imported():
    from optaxclip import commands, config
    from optaxclip.tuning import events

    assert all(map(inspect.ismodule, (commands, config, events)))


def makers_of_transformations():
    return {
        name: fn
        for name, fn in public().items()
        if inspect.isfunction(fn) and "Transformation[" in str(inspect.signature(fn))
    }


MAKERS = makers_of_transformations()


def test_all_transformations_are_found():
    assert {"clip", "clip_by", "zclip", "monitor.record", "skip_above", "hyperball"} <= set(MAKERS)
    assert len(MAKERS) >= 30


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_in_the_place_of_a_limit(name):
    make = MAKERS[name]
    said = rf"{make.__name__} makes a transformation: for gradients, .* tx\.update\(grads, state, "
    for args in ((GRADS,), (GRADS, 1.0), (GRADS, 1.0, 2.0), (jnp.ones((2, 3)), 1.0, 2.0, 3.0)):
        if name == "clip_by_value" and len(args) == 2:
            continue  # bounds may be arrays
        with pytest.raises((TypeError, ValueError), match=said):
            make(*args)
    with pytest.raises((TypeError, ValueError), match=said):
        jax.jit(make)(GRADS)


def test_other_errors_say_nothing_of_gradients():
    mistakes = [
        lambda: optaxclip.clip_by_global_norm(-1.0),
        lambda: optaxclip.zclip(z_thresh=-1.0),
        lambda: optaxclip.clip_by_global_norm(np.float32(-1)),
        lambda: optaxclip.clip_by(scopes.tree(), thresholds.given({"a": jnp.ones(2)}), foo=1),
        lambda: optaxclip.clip_by(scopes.tree(), Partial(jnp.take, jnp.ones(2)), foo=1),
        lambda: optaxclip.skip_above(optax.adam(1e-3), None),
        lambda: optaxclip.per_example_clip_and_aggregate(-1.0, 1.0, jax.random.PRNGKey(0)),
    ]
    for make in mistakes:
        with pytest.raises((TypeError, ValueError)) as raised:
            make()
        assert "gradients" not in str(raised.value)


def once(name):
    """The call that a message proposes for gradients, or None."""
    with pytest.raises((TypeError, ValueError)) as raised:
        MAKERS[name](GRADS, 1.0, 2.0)
    found = re.search(r"for gradients, (\w.*), or in a training step", str(raised.value))
    return found and found[1]


ONCE = {name: call for name in MAKERS if (call := once(name))}
NAMES = {"clip_tree": clip_tree, "clip_by": optaxclip.clip_by, "ops": ops, "scopes": scopes}
NAMES |= {"thresholds": thresholds, "per_example": per_example, "labels": label}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ONCE)
def test_the_proposed_call_clips_as_the_transformation_does(name):
    grads = GRADS
    if name.endswith("per_example_clip_and_aggregate"):
        grads = {"w": GRADS["w"]}  # one leaf, so that all leaves have as many examples
    made = eval(ONCE[name], NAMES | {"grads": grads, "params": PARAMS})
    found = made[0] if isinstance(made, tuple) else made
    limits = {"clip_by_value": (-1.0, 1.0), "adaptive_grad_clip": (0.01,)}
    limits |= {"clip_by_group_norm": (1.0, label), "clip_by": (scopes.tree(), 1.0)}
    limits |= {"per_example_clip_and_aggregate": (1.0, 0)}
    tx = MAKERS[name](*limits.get(name.split(".")[-1], (1.0,)))
    params = PARAMS if grads is GRADS else {"w": PARAMS["w"][0]}
    expected = tx.update(grads, tx.init(params), params)[0]
    if grads is not GRADS:  # a mean, and not a sum
        expected = jax.tree.map(lambda x: x * 6, expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


def parts(name):
    """The call of `clip_by` that a message proposes for a keyword of a part."""
    with pytest.raises(TypeError) as raised:
        MAKERS[name](response="clip")
    found = re.search(r"take the method's parts, (clip_by\(.*\))\. It takes", str(raised.value))
    return found and found[1]


PARTS = ["clip_by_norm", "clip_by_global_norm", "adaptive_grad_clip", "clip_by_group_norm"]
PARTS += ["clip_by_block_rms", "zclip", "adagc", "clip_by_quantile", "clip_by_ema_norm"]
PARTS += ["autoclip", "clip_by_median_norm", "clip_by_window_norm"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", PARTS)
def test_the_proposed_parts_make_the_same_method(name):
    made = eval(parts(name), NAMES)
    limits = {"adaptive_grad_clip": (0.01,), "clip_by_group_norm": (1.0, label)}
    first = next(iter(inspect.signature(MAKERS[name]).parameters.values()))
    needs_limit = first.default is inspect.Parameter.empty
    tx = MAKERS[name](*limits.get(name, (1.0,) if needs_limit else ()))
    state, other = tx.init(PARAMS), made.init(PARAMS)
    step, of_parts = jax.jit(tx.update), jax.jit(made.update)
    for size in (1.0, 1.5, 30.0):
        grads = jax.tree.map(lambda x: size * x, GRADS)  # noqa: B023 - used at once
        found, other = of_parts(grads, other, PARAMS)
        expected, state = step(grads, state, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


WITH_KEYWORDS = {
    name: fn
    for name, fn in public().items()
    if inspect.isfunction(fn)
    and (
        name.split(".")[0] in ("thresholds", "scopes")
        or fn in (norms.lp, responses.band, responses.auto_s, responses.clip_with_eps)
        or fn in (per_example.clipped_grad, per_example.quantile_limit)
        or name in ("accumulate.value_and_grad", "tuning.sweep", "tuning.suggest")
        or name in MAKERS
    )
}


@pytest.mark.parametrize("name", WITH_KEYWORDS)
def test_a_misspelt_keyword_is_answered_with_the_right_one(name):
    fn = WITH_KEYWORDS[name]
    for keyword in inspect.signature(fn).parameters:
        if len(keyword) > 3:
            misspelt = keyword[:2] + keyword[3:]
            with pytest.raises(TypeError, match=rf"'{misspelt}'; did you mean '\w+'\? It takes \["):
                fn(**{misspelt: 1})


def test_the_number_of_microbatches_is_not_their_size():
    for fn in (optaxclip.accumulate.value_and_grad, per_example.clipped_grad):
        with pytest.raises(TypeError, match="'num_microbatches': pass microbatch_size=, "):
            fn(jnp.sum, num_microbatches=4)
