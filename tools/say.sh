# Sourced by the scripts beside it: how they speak, and what more than one of them needs.
# shellcheck shell=bash

# say LINE: progress, on stderr, so that stdout stays free for results.
say() {
  if [ -t 2 ]; then
    printf '\033[1m==>\033[0m %s\n' "$*" >&2
  else
    printf '==> %s\n' "$*" >&2
  fi
}

# fail LINE...: the last words, one line each.
fail() {
  printf 'error: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
  exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

# timed LABEL COMMAND...: runs it, says so before, and says after how long it took.
# What the command prints is kept, and shown only where it fails.
timed() {
  local label=$1 started=$SECONDS log
  shift
  log=$(mktemp)
  say "$label ..."
  if "$@" >"$log" 2>&1; then
    say "$label: done in $((SECONDS - started)) s"
    rm -f "$log"
  else
    cat "$log" >&2
    rm -f "$log"
    printf 'error: %s: failed after %s s\n' "$label" "$((SECONDS - started))" >&2
    return 1
  fi
}

# only_one WHAT: two runs of `make` in one tree must not install over each other.
# The lock goes when the script ends; scripts that it starts work under it.
only_one() {
  [ "${UNDER_TOOLS_LOCK:-}" != "$1" ] || return 0
  export UNDER_TOOLS_LOCK=$1
  mkdir -p "$TOOLS"
  have flock || return 0
  exec 9>"$TOOLS/lock-$1"
  flock --nonblock 9 && return 0
  say "waiting for another installation in this tree to end ..."
  flock 9
}

# apt_root_install PACKAGE...: with apt on the machine itself; only as root.
# Services of such packages are not started: policy-rc.d says no while this runs.
apt_root_install() {
  local policy=/usr/sbin/policy-rc.d ours=''
  if ! [ -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && ours=yes
  fi
  timed "refreshing apt's package lists" apt-get update -qq || true
  local result=0
  timed "installing $* (apt)" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "$@" || result=$?
  [ -z "$ours" ] || rm -f "$policy"
  return "$result"
}

is_root_with_apt() { [ "$(id -u)" -eq 0 ] && have apt-get; }

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TOOLS="$ROOT/.tools"
# Where `make` puts programs that tests run; it comes first on PATH.
# shellcheck disable=SC2034  # read by the scripts that source this one
BIN="$TOOLS/bin"
