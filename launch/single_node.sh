#!/usr/bin/env bash
# One node with several GPUs, one pipeline stage on each.
#   bash launch/single_node.sh MODEL [flags of train_grpo.py]
#   GPUS=4 bash launch/single_node.sh Qwen/Qwen2.5-1.5B-Instruct --data task:scheduling?n=2000
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: [GPUS=N] bash launch/single_node.sh MODEL [flags of train_grpo.py]" >&2
  exit 2
fi
model=$1
shift
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count())')}
if [ "$gpus" -lt 1 ]; then
  echo "no GPU found: set GPUS=N to run N stages on the CPU all the same" >&2
  exit 2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --standalone --nproc_per_node="$gpus" train_grpo.py --config launch/configs/scheduling.yaml --model "$model" "$@"
