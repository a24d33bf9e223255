#!/usr/bin/env bash
# Builds the sdist and the wheel into dist, and tries the wheel as a user would get it:
# in an environment of its own, away from this tree.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
cd "$ROOT"

rm -rf dist
timed "building sdist, and the wheel from it" .venv/bin/python -m build --no-isolation
PLACE=$(mktemp -d)
trap 'rm -rf "$PLACE"' EXIT
timed "making an environment to try it in" .venv/bin/python -m venv "$PLACE/venv"
timed "installing what it needs (requirements.lock)" "$PLACE/venv/bin/pip" install --quiet \
  --disable-pip-version-check --require-hashes --only-binary :all: --no-deps -r requirements.lock
timed "installing the wheel" "$PLACE/venv/bin/pip" install --quiet \
  --disable-pip-version-check --no-deps --no-index dist/*.whl
cd "$PLACE"
"$PLACE/venv/bin/pip" check
"$PLACE/venv/bin/mps-exporter" --version
"$PLACE/venv/bin/python" -m mps_exporter --help >/dev/null
for name in mps-exporter mps-run mps-scancel mps-terminate; do
  [ -x "$PLACE/venv/bin/$name" ] && [ -s "$PLACE/venv/share/man/man1/$name.1" ] ||
    fail "the wheel lacks $name, or its man page"
done
say "the wheel works: $(ls "$ROOT/dist")"
