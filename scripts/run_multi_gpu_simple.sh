#!/usr/bin/env bash
# Train on several GPUs of this machine:
#   scripts/run_multi_gpu_simple.sh [N] [--max_restarts R] [flags of train_oxford.py ...]
# N is the number of GPUs (default: all of them). With one GPU or none, this runs plain python.
# --max_restarts R restarts all processes, up to R times, when one of them dies. They resume from the last checkpoint.
# PROGRAM=train_mean_flow.py trains a one-step generator instead.
# PYTHON selects the interpreter (default: the one in .venv if it exists, else python3).
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

restarts=0
flags=()
while (($#)); do
    case $1 in
    --max_restarts)
        restarts=${2:?--max_restarts needs a number}
        shift
        ;;
    --max_restarts=*) restarts=${1#*=} ;;
    *) flags+=("$1") ;;
    esac
    shift
done

if ((processes < 2 && restarts == 0)); then
    exec "$python" "$program" ${flags[@]+"${flags[@]}"}
fi
processes=$((processes > 1 ? processes : 1))
if [[ -z ${OMP_NUM_THREADS:-} ]]; then # torchrun would give each of several processes one thread
    cores=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" -c \
        'from rectified_flow.system.machine import processors; print(processors())')
    export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
fi
exec "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    --max_restarts "$restarts" "$program" ${flags[@]+"${flags[@]}"}
