#!/usr/bin/env bash
# Builds everything that a release consists of, but for the image, into a folder:
#
#   tools/release.sh FOLDER         from this tree
#   tools/release.sh FOLDER TREE    from a copy of it, with this tree's tools
#
# The same tree gives the same files, whatever the time, the user, the time zone and the umask: all times
# are that of the last commit (SOURCE_DATE_EPOCH). Nothing is published.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
[ $# -ge 1 ] || fail "usage: $0 FOLDER [TREE]"

OUT=$(mkdir -p "$1" && cd "$1" && pwd)
TREE=$(cd "${2:-$ROOT}" && pwd)
PYTHON="$ROOT/.venv/bin/python"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$ROOT" log -1 --format=%ct)}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022
VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$TREE/exporter/mps_exporter/__init__.py")
PYTHONS='3.11 3.12 3.13 3.14' # those that the packages have compiled modules for
STAGE=$(mktemp -d)
LOG="$STAGE/.log"
end() {
  local status=$?
  [ "$status" = 0 ] || cat "$LOG" >&2
  rm -rf "$STAGE"
  exit "$status"
}
trap end EXIT

# Not `timed`, which runs its command in a condition: there `set -e` has no effect, and a package that
# lacks files would be built.
step() { # LABEL COMMAND...
  local label=$1
  shift
  say "$label ..."
  "$@" >"$LOG" 2>&1
}

# An archive in which nothing of this machine is left.
archive() { # FILE FOLDER NAME...
  local file=$1 folder=$2
  shift 2
  tar --create --directory "$folder" --sort=name --format=ustar --mtime="@$SOURCE_DATE_EPOCH" \
    --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' "$@" | gzip --no-name -9 >"$file"
}

# What of the tree belongs into a file of the release: no caches, nothing that is ignored.
files() { # PATH...
  (cd "$TREE" && find "$@" -type f ! -name '*.pyc' | LC_ALL=C sort)
}

put() { # MODE SOURCE TARGET
  install -D -m "$1" "$TREE/$2" "$ROOTFS/$3"
}

python_package() {
  (cd "$TREE" && "$PYTHON" -m build --no-isolation --outdir "$OUT")
}

# The wheels of the locked dependencies, for one architecture and every Python. Their hashes are in the
# lock, so what an earlier run fetched is what this one would fetch.
fetch_wheels() { # MACHINE FOLDER
  local version
  for version in $PYTHONS; do
    "$ROOT/.venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --require-hashes \
      --only-binary :all: --implementation cp --python-version "$version" \
      --platform "manylinux_2_28_$1" --platform "manylinux2014_$1" --dest "$2" \
      --requirement "$TREE/requirements.lock"
  done
}

# Sets $wheels, to the folder with those of a machine.
find_wheels() { # MACHINE
  wheels="$ROOT/build/wheels/$1-$(sha256sum "$TREE/requirements.lock" | cut -c1-16)"
  if ! [ -e "$wheels/.complete" ]; then
    mkdir -p "$wheels"
    fetch_wheels "$1" "$wheels"
    touch "$wheels/.complete"
  fi
}

# One file for a host without a network. Its two backports are needed by Python 3.10 alone.
one_file() {
  local wheels backports
  find_wheels x86_64
  backports="$ROOT/build/wheels/python310-$(sha256sum "$TREE/deploy/packages/python310.lock" | cut -c1-16)"
  [ -d "$backports" ] || "$ROOT/.venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
    --require-hashes --only-binary :all: --dest "$backports" -r "$TREE/deploy/packages/python310.lock"
  "$PYTHON" "$TREE/deploy/packages/bundle.py" "$OUT/mps-exporter.pyz" \
    "$wheels"/*.whl "$backports"/*.whl "$OUT"/*.whl
  "$PYTHON" "$TREE/deploy/image/sbom.py" "$OUT/mps-exporter.pyz" >"$OUT/mps-exporter_${VERSION}_pyz.cdx.json"
  "$PYTHON" "$TREE/deploy/packages/bundle.py" "$STAGE/licences" "$wheels"/*.whl "$backports"/*.whl
  "$PYTHON" "$TREE/deploy/image/sbom.py" --licences "$STAGE/licences" >"$OUT/LICENCES.txt"
}

stage_root() { # MACHINE
  local wheels name
  local python="$ROOTFS/usr/lib/mps-exporter/python" doc=usr/share/doc/mps-exporter
  find_wheels "$1"
  mkdir -p "$python"
  "$PYTHON" "$TREE/deploy/packages/bundle.py" "$python" "$wheels"/*.whl "$OUT"/*.whl
  put 644 deploy/packages/__main__.py usr/lib/mps-exporter/python/__main__.py
  put 755 deploy/packages/mps-exporter.sh usr/bin/mps-exporter
  ln -s mps-exporter "$ROOTFS/usr/bin/mps-terminate"
  for name in epilog health; do
    put 755 "deploy/jobs/mps-slurm-$name.sh" "usr/lib/mps-exporter/jobs/mps-slurm-$name.sh"
  done
  for name in mps-run mps-scancel; do
    put 755 "deploy/jobs/$name.sh" "usr/bin/$name"
  done
  for name in mps-run mps-scancel mps-terminate; do
    put 644 "deploy/jobs/$name.1" "usr/share/man/man1/$name.1"
  done
  for name in service socket; do
    put 644 "deploy/systemd/mps-exporter.$name" "usr/lib/systemd/system/mps-exporter.$name"
  done
  sed -i 's#/opt/mps-exporter/bin/mps-exporter#/usr/bin/mps-exporter#' \
    "$ROOTFS/usr/lib/systemd/system/mps-exporter.service"
  put 644 deploy/systemd/mps-exporter.sysusers usr/lib/sysusers.d/mps-exporter.conf
  put 644 deploy/packages/mps-exporter.default etc/default/mps-exporter
  put 644 deploy/systemd/nvidia-mps.logrotate etc/logrotate.d/nvidia-mps
  put 644 deploy/systemd/mps-exporter-least.conf "$doc/examples/mps-exporter-least.conf"
  put 644 deploy/apparmor/mps-exporter "$doc/examples/apparmor-mps-exporter"
  put 644 deploy/systemd/port-9401.conf "$doc/examples/port-9401.conf"
  put 644 LICENSE "$doc/copyright"
  put 644 CHANGELOG.md "$doc/CHANGELOG.md"
  put 644 docs/mps-exporter.1 usr/share/man/man1/mps-exporter.1
  gzip --no-name -9 "$ROOTFS"/usr/share/man/man1/*.1
  find "$ROOTFS" -type d -exec chmod 755 {} +
  find "$ROOTFS/usr/lib/mps-exporter/python" -type f -exec chmod 644 {} +
}

linux_packages() { # MACHINE ARCHITECTURE
  local kind
  ROOTFS="$STAGE/$2/root"
  stage_root "$1"
  cp -r "$TREE/deploy/packages/scripts" "$TREE/deploy/packages/nfpm.yaml" "$STAGE/$2/"
  for kind in deb rpm; do
    (cd "$STAGE/$2" && PACKAGE_ARCH=$2 PACKAGE_VERSION=$VERSION \
      "$BIN/nfpm" package --config nfpm.yaml --packager "$kind" --target "$OUT/")
  done
  "$PYTHON" "$TREE/deploy/image/sbom.py" "$ROOTFS/usr/lib/mps-exporter/python" \
    >"$OUT/mps-exporter_${VERSION}_$2.cdx.json"
}

# helm package gives files the time of the day, so its archive is made here; it has to accept it.
chart() {
  local file="$OUT/mps-exporter-chart-$VERSION.tgz"
  mkdir -p "$STAGE/chart"
  (cd "$TREE/deploy/helm" && cp -r mps-exporter "$STAGE/chart/")
  archive "$file" "$STAGE/chart" mps-exporter
  "$BIN/helm" show chart "$file" >/dev/null
  "$BIN/helm" lint --strict --set image.repository=mps-exporter "$file"
}

# For those who run Prometheus and Grafana themselves: without links until they say where those lead.
monitoring() {
  local folder="$STAGE/monitoring/mps-exporter-monitoring-$VERSION"
  mkdir -p "$folder/dashboards"
  (cd "$TREE" && "$PYTHON" tools/rules.py "$folder/rules")
  (cd "$TREE" && "$PYTHON" -m grafana --export "$folder/dashboards")
  cp -r "$TREE/prometheus/runbooks" "$folder/runbooks"
  archive "$OUT/mps-exporter-monitoring-$VERSION.tar.gz" "$STAGE/monitoring" .
}

for tool in nfpm helm; do
  [ -x "$BIN/$tool" ] || "$ROOT/tools/install-go-tools.sh" "$tool"
done
step 'sdist and wheel' python_package
step 'mps-exporter.pyz' one_file
step 'packages for amd64' linux_packages x86_64 amd64
step 'packages for arm64' linux_packages aarch64 arm64
step 'the chart' chart
step 'rules, runbooks and dashboards' monitoring
cp "$TREE/deploy/install.sh" "$OUT/install.sh"
"$PYTHON" "$TREE/tools/release_notes.py" "$VERSION" >"$OUT/NOTES.md"
(cd "$OUT" && rm -f SHA256SUMS .gitignore && sha256sum -- *.* >SHA256SUMS)
say "the release $VERSION: $OUT"
