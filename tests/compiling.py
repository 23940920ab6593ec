"""How programs are compiled in tests whose results depend on it."""

AS_USERS = {
    "xla_cpu_use_fusion_emitters": True,
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
"""What `conftest.py` turns off to save time; for `jax.jit(..., compiler_options=AS_USERS)`."""
