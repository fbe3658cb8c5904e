#!/usr/bin/env bash
# From nothing to a trained model: environment, SmolLM2-135M-Instruct, a data set of sums, training, summary.
#   bash scripts/quickstart.sh [key.path=value …]      run again with --resume to go on after an interruption
set -euo pipefail
source "$(dirname "$0")/environment.sh" smollm2
"$python" scripts/prepare_smollm2.py
"$python" scripts/make_sums.py --out data/sums --min 1 --max 15 --train 175 --eval 50
exec "$python" -m jaxgrpo.train --config configs/quickstart.yaml "$@"
