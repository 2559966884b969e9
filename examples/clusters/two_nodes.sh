#!/bin/bash
# Run on each of two machines at the same time, where HEAD is the name by which both reach the first of them:
#   HEAD=node0 bash examples/clusters/two_nodes.sh --steps 1000 --checkpoint /shared/gpt
# The folder of the checkpoints must be one that both see. When a machine dies, the job starts again from the last one.
set -euo pipefail
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?is the name of the first machine}:${PORT:-29400}" --rdzv-id "${JOB:-sbpc}" \
    "$(dirname "$0")/../02_train_gpt.py" "$@"
