"""Flax's serialization of a state that was made before Flax was imported."""

import subprocess
import sys

import pytest

CODE = """
import jax.numpy as jnp, optaxclip, sys
tx = optaxclip.clip_by_norm(1.0)
_, state = tx.update({"w": jnp.ones(4)}, tx.init({"w": jnp.ones(4)}))
assert "flax" not in sys.modules
from flax import serialization
stored = serialization.to_bytes(state)
restored = serialization.from_bytes(tx.init({"w": jnp.ones(4)}), stored)
assert list(restored.info.names) == ["w"] and restored.info.norm == 2, restored
print("exec_module" in vars(serialization.__loader__))
"""


@pytest.mark.slow
def test_state_serializes_after_later_flax_import():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False"], done.stderr
