#!/bin/bash
#SBATCH --array=0-3
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=batchgen-%A-%a.log
#SBATCH --open-mode=append
# source .venv/bin/activate        if batchgen is not on the PATH
# End 10 minutes before Slurm's limit, with everything finished committed.
status=0
batchgen run rows.jsonl --model ./Qwen3-0.6B -o slurm-results --shard auto --max-time 3:50:00 || status=$?
# Exit code 75: not finished. Put this task back into the queue, where it continues.
if [ "$status" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
