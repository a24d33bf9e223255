#!/usr/bin/env bash
# Lints what is not Python: YAML, shell, Dockerfiles, workflows, and everybody's
# spelling. Looks at the files that git knows or would add, so nothing that tools made.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
cd "$ROOT"

# Charts are templates, not YAML, until helm has rendered them. What is submitted elsewhere has the form
# that is asked for there.
TEMPLATES='(^|/)(templates|discovery)/'
FAILED=()

files() { # EXTENDED-REGEXP -> paths, one a line, that exist
  local path
  git ls-files --cached --others --exclude-standard | { grep -E "$1" || true; } | while read -r path; do
    [ ! -f "$path" ] || echo "$path"
  done
}

lint() { # NAME-OF-FILES PATHS COMMAND...: the command gets the paths
  local what=$1 paths=()
  mapfile -t paths <<<"$2"
  shift 2
  [ -n "${paths[0]}" ] || return 0
  say "$1: ${#paths[@]} $what"
  "$@" "${paths[@]}" || FAILED+=("$1")
}

lint 'YAML files' "$(files '\.ya?ml$' | { grep -vE "$TEMPLATES" || true; })" \
  yamllint --strict --config-data '{extends: default, rules: {
    comments: {min-spaces-from-content: 1}, comments-indentation: disable, document-start: disable,
    indentation: {indent-sequences: whatever},
    line-length: {max: 120, allow-non-breakable-inline-mappings: true}, truthy: {check-keys: false}}}'
lint 'shell scripts' "$(files '(\.sh|^\.ci/run)$')" shellcheck --external-sources --source-path=SCRIPTDIR
lint 'Dockerfiles' "$(files '(^|/)(Dockerfile|Containerfile)[^/]*$')" hadolint
lint 'workflows' "$(files '^\.github/workflows/.*\.ya?ml$')" \
  check-jsonschema --builtin-schema vendor.github-workflows
# Lock files are hashes, goldens are what other programs wrote. The ignored words are
# spelt so by MPS in its logs and by nvidia-cuda-mps-control, or parts of a pattern.
lint 'files, for spelling' "$(files . | { grep -vE '\.lock$|/(golden|recordings|fixtures)/|\.(svg|png|gif)$' || true; })" \
  codespell --skip '*package-lock.json,*go.sum' --ignore-words-list 'namd,deamon,forground,nknown,notin,readby,recevie,trigging'

[ ${#FAILED[@]} -eq 0 ] || fail "findings of: ${FAILED[*]}"
