"""The policy: Flax Linen modules inside, plain nested dictionaries outside. The only package that imports flax."""
