"""Records are found by the end of their key too."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from optaxclip import monitor

TX = optax.chain(
    optaxclip.clip_by_global_norm(1.0),
    optaxclip.skip_above(
        optax.chain(optaxclip.clip_by_norm(1.0), optaxclip.clip_by_norm(2.0), optax.sgd(0.1)),
        5.0,
        loss_threshold=9.0,
    ),
)
GRADS = jnp.array([3.0, 4.0])
STATE = TX.update(GRADS, TX.init(GRADS), GRADS, value=7.0)[1]


@pytest.mark.parametrize("read", [monitor.read, jax.jit(monitor.read)], ids=["eager", "jit"])
def test_read_accepts_end_of_key(read):
    records = read(STATE)
    assert records["clip_by_global_norm"].norm == records["0/clip_by_global_norm"].norm == 5
    assert records["loss"].norm == records["skip_above/loss"].norm == 7
    assert records["1/clip_by_norm"] is records["1/inner_state/1/clip_by_norm"]
    assert isinstance(records, dict)
    assert list(jax.tree.map(lambda x: x, records)) == list(monitor.read(STATE))


@pytest.mark.parametrize(
    ("key", "matches"), [("clip_by_norm", 2), ("zclip", "none"), ("orm", "none")]
)
def test_read_rejects_ambiguous_or_unknown_keys(key, matches):
    said = rf"0/clip_by_global_norm.*1/skip_above/loss.* but '{key}' matches {matches}"
    with pytest.raises(KeyError, match=said):
        monitor.read(STATE)[key]
