"""Eight virtual devices give what one gives, whatever the axes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_meshes_equal_a_single_device() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parent.parent),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "mesh_worker.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for name, found in result.items():
        assert found["logprobs"] < 2e-5, (name, found)
        assert found["grad_norm"] < 1e-4, (name, found)
        # AdamW divides by the gradient's size, so rounding shows in parameters whose gradient is almost 0.
        assert found["params"] < 1e-3, (name, found)
        assert found["moment_like_param"], name
    assert {name: found["query_shards"] for name, found in result.items()} == {
        "data": 1,
        "fsdp": 8,
        "fsdp and tensor": 8,
    }
