#!/usr/bin/env bash
# Builds Grafana's dashboard-linter, pinned, into the file that is named:
#
#   grafana/linter/build.sh .tools/bin/dashboard-linter [go]
#
# Two of its dependencies need help. It reads dashboards of Grafana's second schema with
# types from a part of Grafana itself, which the Go proxy does not have at that version;
# ours are of the first schema, so dashboard/ has types that are enough to compile. And
# it needs a fork of memberlist, which its own go.mod says, but only to itself.
set -euo pipefail

VERSION=v0.2.0
MEMBERLIST=github.com/grafana/memberlist@v0.3.1-0.20251126142931-6f9f62ab6f86

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TARGET=$(realpath -m "$1")
GO=${2:-go}
PLACE=$(mktemp -d)
trap 'rm -rf "$PLACE"' EXIT

cp -r "$HERE/dashboard" "$PLACE/dashboard"
cd "$PLACE"
export CGO_ENABLED=0 GOFLAGS=-mod=mod GOWORK=off
(cd dashboard && "$GO" mod init github.com/grafana/grafana/apps/dashboard)
"$GO" mod init linter
"$GO" mod edit -replace github.com/grafana/grafana/apps/dashboard=./dashboard
"$GO" mod edit -replace "github.com/hashicorp/memberlist=$MEMBERLIST"
"$GO" get "github.com/grafana/dashboard-linter@$VERSION"
mkdir -p "$(dirname "$TARGET")"
"$GO" build -p 2 -trimpath -ldflags='-s -w' -o "$TARGET" github.com/grafana/dashboard-linter
