#!/usr/bin/env bash
# Several nodes, without SLURM: the same command on every node, in any order.
#   NODES=2 HEAD=node1 bash launch/multi_node.sh MODEL [flags of train_grpo.py]
# NODES: how many nodes take part. HEAD: the name or address of one of them, the same on all. PORT: a free port there
# (29400). RUN: a name that keeps two runs on the same nodes apart (grpo). GPUS, CONFIG: as in single_node.sh.
# Which node holds the first stage is decided when they meet. --project_dir must lie on a file system that all nodes share.
set -euo pipefail
if [ $# -lt 1 ] || [ -z "${NODES:-}" ] || [ -z "${HEAD:-}" ]; then
  echo "usage: NODES=2 HEAD=node1 [PORT=29400] [GPUS=N] bash launch/multi_node.sh MODEL [flags of train_grpo.py]" >&2
  exit 2
fi
if [ "${SLURM_STEP_NUM_TASKS:-$NODES}" -ne "$NODES" ]; then
  echo "error: $SLURM_STEP_NUM_TASKS tasks run on $NODES nodes: ask for one task per node, torchrun starts the others itself" >&2
  exit 2
fi
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
. launch/torchrun.sh
launch --nnodes="$NODES" --rdzv_backend=c10d --rdzv_endpoint="$HEAD:${PORT:-29400}" --rdzv_id="${RUN:-grpo}" -- "$@"
