#!/bin/sh
# Runs a program that uses CUDA, and ends it in the right order when it is asked to stop: first its
# CUDA work, through the MPS control daemon, then its process. A program that is killed while its
# kernels run can end every other client of its MPS server; see docs/slurm.md, "Ending jobs".
#
#   srun mps-run python train.py
#
# The program starts with SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 ignored, so that a signal to
# the whole job does not end it before this script has acted. A program that sets handlers of its own
# gets its signals as ever. Give every process that uses CUDA its own mps-run: a launcher in
# between that handles signals (torchrun) hands its workers the default ones again.
#
# SIGTERM, SIGINT and SIGHUP stop it. Settings, as environment variables:
#   MPS_RUN_WAIT           seconds that the program has, after SIGTERM, to end by itself before its
#                          CUDA work is terminated: for one that saves its state then (default 0)
#   MPS_RUN_GRACE          seconds that it has after that until SIGKILL; its next CUDA call fails
#                          with error 810 (default 5)
#   MPS_TERMINATE_CLIENTS  path of mps-terminate (default: found on PATH)
# All of it, with 15 s at most for the daemon, must fit into KillWait (30 s) or the pod's grace period.
#
# Exit status: the program's; 128 and the signal's number when it was stopped; 2 for wrong usage.
set -u

wrong_usage() {
  echo "mps-run: $1" >&2
  exit 2
}

[ $# -gt 0 ] || wrong_usage 'usage: mps-run PROGRAM [ARGUMENT...]'
seconds_to_wait=${MPS_RUN_WAIT:-0} grace=${MPS_RUN_GRACE:-5}
for seconds in "$seconds_to_wait" "$grace"; do
  case $seconds in *[!0-9]* | ?????*) wrong_usage "'$seconds' is no number of seconds" ;; esac
done
terminate=$(command -v "${MPS_TERMINATE_CLIENTS:-mps-terminate}") ||
  wrong_usage 'mps-terminate was not found'

has_ended() {
  { read -r stat <"/proc/$child/stat"; } 2>/dev/null || return 0
  case ${stat##*) } in Z* | X*) return 0 ;; esac
  return 1
}

wait_at_most() { # SECONDS
  tenths=$(($1 * 10))
  until has_ended || [ "$tenths" -le 0 ]; do
    sleep 0.1
    tenths=$((tenths - 1))
  done
}

stop() { # SIGNAL-NUMBER
  trap '' TERM INT HUP
  if [ "$seconds_to_wait" -gt 0 ]; then
    kill -TERM "$child" 2>/dev/null
    wait_at_most "$seconds_to_wait"
  fi
  "$terminate" --descendant-of "$child" --deadline 15
  wait_at_most "$grace"
  kill -KILL "$child" 2>/dev/null
  wait "$child" 2>/dev/null
  exit $((128 + $1))
}

early=''
trap 'early=15' TERM
trap 'early=2' INT
trap 'early=1' HUP
trap '' USR1 USR2
exec 3<&0 # what runs in the background has no standard input of its own
(
  trap '' TERM INT HUP USR1 USR2
  exec "$@" 3<&-
) <&3 &
child=$!
exec 3<&-
trap 'stop 15' TERM
trap 'stop 2' INT
trap 'stop 1' HUP
[ -z "$early" ] || stop "$early"
wait "$child"
