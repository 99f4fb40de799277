#!/bin/bash
# A run longer than its time limit: two minutes before the end it saves, and the job queues itself again.
#   sbatch recipes/slurm.sh train/eagle.py recipes/eagle3-qwen3-8b.yaml data.train=answers.jsonl
# LAUNCHER=recipes/accelerate-zero2.yaml in the environment chooses another launcher.
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
export LAUNCHER=${LAUNCHER:-recipes/accelerate-multi-node.yaml}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export GPUS=${SLURM_GPUS_ON_NODE:-8}

# USR1 reaches every process of the step. It would kill the launcher, which therefore ignores it; the ranks save together and end with 138.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c 'trap "" USR1; exec accelerate launch --config_file "$LAUNCHER" \
  --num_machines "$SLURM_NNODES" --num_processes $((GPUS * SLURM_NNODES)) --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "$@"' launch "$@"
status=$?
# A run whose time was up is queued again and continues from its checkpoint; one that ended by itself, in success or in error, is not.
end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
if [ "$status" -ne 0 ] && ends=$(date -d "${end:-never}" +%s) && [ $((ends - $(date +%s))) -lt 180 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
