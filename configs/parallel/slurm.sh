#!/bin/bash
# Several machines under SLURM: one launcher a machine, which starts a process a GPU.
#   sbatch configs/parallel/slurm.sh train_lora.py --config_file configs/parallel/hsdp.toml --dataset_config my.toml
# What follows the script's name is what python would be given. Submitted again it goes on from the last state.
#SBATCH --job-name=tandem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# --signal: three minutes before its time is over the job is told, finishes its step and saves (within 30 seconds, after
# which torchrun kills). --requeue: a job that must make room comes back by itself.
set -euo pipefail

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a machine

# --kill-on-bad-exit: a launcher that fails takes those of the other machines with it
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${machines[0]}:$port" \
    "$@" --resume auto
