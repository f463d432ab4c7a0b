#!/usr/bin/env bash
# A training on several nodes under SLURM, on a committed dataset:  sbatch infra/deploy/slurm-training.sh course.json
#
# What stands in course.json: .venv/bin/python -m drafter.launch --help. Nodes share nothing but the folder of the checkpoints and
# the bucket. Two minutes before the time is up every rank saves and leaves; the requeued job goes on, also on more nodes or fewer.
#SBATCH --job-name=eyas-training
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=eyas-training-%j.log
set -euo pipefail

course=${1:?usage: sbatch infra/deploy/slurm-training.sh COURSE}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

exec srun .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
  --rdzv-endpoint "$head:29500" -m drafter.launch "$course"
