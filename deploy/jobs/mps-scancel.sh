#!/bin/sh
# Cancels Slurm jobs in the right order: on each of their nodes the MPS clients of the job are
# terminated through their control daemon, and only then is the job cancelled. For jobs that do not
# run under mps-run; see docs/slurm.md, "Ending jobs".
#
#   mps-scancel JOB...
#
# The user must be allowed to start a step in the job (its owner is), and mps-terminate must
# be on PATH on the nodes, or MPS_TERMINATE_CLIENTS its path there. A job whose clients could not be terminated is not cancelled; with
# MPS_SCANCEL_ANYWAY=1 it is.
#
# Exit status: 0 when every job was cancelled, 1 when not, 2 usage.
set -u

terminate=${MPS_TERMINATE_CLIENTS:-mps-terminate}
if [ $# -eq 0 ]; then
  echo 'Usage: mps-scancel JOB...' >&2
  exit 2
fi
for job; do
  case $job in '' | *[!0-9]*)
    echo "mps-scancel: '$job' is no job number" >&2
    exit 2
    ;;
  esac
done

result=0
for job; do
  # --overlap: the job's own steps keep their processors and GPUs.
  if timeout -k 5 60 srun --jobid="$job" --overlap --ntasks-per-node=1 --immediate=30 --quiet \
    "$terminate" --slurm-job "$job" </dev/null || [ -n "${MPS_SCANCEL_ANYWAY:-}" ]; then
    scancel "$job" || result=1
  else
    echo "mps-scancel: job $job is not cancelled: its MPS clients could not be terminated" >&2
    result=1
  fi
done
exit "$result"
