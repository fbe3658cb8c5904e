"""Episodes: a scheduler talks to an engine and leaves trajectories. Never imports JAX."""
