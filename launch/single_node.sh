#!/usr/bin/env bash
# One node with several GPUs, one pipeline stage on each.
#   bash launch/single_node.sh MODEL [flags of train_grpo.py]
#   GPUS=4 bash launch/single_node.sh Qwen/Qwen2.5-1.5B-Instruct --data task:scheduling?n=2000
# GPUS: stages, by default one for each GPU. CONFIG: another YAML file of settings.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: [GPUS=N] bash launch/single_node.sh MODEL [flags of train_grpo.py]" >&2
  exit 2
fi
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
. launch/torchrun.sh
launch --standalone -- "$@"
