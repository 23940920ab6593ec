"""The private gradient from a sum: the noise that belongs to it, then the mean."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import per_example, scopes

KEY = jax.random.key(0)
noisy_mean = per_example.noisy_mean


def zeros(threshold=1.0, shape=(300, 300), dtype=jnp.float32, **options):
    """The clipped sum of gradients that are 0: what is added to it is noise."""
    grads = {name: jnp.zeros((2, *shape), dtype) for name in ("v", "w")}
    return per_example.clip_sum(grads, threshold, **options)


@pytest.mark.slow
def test_noisy_mean_scales_noise_by_batch_size():
    """Added to the mean it would be a hundred times as large."""
    noise = jax.jit(noisy_mean)(zeros(threshold=2.0), 1.5, KEY, 100)
    both = np.asarray([noise["v"], noise["w"]])
    assert np.std(both[0]) == pytest.approx(2.0 * 1.5 / 100, rel=0.01)
    assert np.std(both[1]) == pytest.approx(2.0 * 1.5 / 100, rel=0.01)
    assert np.abs(np.mean(both)) < 4 * 0.03 / both.size**0.5
    assert np.abs(np.corrcoef(both.reshape(2, -1))[0, 1]) < 0.02
    # As of a Gaussian: 4.55 % are beyond two standard deviations, 0.27 % beyond three.
    for times, share in ((2, 0.0455), (3, 0.0027)):
        assert np.mean(np.abs(both) > times * 0.03) == pytest.approx(share, rel=0.1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.tree(), scopes.leaf()])
def test_noise_follows_total_bound_of_groups(scope):
    one = noisy_mean(zeros(scope=scope), 1.0, KEY, 1)
    assert np.std(one["v"]) == pytest.approx(1.0, rel=0.01)
    by_name = zeros({"v": 3.0, "w": 4.0}, scope=scopes.leaf())
    assert float(by_name.bound) == pytest.approx(5.0)
    for leaf in noisy_mean(by_name, 1.0, KEY, 1).values():
        assert np.std(leaf) == pytest.approx(5.0, rel=0.01)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("relation", "times"), [("add_or_remove_one", 1), ("replace_special", 1), ("replace_one", 2)]
)
def test_noise_follows_neighboring_relation(relation, times):
    grad_fn = per_example.clipped_grad(lambda w, x: jnp.sum(w * x), 0.7, microbatch_size=1)
    result = jax.jit(grad_fn)(jnp.zeros((200, 200)), jnp.zeros((2, 200, 200)))
    assert float(result.bound) == pytest.approx(0.7)
    noise = noisy_mean(result, 1.0, KEY, 1, relation=relation)
    assert np.std(noise) == pytest.approx(grad_fn.sensitivity(relation), rel=0.02)
    assert np.std(noise) == pytest.approx(times * 0.7, rel=0.02)


def test_noisy_mean_draws_different_noise_per_key():
    result = zeros()
    with jax.debug_key_reuse(True):
        first, second = (
            noisy_mean(result, 1.0, key, 1)["v"].ravel() for key in jax.random.split(KEY)
        )
    assert np.abs(np.corrcoef(first, second)[0, 1]) < 0.02
    again = noisy_mean(result, 1.0, jax.random.split(KEY)[0], 1)["v"].ravel()
    np.testing.assert_array_equal(again, first)
    raw = noisy_mean(result, 1.0, jax.random.PRNGKey(0), 1)["v"]
    np.testing.assert_array_equal(raw, noisy_mean(result, 1.0, KEY, 1)["v"])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_noisy_mean_draws_noise_in_float32(dtype):
    result = zeros(dtype=dtype)
    # Also if someone made the sum narrower: bfloat16 has 256 numbers between 1 and 2.
    narrow = jax.tree.map(lambda x: x.astype(dtype), result.grads)
    noise = noisy_mean(result._replace(grads=narrow), 1.0, KEY, 1)["v"]
    is_complex = dtype == jnp.complex64
    assert noise.dtype == (dtype if is_complex else jnp.float32)
    for part in (noise.real, noise.imag) if is_complex else (noise,):
        assert np.std(part) == pytest.approx(1.0, rel=0.01)
        assert len(np.unique(part)) > 80_000


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_noisy_mean_keeps_float64():
    noise = noisy_mean(zeros(dtype=np.float64), np.float64(1), KEY, np.int64(2))
    assert noise["v"].dtype == np.float64
    assert np.std(noise["v"]) == pytest.approx(0.5, rel=0.01)
    assert len(np.unique(np.asarray(noise["v"]) % 2.0**-30)) > 80_000


@pytest.mark.slow
def test_noisy_mean_passes_leaves_without_gradients():
    def loss_fn(params, x):
        return jnp.sum(params["w"] * x) * params["count"].astype(jnp.float32)

    params = {"w": jnp.ones(3), "count": jnp.int32(2), "none": None}
    result = per_example.clipped_grad(loss_fn, 1.0)(params, jnp.ones((4, 3)))
    mean = noisy_mean(result, 1.0, KEY, 4)
    assert (mean["none"], mean["count"].dtype) == (None, jax.dtypes.float0)
    summed = per_example.clip_sum({"w": jnp.ones((4, 3)), "count": jnp.ones(4, int)}, 1.0)
    assert int(noisy_mean(summed, 1.0, KEY, 4)["count"]) == 0
    assert noisy_mean(per_example.clip_sum({}, 1.0), 1.0, KEY, 4) == {}


def over_devices(of_device, out_specs):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("x"), jax.P()), "out_specs": out_specs}
    run = jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))
    return run(jnp.zeros((64, 80)), jnp.zeros((16, 64, 80)), KEY)


grad_fn = per_example.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0)


def test_noisy_mean_after_psum_adds_noise_once():
    def of_device(w, x, key):
        result = grad_fn(w, x)
        summed = result._replace(grads=jax.lax.psum(result.grads, "x"))
        return noisy_mean(summed, 1.0, key, 1)

    assert np.std(over_devices(of_device, jax.P())) == pytest.approx(1.0, rel=0.05)


def test_noisy_mean_of_sharded_sum_requires_separate_keys():
    def of_device(fold, w, x, key):
        result = grad_fn(w, x)
        part = jax.lax.psum_scatter(result.grads, "x", tiled=True)
        key = jax.random.fold_in(key, jax.lax.axis_index("x")) if fold else key
        return noisy_mean(result._replace(grads=part), 1.0, key, 1)

    with pytest.raises(
        ValueError, match=r"key must differ between devices .* along \['x'\].*fold_in"
    ):
        over_devices(functools.partial(of_device, False), jax.P("x"))
    noise = over_devices(functools.partial(of_device, True), jax.P("x"))
    assert np.std(noise) == pytest.approx(1.0, rel=0.05)
    # With one key there would be an eighth as many.
    assert len(np.unique(noise)) > 0.99 * noise.size


@pytest.mark.slow
def test_noisy_mean_works_on_explicit_mesh():
    mesh = jax.make_mesh((4,), ("x",))
    with jax.set_mesh(mesh):
        grads = {"w": jax.device_put(jnp.zeros((8, 400, 30)), jax.P("x", None, None))}
        split = {"w": jax.device_put(jnp.zeros((8, 400, 30)), jax.P(None, "x", None))}
        for each in (grads, split):
            noise = jax.jit(noisy_mean)(jax.jit(per_example.clip_sum)(each, 1.0), 2.0, KEY, 4)
            assert np.std(noise["w"]) == pytest.approx(0.5, rel=0.05)


def test_noisy_mean_without_noise_needs_no_bound():
    assert not np.any(noisy_mean(zeros(math.inf, shape=(2,)), 0, KEY, 4)["v"])
