#!/bin/sh
# Runs the exporter, or as mps-terminate that program, with this host's Python: /usr/bin/python3
# where it is new enough, else another of /usr/bin. The package has compiled modules for 3.11 to
# 3.14; on newer ones the slower Python versions of the same modules are used. Nothing else that is
# installed for that Python is imported (-I -S), and nothing is written (-B).
lib=$(dirname -- "$(readlink -f -- "$0")")/../lib/mps-exporter/python
[ "${0##*/}" != mps-terminate ] || lib=$lib/mps_terminate.py
for python in "$(readlink -f /usr/bin/python3)" /usr/bin/python3.1[1-9]; do
  case ${python##*/} in
    python3.1[1-9]) [ ! -x "$python" ] || exec "$python" -I -S -B "$lib" "$@" ;;
  esac
done
echo 'mps-exporter: there is no Python 3.11 or newer in /usr/bin; install the package python3.11' >&2
exit 1
