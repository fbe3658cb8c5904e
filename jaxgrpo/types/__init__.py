"""Records that travel between rooms: no logic. `rollout` is NumPy only; `batch` is a JAX pytree."""
