"""What is known of a leaf from several sides: from names of axes, from its type, from specs."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor, ops, scopes

WHOLE = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)
NORM = np.linalg.norm(WHOLE.astype(np.float64))


def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def region(fn, *specs, **options):
    in_specs, out_specs = specs
    return jax.shard_map(fn, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, **options)


def columns(x, scope=None, **options):
    return optaxclip.clip_tree(x, 0.5, scope=scope or scopes.unit(), **options)


def clipped_columns(x):
    return x * (0.5 / np.linalg.norm(x.astype(np.float64), axis=0))


def test_unit_scope_under_vmap_requires_specs():
    clip = jax.vmap(functools.partial(columns, axis_name="lanes"), axis_name="lanes")
    with pytest.raises(ValueError, match="pass a pytree of PartitionSpec as specs"):
        clip(WHOLE[:, :1])


def test_axis_name_applies_to_all_leaves():
    by_norm = optaxclip.clip_by(scopes.leaf(), 0.5, axis_name="lanes")

    def clip(x):
        return columns(x, axis_name="lanes")[0], by_norm.update(x, None)[0]

    of_columns, of_all = jax.jit(jax.vmap(clip, axis_name="lanes"))(WHOLE)
    expected = clipped_columns(WHOLE.reshape(-1, 6)).reshape(WHOLE.shape)
    np.testing.assert_allclose(of_columns, expected, rtol=1e-5)
    np.testing.assert_allclose(of_all, WHOLE * (0.5 / NORM), rtol=1e-5)


def test_axis_name_combines_vmap_and_mesh_axes():
    mean = functools.partial(ops.global_norm, axis_name="lanes", norm="rms")
    found = jax.jit(jax.vmap(mean, axis_name="lanes"))(WHOLE)
    np.testing.assert_allclose(found, np.full(4, NORM / WHOLE.size**0.5), rtol=1e-6)
    norm = functools.partial(ops.global_norm, axis_name="lanes")
    split = region(functools.partial(norm, specs=P("a")), P("a"), P(), check_vma=False)
    placed = functools.partial(norm, specs=NamedSharding(mesh(), P("a")))
    for each in (split, placed):
        found = jax.jit(jax.vmap(each, axis_name="lanes"))(WHOLE)
        np.testing.assert_allclose(found, np.full(4, NORM), rtol=1e-6)


def test_specs_accept_axes_outside_shard_map():
    def clip(x):
        specs = NamedSharding(mesh(), P("a", "b"))
        return columns(x, specs=specs)[0], ops.global_norm(x, specs=specs)

    x = WHOLE[0]
    partly = region(clip, P("a"), (P("a"), P()), axis_names={"a"}, check_vma=False)
    updates, norm = jax.jit(partly)(jax.device_put(x, NamedSharding(mesh(), P("a", "b"))))
    np.testing.assert_allclose(updates, clipped_columns(x), rtol=1e-5)
    np.testing.assert_allclose(norm, np.linalg.norm(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("date"), r"must use only the mesh axes \['a', 'b'\], got \['date'\]"),
        (P(("a", "date")), r"must use only the mesh axes .*, got \['date'\]"),
        (P(P.UNCONSTRAINED), "must not contain UNCONSTRAINED, got .*; name the mesh axes"),
    ],
    ids=str,
)
def test_specs_with_unknown_axes_raise(spec, message):
    norm = functools.partial(ops.global_norm, specs=spec)
    clip = optaxclip.clip_by(scopes.leaf(stacked=1), 1.0, specs=spec)
    ways = [
        *(region(norm, P("a"), P(), check_vma=tracked) for tracked in (True, False)),
        *(region(clip.init, P("a"), P(), check_vma=tracked) for tracked in (True, False)),
        norm,
    ]
    with jax.set_mesh(mesh()):
        for way in ways:
            with pytest.raises(ValueError, match=f"^specs {message}"):
                jax.eval_shape(way, WHOLE)


def test_axis_name_replaces_specs_with_known_types():
    def clip(x):
        return columns(x, scopes.axes(0), axis_name="a")[0]

    found = jax.jit(region(clip, P("a", "b"), P("a", "b")))(WHOLE[0])
    np.testing.assert_allclose(found, clipped_columns(WHOLE[0]), rtol=1e-5)


def test_types_override_specs_of_replicated_leaves():
    norm = region(functools.partial(ops.global_norm, specs=P("a", "b")), P("a"), P())
    np.testing.assert_allclose(jax.jit(norm)(WHOLE), NORM, rtol=1e-6)


def test_specs_find_mesh_in_context_or_other_specs():
    tree = {"b": WHOLE[0], "w": WHOLE}
    mixed = {"b": P(), "w": NamedSharding(mesh(), P("a"))}
    norms = [jax.jit(functools.partial(ops.global_norm, specs=mixed))(tree)]
    with jax.set_mesh(mesh()):
        norms.append(jax.jit(functools.partial(ops.global_norm, specs=P("a")))(tree))
    expected = np.hypot(NORM, np.linalg.norm(WHOLE[0].astype(np.float64)))
    np.testing.assert_allclose(norms, [expected] * 2, rtol=1e-6)


def test_axes_scope_accepts_groups_sharded_over_several_axes():
    clip = functools.partial(columns, scope=scopes.axes(-1), specs=P("a", "b"))
    whole = region(clip, P("a", "b"), (P("a", "b"), P()))
    assert jax.eval_shape(whole, WHOLE)[0].shape == WHOLE.shape


def test_empty_specs_count_replicated_gradients_once():
    """Data parallelism: by `axis_name=` the norm would be too large by the root of 8."""
    grads = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    mean = grads.mean(0)

    def clip(x, **options):
        tx = optaxclip.clip_by_global_norm(1e-3, **options)
        average = jax.lax.pmean(x, ("a", "b") if x.ndim > 1 else "i")
        updates, state = tx.update(average, tx.init(average))
        return updates, state.info.norm

    by_pmap = jax.pmap(functools.partial(clip, specs=P()), axis_name="i")(grads)
    by_shard_map = jax.jit(
        region(functools.partial(clip, specs=P()), P(("a", "b")), P(), check_vma=False)
    )(grads)
    for updates, norm in (by_pmap, by_shard_map):
        np.testing.assert_allclose(norm, np.full(np.shape(norm), np.linalg.norm(mean)), rtol=1e-6)
        for x in np.reshape(updates, (-1, 5)):
            np.testing.assert_allclose(x, mean * (1e-3 / np.linalg.norm(mean)), rtol=1e-5)
    first = (
        r"pass specs=PartitionSpec\(\) if gradients are replicated \(after pmean\), axis_name if"
    )
    with pytest.raises(ValueError, match=first):
        jax.pmap(clip, axis_name="i")(grads)
    with pytest.raises(ValueError, match=first):
        jax.eval_shape(region(clip, P(("a", "b")), P(), check_vma=False), grads)


@pytest.mark.parametrize("axis_name", [("a", 3), {"a"}], ids=str)
def test_axis_name_must_contain_strings(axis_name):
    with pytest.raises(TypeError, match=r"^axis_name must be"):
        ops.global_norm(WHOLE, axis_name=axis_name)
    with pytest.raises(TypeError, match=r"^axis_name must be"):
        columns(WHOLE, axis_name=axis_name)
    with pytest.raises(TypeError, match=r"^axis_name must be"):
        optaxclip.clip_by(scopes.tree(), 1.0, axis_name=axis_name)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_name_keeps_unnamed_axes_separate(check_vma):
    """Four workers, of which each splits its gradient over two devices."""

    def clip(x):
        by_norm = optaxclip.clip_by_global_norm(0.5, axis_name="b")
        by_rule = optaxclip.zclip(max_norm=0.5, axis_name="b")
        return by_norm.update(x, None)[0], by_rule.update(x, by_rule.init(x))[0]

    split = region(clip, P("a", "b"), P("a", "b"), check_vma=check_vma)
    expected = WHOLE * (0.5 / np.linalg.norm(WHOLE.astype(np.float64), axis=(1, 2), keepdims=True))
    for found in jax.jit(split)(WHOLE):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_empty_axis_name_clips_devices_separately():
    clip = optaxclip.clip_by_global_norm(0.5, axis_name=())
    alone = region(lambda x: clip.update(x, None)[0], P("a"), P("a"))
    expected = WHOLE * (0.5 / np.linalg.norm(WHOLE.astype(np.float64), axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(jax.jit(alone)(WHOLE), expected, rtol=1e-5)


def test_ops_accept_axis_name_and_specs():
    x = np.float32([[3, 1], [0, 2], [4, 0], [0, 2]])

    def results(x, **options):
        return (
            ops.clip_by_norm(x, 1.0, **options),
            ops.clip_by_norm(x, 1.0, axes=0, **options),
            ops.clip_by_average_norm(x, 0.5, **options),
        )

    def of_row(row):
        return [found[0] for found in results(row[None], axis_name="lanes")]

    of_part = region(functools.partial(results, specs=P("a")), P("a"), P("a"), check_vma=False)
    norm = np.sqrt(34)
    expected = (x / norm, x / np.float32([5, 3]), x * (4 / norm))
    for found in jax.jit(lambda x: (jax.vmap(of_row, axis_name="lanes")(x), of_part(x)))(x):
        for y, of_numpy in zip(found, expected, strict=True):
            np.testing.assert_allclose(y, of_numpy, rtol=1e-6)


MAPS = {
    "shard_map": lambda fn: region(fn, P("a"), P("a")),
    "untracked": lambda fn: region(fn, P("a"), P("a"), check_vma=False),
    "pmap": lambda fn: jax.pmap(fn, axis_name="a"),
    "vmap": lambda fn: jax.vmap(fn, axis_name="a"),
}


@pytest.mark.parametrize("kind", MAPS)
def test_unknown_axis_name_raises(kind):
    for name in ("date", ("a", "date")):
        way = MAPS[kind](functools.partial(ops.clip_by_norm, clip_norm=1.0, axis_name=name))
        with pytest.raises(ValueError, match=r"axis_name must name a mapped axis, got 'date'"):
            jax.eval_shape(way, WHOLE)


def updated(tx, x, **extra):
    return tx.update(x, tx.init(x), **extra)[0]


CLIP, SKIP = optaxclip.clip_by_global_norm, optaxclip.skip_above
NUMBERS = {
    "value": lambda x, n, **told: updated(
        SKIP(optax.sgd(1.0), 9.0, loss_threshold=3.0, **told), x, value=n
    ),
    "loss": lambda x, n, **told: updated(monitor.record(2, loss=True, **told), x, loss=n),
    "norm": lambda x, n, **told: updated(CLIP(1.0, known_norm="norm", **told), x, norm=n),
    "use_norm": lambda x, n, **told: ops.clip_by_global_norm(x, 1.0, use_norm=n, **told)[0],
    "the threshold": lambda x, n, **told: updated(CLIP(n, **told), x),
    "the threshold of a skip": lambda x, n, **told: updated(SKIP(optax.sgd(1.0), n, **told), x),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_device_dependent_scalars_raise_with_shared_norm(what):
    """Some devices would take a step, and others not."""

    def run(of_device=lambda n: n, **told):
        def update(x):
            return NUMBERS[what](x, of_device(x[0, 0, 0]), **told)

        return jax.eval_shape(region(update, P("a"), P("a")), WHOLE)

    argument = what.removesuffix(" of a skip")
    for told in ({}, {"axis_name": "a"}, {"specs": P("a")}):
        with pytest.raises(
            ValueError,
            match=rf"{argument} must have the same value .* but varies over \['a'\]; use lax.pmean",
        ):
            run(**told)
        run(lambda n: jax.lax.pmean(n, "a"), **told)
    # Each device has a gradient of its own.
    run(axis_name=())
