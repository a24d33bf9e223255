#!/bin/sh
# Cancels Slurm jobs in the right order: on each of their nodes the MPS clients of the job are
# terminated through their control daemon, and only then is the job cancelled. For jobs that do not
# run under mps-run; see docs/slurm.md, "Ending jobs".
#
#   mps-scancel JOB...
#
# The user must be allowed to start a step in the job (its owner is), and the nodes need mps-exporter
# and mps-terminate on PATH, or MPS_TERMINATE_CLIENTS is its path there.
#
# A job is not cancelled, except with MPS_SCANCEL_ANYWAY=1, if a client could not be terminated or the
# end of a process is not known to be harmless: a process that waits in the queue of a daemon and is
# killed there hangs the daemon.
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
    echo "mps-scancel: '$job' is no job number; that of an array's task: squeue -o %A" >&2
    exit 2
    ;;
  esac
done

# Runs on each node. This shell is in the job, too: where no process is, Slurm uses no control groups.
# shellcheck disable=SC2016
on_node='
"$1" --slurm-job "$2" || exit
ends=
for file in $(grep -lE "slurm.*/job_$2(/|\$)" /proc/[0-9]*/cgroup 2>/dev/null); do
  pid=${file%/cgroup}
  [ ! -d "$pid" ] || ends="$ends --before-kill=${pid##*/}"
done
[ -n "$ends" ] || { echo "mps-scancel: no process is in a control group of job $2" >&2; exit 1; }
told=$(mps-exporter doctor $ends) || { echo "$told" >&2; exit 1; }'

result=0
for job; do
  # --overlap: the job's own steps keep their processors and GPUs.
  if timeout -k 5 60 srun --jobid="$job" --overlap --ntasks-per-node=1 --immediate=30 --quiet \
    sh -c "$on_node" mps-scancel "$terminate" "$job" </dev/null || [ -n "${MPS_SCANCEL_ANYWAY:-}" ]; then
    scancel "$job" || result=1
  else
    echo "mps-scancel: job $job is not cancelled: see above" >&2
    result=1
  fi
done
exit "$result"
