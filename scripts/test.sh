#!/usr/bin/env bash
# All tests: environment, lint, the unit suite, then the slow tests on real models and processes.
#   bash scripts/test.sh [unit|slow|pytest arguments …]
set -euo pipefail
source "$(dirname "$0")/environment.sh" test
"$python" scripts/prepare_smollm2.py
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
case "${1:-all}" in
    unit) exec "$python" -m pytest -n 2 -m "not slow" ;;
    slow) exec "$python" -m pytest -n 2 -m slow ;;
    all)
        "$python" -m ruff check .
        # One pytest call, so that its closing line counts every test; unit tests come first (see tests/conftest.py).
        exec "$python" -m pytest -n 2 ;;
    *) exec "$python" -m pytest "$@" ;;
esac
