#!/usr/bin/env bash
# Installs mps-exporter from this checkout into a virtual environment, with the locked dependencies.
#
#   deploy/systemd/install-package.sh /opt/mps-exporter
#
# What comes from the network is checked against the hashes of the lock files, those of the build
# included; wheels only, so that no package's setup code runs.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
pip="$1/bin/pip"

locked=(--disable-pip-version-check --require-hashes --only-binary :all: --no-deps)
"$pip" install "${locked[@]}" -r requirements.lock
build=$(mktemp)
trap 'rm -f "$build"' EXIT
awk '/^[a-z]/ { keep = /^(hatchling|packaging|pathspec|pluggy|tomlkit|trove-classifiers)==/ } keep' \
  requirements-dev.lock >"$build"
"$pip" install "${locked[@]}" -r "$build"
"$pip" install --disable-pip-version-check --no-index --no-deps --no-build-isolation \
  --force-reinstall .
