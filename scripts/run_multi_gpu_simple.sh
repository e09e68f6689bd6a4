#!/usr/bin/env bash
# Train on several GPUs of this machine:
#   scripts/run_multi_gpu_simple.sh [N] [flags of train_oxford.py ...]
# N is the number of GPUs (default: all of them). With one GPU or none this runs plain python.
# PROGRAM=train_mean_flow.py trains a mean flow instead.
# PYTHON names another interpreter than the one in .venv, or else python3.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=$root/${PROGRAM:-train_oxford.py}
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3

if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    processes=$1
    shift
else
    processes=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi

if ((processes < 2)); then
    exec "$python" "$program" "$@"
fi
exec "$python" -m accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes "$processes" \
    "$program" "$@"
