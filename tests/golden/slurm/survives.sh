#!/bin/bash
#SBATCH -p gpu-prod
#SBATCH -t 72:00:00
#SBATCH --job-name=prod
#SBATCH -o logs/train_%j.log
#SBATCH -c 96
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --exclude=n[1-3],x7
#SBATCH --nodes=66 --no-kill --ntasks-per-node=1 --open-mode=append --comment=primus:20260102_030405-abcd --signal=B:USR1@600

# `jobs run-step` starts a launcher on each node, passes on the warning signal, restarts and requeues. The primus-cli
# of the checkout that all nodes share picks the Python environment for this node, and becomes that process (exec).
trap '' USR1 # ignored until run-step handles it; by default it would end the job
exec primus-cli --no-config direct --single --no-hooks -- jobs run-step \
    --run /shared/runs/prod/20260102_030405-abcd --max-restarts=5 --restart-delay=10 --num-nodes=64 --requeue -- \
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 --input=none --unbuffered \
    /opt/primus/primus-cli direct -- train pretrain --run /shared/runs/prod/20260102_030405-abcd
