#!/bin/bash
# Submits the array, and a job that joins its results when all tasks have ended well.
set -e
array=$(sbatch --parsable slurm-array.sh)
merge=$(sbatch --parsable --dependency="afterok:$array" --wrap "batchgen merge slurm-results -o all.parquet")
echo "array $array, merge $merge"
