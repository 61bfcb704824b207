#!/bin/bash
#SBATCH -N 2
#SBATCH --job-name=prod --ntasks-per-node=1 --output=/shared/runs/prod/20260102_030405-abcd/logs/slurm-%j.out --open-mode=append --comment=primus:20260102_030405-abcd

# `jobs run-step` starts a launcher on each node, passes on the warning signal, restarts and requeues. The primus-cli
# of the checkout that all nodes share picks the Python environment for this node, and becomes that process (exec).
trap '' USR1 # ignored until run-step handles it; by default it would end the job
exec primus-cli --no-config direct --single --no-hooks -- jobs run-step \
    --run /shared/runs/prod/20260102_030405-abcd --max-restarts=0 --restart-delay=30 --no-requeue -- \
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 --input=none --unbuffered --cpu-bind=none \
    /opt/primus/primus-cli direct -- train pretrain --run /shared/runs/prod/20260102_030405-abcd
