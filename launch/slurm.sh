# shellcheck shell=bash
# Sourced by the .sbatch scripts: run_step COMMAND... runs it on every node of the job and brings the job through its time limit.
#
# 120 seconds before the limit SLURM sends SIGUSR1 to the batch script (--signal=B:USR1@120). It passes a SIGTERM on to srun,
# srun to torchrun, torchrun to the processes: they finish the step, save a checkpoint and leave. Then the job is requeued under
# the same number and goes on from the checkpoint. A SIGTERM (scancel, preemption) takes the same way without the requeue.
run_step() {
  local attempt=${SLURM_RESTART_COUNT:-0}
  local step=(srun --kill-on-bad-exit=1 --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1
    --output="slurm-${SLURM_JOB_NAME:-grpo}-${SLURM_JOB_ID:-0}-attempt$attempt-node%n.out" "$@")
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${step[@]}"
    echo
    "$@"
    return
  fi
  local asked="" status=0
  "${step[@]}" &
  local srun=$!
  trap 'asked=USR1; kill -TERM "$srun" 2>/dev/null || true' USR1
  trap 'asked=TERM; kill -TERM "$srun" 2>/dev/null || true' TERM
  # a trapped signal ends wait early; the exit status is that of srun when it is gone
  while wait "$srun" && status=0 || status=$?; kill -0 "$srun" 2>/dev/null; do :; done
  if [ "$asked" = USR1 ] && [ "$status" -ne 0 ]; then
    echo "attempt $attempt of job $SLURM_JOB_ID has reached its time limit: requeued"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}

# slurm_arguments FLAGS...: takes --dry-run out, leaves the others in ARGUMENTS
slurm_arguments() {
  ARGUMENTS=()
  local flag
  for flag in "$@"; do
    if [ "$flag" = --dry-run ]; then export DRY_RUN=1; else ARGUMENTS+=("$flag"); fi
  done
  if [ "${#ARGUMENTS[@]}" -lt 1 ]; then
    echo "usage: sbatch $SCRIPT [--dry-run] MODEL [flags of train_grpo.py]" >&2
    exit 2
  fi
  if [ -z "${DRY_RUN:-}" ] && [ "${SLURM_NTASKS:-1}" -gt "$NODES" ]; then
    echo "error: $SLURM_NTASKS tasks on $NODES nodes: ask for --ntasks-per-node=1, torchrun starts one process per GPU itself" >&2
    exit 2
  fi
  if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then export GPUS=$SLURM_GPUS_ON_NODE; fi
  if [ -n "${DRY_RUN:-}" ]; then export GPUS=${GPUS:-1}; fi
}
