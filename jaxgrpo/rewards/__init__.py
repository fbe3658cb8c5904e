"""Scoring: completions and data columns to numbers. Never imports JAX.

Importing the package registers the built-in rewards.
"""

from jaxgrpo.rewards import math, text

__all__ = ["math", "text"]
