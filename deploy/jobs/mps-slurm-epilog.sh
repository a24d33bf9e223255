#!/bin/sh
# Epilog of slurm.conf: terminates, through their control daemon, the MPS clients that are left of a
# job, before anything else of the epilog kills them.
#
# IT IS NO SUBSTITUTE FOR mps-run. Slurm runs the epilog after the job's processes have got SIGTERM
# and, KillWait later, SIGKILL: only processes that survived that are still there, such as those which
# ProctrackType=proctrack/linuxproc or pgid lost sight of. See docs/slurm.md, "Ending jobs".
#
# Exit status: always 0. Slurm drains the node when an epilog fails.
set -u

PATH=${PATH:-}:/usr/local/sbin:/usr/local/bin:/usr/bin:/bin # Slurm sets none
terminate=$(command -v "${MPS_TERMINATE_CLIENTS:-mps-terminate}") || exit 0
[ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_JOB_UID:-}" ] || exit 0
"$terminate" --slurm-job "$SLURM_JOB_ID" --uid "$SLURM_JOB_UID" --deadline 20 || :
