"""From trajectories to updated parameters."""
