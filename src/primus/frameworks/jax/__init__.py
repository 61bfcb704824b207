"""JAX: a small engine of this package on jax and optax, sharded over the devices of one process or several."""

ENGINES = ("jax",)
