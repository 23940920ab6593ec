"""How programs are compiled in tests whose results depend on it."""

AS_USERS = {"xla_cpu_use_fusion_emitters": True}
"""What `conftest.py` turns off to save time; for `jax.jit(..., compiler_options=AS_USERS)`."""
