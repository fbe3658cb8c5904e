"""The run, readable top to bottom."""
