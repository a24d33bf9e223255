#!/usr/bin/env bash
# Builds the image for amd64 and arm64 with docker buildx, all times that of the last commit:
#
#   tools/build-image.sh --tag NAME [OPTION...]     options of docker buildx build, such as --push
#
# SOURCE_DATE_EPOCH and rewrite-timestamp make two builds on the same base image alike. The image has
# its bill of materials inside; provenance and BuildKit's bill of the base go to the registry with it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
cd "$ROOT"
have docker || fail 'docker is missing' 'docker buildx builds the image'
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
push=false
for word; do [ "$word" != --push ] || push=true; done
exec docker buildx build . --platform linux/amd64,linux/arm64 --provenance mode=max --sbom true \
  --output "type=image,push=$push,rewrite-timestamp=true" \
  --build-arg "VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' exporter/mps_exporter/__init__.py)" \
  --build-arg "REVISION=$(git rev-parse HEAD)" \
  --build-arg "CREATED=$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" \
  "${@/#--push/--progress=plain}"
