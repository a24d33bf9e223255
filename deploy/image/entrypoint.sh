#!/bin/sh
# Starts the exporter in its container, with those of CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_SYSLOG
# that the container was given.
#
# Container engines give added capabilities to root only; for any other user they merely allow them.
# The copy of setpriv in libexec carries them as file capabilities, so that it can pick up what is
# allowed and hand it on. Nothing else is ever handed on, and the exporter never runs as root for it.
set -eu

home=/opt/mps-exporter

status() { # FIELD -> its value in /proc/self/status
  sed -n "s/^$1:[[:space:]]*//p" /proc/self/status
}

allowed() { # NUMBER-OF-CAPABILITY
  [ $((0x$(status CapBnd) >> $1 & 1)) -eq 1 ]
}

if [ "$(id -u)" -ne 0 ]; then
  wanted=''
  ! allowed 2 || wanted="$wanted,+dac_read_search"
  ! allowed 19 || wanted="$wanted,+sys_ptrace"
  ! allowed 34 || wanted="$wanted,+syslog"
  wanted=${wanted#,}
  if [ -n "$wanted" ] && [ "$(status NoNewPrivs)" = 1 ]; then
    echo "mps-exporter: the container allows $wanted, but no-new-privileges keeps them from a user" \
      "that is not root: allow privilege escalation, or do not add them; see docs/deployment.md" >&2
  elif [ -n "$wanted" ]; then
    exec "$home/libexec/setpriv" "--inh-caps=$wanted" "--ambient-caps=$wanted" -- \
      "$home/bin/mps-exporter" "$@"
  fi
fi
exec "$home/bin/mps-exporter" "$@"
