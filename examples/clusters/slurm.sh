#!/bin/bash
# One torchrun on each node of a Slurm job:
#   sbatch examples/clusters/slurm.sh --steps 1000 --checkpoint /shared/gpt
#SBATCH --job-name=sbpc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
set -euo pipefail
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${nodes%%$'\n'*} NODES=$SLURM_JOB_NUM_NODES JOB=$SLURM_JOB_ID GPUS=${SLURM_GPUS_PER_NODE:-8}
# sbatch runs a copy of this file: the folder that it was called in is the one of the repository.
srun bash "$SLURM_SUBMIT_DIR/examples/clusters/two_nodes.sh" "$@"
