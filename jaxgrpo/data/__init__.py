"""Prompts and the chat template: the only bridge between text and tokens. Never imports JAX."""
