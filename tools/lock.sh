#!/usr/bin/env bash
# Writes the lock files from pyproject.toml and requirements-dev.txt: every version
# pinned, every file hashed, for every supported Python at once.
#
#   tools/lock.sh             keeps the versions that are locked, where they still fit
#   tools/lock.sh --upgrade   takes the newest
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"

UV_VERSION=0.13.8
UV="$TOOLS/uv/bin/uv"
cd "$ROOT"
only_one python

if [ "$("$UV" --version 2>/dev/null | cut -d' ' -f2)" != "$UV_VERSION" ]; then
  timed "making a place for uv" "${PYTHON:-python3}" -m venv --clear "$TOOLS/uv"
  timed "installing uv $UV_VERSION" \
    "$TOOLS/uv/bin/pip" install --disable-pip-version-check -q "uv==$UV_VERSION"
fi

# Nothing of this machine's pip or uv settings may end up in the files.
compile() { # OUTPUT OPTION...
  local output=$1
  shift
  timed "locking $output" env -u PIP_FIND_LINKS -u UV_FIND_LINKS "$UV" pip compile \
    --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
    --output-file "$output" "$@"
}

compile requirements-dev.lock "$@" pyproject.toml requirements-dev.txt
compile requirements.lock "$@" pyproject.toml --constraints requirements-dev.lock
