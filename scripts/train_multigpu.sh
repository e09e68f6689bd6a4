#!/usr/bin/env bash
# Fine-tune a Wan video model on several GPUs of this machine:
#   scripts/train_multigpu.sh [N] [--max_restarts R] [flags of examples/wan/train_wan.py ...]
# N is the number of GPUs (default: all of them). Everything else is as in run_multi_gpu_simple.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PROGRAM=examples/wan/train_wan.py exec "$here/run_multi_gpu_simple.sh" "$@"
