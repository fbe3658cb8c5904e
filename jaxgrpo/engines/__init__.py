"""Samplers: things that implement the Engine protocol."""
