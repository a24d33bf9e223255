#!/usr/bin/env bash
# Makes .venv and installs into it, from the lock files only:
#
#   tools/install-python.sh runtime   the exporter and what it needs to run
#   tools/install-python.sh dev       that, and everything that lint and tests need
#
# A second run with nothing changed returns at once. PYTHON=python3.12 picks the
# interpreter for a new .venv; without it, the first one found that is new enough.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"

WANT=${1:-dev}
VENV="$ROOT/.venv"
cd "$ROOT"

# What an installation depends on. Where the tree stands counts as well, since an
# editable installation points to it; of pyproject.toml, only what ends up installed.
fingerprint() { # LOCK
  {
    printf '%s\n' "$ROOT"
    "$VENV/bin/python" -VV
    "$VENV/bin/python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
print(config["build-system"], config["project"], config["tool"]["hatch"])'
    cat exporter/mps_exporter/__init__.py "$1" "${BASH_SOURCE[0]}"
  } | sha256sum | cut -d' ' -f1
}

new_enough() {
  have "$1" && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found (looked for: ${PYTHON:-python3 python3.13 python3.12 python3.11})" \
    "Install one, or name it: make install PYTHON=/path/to/python3.12"
}

make_venv() {
  local python
  python=$(find_python)
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian and Ubuntu keep these in a package of their own.
    local package
    package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    { is_root_with_apt && apt_root_install "$package"; } ||
      fail "$python cannot make virtual environments" "On Debian or Ubuntu: apt-get install $package"
  fi
  timed "making .venv with $("$python" -V)" "$python" -m venv --clear "$VENV"
}

# Wheels only: nothing is compiled here, and no package's setup code runs. Most of the modules are
# never imported, so Python compiles those that are.
install_locked() { # LOCK
  "$VENV/bin/pip" install --disable-pip-version-check --no-input --quiet --no-compile \
    --require-hashes --only-binary :all: --no-deps -r "$1"
}

install_exporter() { # PIP-OPTION...
  "$VENV/bin/pip" install --disable-pip-version-check --no-input --quiet \
    --no-deps "$@" -e .
}

is_installed() { # KIND LOCK
  [ -x "$VENV/bin/python" ] && [ -f "$VENV/.installed-$1" ] &&
    [ "$(cat "$VENV/.installed-$1")" = "$(fingerprint "$2" 2>/dev/null)" ]
}

case $WANT in
  dev | runtime) ;;
  *) fail "usage: $0 dev|runtime" ;;
esac

is_installed dev requirements-dev.lock && exit
[ "$WANT" = dev ] || ! is_installed runtime requirements.lock || exit 0
only_one python
# The run that this one may have waited for may have done the work.
is_installed dev requirements-dev.lock && exit
[ "$WANT" = dev ] || ! is_installed runtime requirements.lock || exit 0

"$VENV/bin/python" -c '' 2>/dev/null || make_venv
if [ "$WANT" = dev ]; then
  timed "installing the development tools (requirements-dev.lock)" install_locked requirements-dev.lock
  timed "installing mps-exporter, editable" install_exporter --no-build-isolation
  fingerprint requirements-dev.lock >"$VENV/.installed-dev"
else
  timed "installing what the exporter needs (requirements.lock)" install_locked requirements.lock
  timed "installing mps-exporter, editable" install_exporter
  fingerprint requirements.lock >"$VENV/.installed-runtime"
fi
