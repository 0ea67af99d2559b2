#!/usr/bin/env bash
# Trains the built-in tiny model on two pipeline stages of this machine and shows that it learned. Needs no GPU, no account
# and no network but the package index. Further flags go to train_grpo.py:  bash launch/quickstart.sh --seed 1
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
seed=0
for ((i = 1; i < $#; i++)); do
  if [ "${!i}" = --seed ]; then next=$((i + 1)) && seed=${!next}; fi
done
python tiny_model.py --out "runs/tiny-model-$seed" --seed "$seed" # about a minute, the first time
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # one thread per stage: two stages fill two cores
exec torchrun --standalone --nproc_per_node=2 train_grpo.py --config launch/configs/quickstart.yaml "$@"
