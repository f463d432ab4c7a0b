#!/usr/bin/env bash
# The whole road on one GPU node under SLURM:  sbatch infra/deploy/slurm.sh recipe.yaml [key=value ...]
#
# Requeued, or submitted again, it goes on where it stopped: the bucket knows what is done. Addresses and passwords
# (PREFECT_API_URL, MLFLOW_TRACKING_URI, AWS_...) come from the environment that submits, never from here.
#SBATCH --job-name=eyas
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=eyas-%j.log
set -euo pipefail

: "${1:?usage: sbatch infra/deploy/slurm.sh RECIPE [key=value ...]}"
eyas=${EYAS:-.venv/bin/eyas}

# Checkpoints must be seen by the node that the job is requeued on: a folder on the shared disk.
export EYAS_HOME=${EYAS_HOME:-$PWD/.eyas}
export EYAS_GPU_HOST=${SLURMD_NODENAME:-$(hostname)}

# exec: TERM, which SLURM sends two minutes before the time is up, reaches Eyas itself. It ends its server and leaves with 130.
exec "$eyas" run "$@"
