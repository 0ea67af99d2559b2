# shellcheck shell=bash
# Sourced by the other scripts, from the root of the repository.
# launch [torchrun's flags] -- MODEL [flags of train_grpo.py]   becomes torchrun; with DRY_RUN=1 it prints the command.
launch() {
  local torchrun=()
  while [ "$1" != -- ]; do torchrun+=("$1") && shift; done
  local model=$2
  shift 2
  local gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count())')}
  if [ "$gpus" -lt 1 ]; then
    echo "no GPU found: set GPUS=N to run N stages on the CPU all the same" >&2
    exit 2
  fi
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  # torchrun passes these signals on to its processes and dies of any other; it kills them when the time is over.
  export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
  export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-100}"
  local command=(torchrun "${torchrun[@]}" --nproc_per_node="$gpus" train_grpo.py
    --config "${CONFIG:-launch/configs/scheduling.yaml}" --model "$model" "$@")
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
  fi
  exec "${command[@]}"
}
