#!/usr/bin/env bash
# Builds the release twice, in two places and under different circumstances, and compares every byte:
#
#   tools/release-check.sh FOLDER     keeps the first build there
#
# The network is used for the locked dependencies and for tools that are missing, and for nothing else.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
OUT=${1:-$ROOT/build/release}
PLACE=$(mktemp -d)
trap 'rm -rf "$PLACE"' EXIT

copy() { # FOLDER: what git knows or would take, as it is now
  mkdir -p "$1"
  (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard |
    tar --create --null --files-from=- --ignore-failed-read 2>/dev/null) | tar --extract --directory "$1"
}

"$ROOT/tools/install-python.sh" dev
rm -rf "$OUT"
copy "$PLACE/one"
say 'the first build'
"$ROOT/tools/release.sh" "$OUT" "$PLACE/one"

say 'the second build: another folder, user mask, time zone, language, and times of files'
copy "$PLACE/another place/two"
find "$PLACE/another place/two" -exec touch --date=2001-02-03 {} +
(umask 077 && TZ=Pacific/Kiritimati LANG=C.UTF-8 HOME="$PLACE" \
  "$ROOT/tools/release.sh" "$PLACE/out" "$PLACE/another place/two")

diff -r "$OUT" "$PLACE/out" || fail 'the two builds differ'
(cd "$OUT" && sha256sum --check --quiet SHA256SUMS)
cat "$OUT/SHA256SUMS"
say "both builds are identical: $(wc -l <"$OUT/SHA256SUMS") files"
