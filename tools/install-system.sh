#!/usr/bin/env bash
# Fetches the real programs that integration tests run against, into .tools/bin:
#
#   tools/install-system.sh servers    prometheus promtool    as this Debian has them
#                                      prometheus3 promtool3  the newest that Debian has
#                                      alertmanager amtool
#   tools/install-system.sh victoria   victoria-metrics vmalert vmalert-tool
#   tools/install-system.sh apparmor   apparmor_parser
#   tools/install-system.sh chromium   on the machine itself, by apt, and so only as root
#   tools/install-system.sh webp       the same: img2webp
#
# The first three unpack Debian packages below .tools. That needs no root, installs
# nothing on the machine and starts no service: apt works with lists and a cache of its
# own there, from the mirror that the machine is set up with, and checks signatures as
# ever. What is there already is left as it is; `make clean-tools` forgets it all.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"

APT="$TOOLS/apt"  # apt's own lists and cache
DEB="$TOOLS/deb"  # packages, unpacked
TRIED_UPDATE=''
mkdir -p "$BIN" "$DEB"

# --- apt, with a world of its own ---------------------------------------------------

private_apt() { # COMMAND ARGUMENT...
  local command=$1
  shift
  "$command" -q \
    -o Dir::State="$APT" -o Dir::State::Lists="$APT/lists" -o Dir::State::status="$APT/status" \
    -o Dir::Cache="$APT/cache" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
    -o Dir::Etc::sourcelist="$APT/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
    -o APT::Update::Post-Invoke=/bin/true -o APT::Sandbox::User=root -o Acquire::Languages=none \
    -o Acquire::Retries=2 "$@"
}

# Where this machine gets its distribution from: asked of apt, written nowhere.
mirrors() {
  apt-get update --print-uris |
    sed -n "s#^'\(.*/\)dists/$VERSION_CODENAME/InRelease'.*#\1#p" | sort -u
}

write_sources() { # RELEASE...
  local mirror release components=main signed='' keyring
  [ "$ID" = debian ] || components='main universe'
  for keyring in /usr/share/keyrings/"$ID"-archive-keyring.{gpg,pgp}; do
    if [ -e "$keyring" ]; then
      signed="[signed-by=$keyring] "
      break
    fi
  done
  mirrors | while read -r mirror; do
    for release in "$@"; do
      echo "deb $signed$mirror $release $components"
    done
  done >"$APT/sources.list"
  [ -s "$APT/sources.list" ]
}

fetch_lists() { # RELEASE...
  write_sources "$@" && timed "fetching package lists of $* (for .tools only)" private_apt apt-get update
}

# Once a run: lists of this machine's release and, on Debian, of the next one, for
# versions that this release is too old to have.
update_lists() {
  [ -z "$TRIED_UPDATE" ] || return "$TRIED_UPDATE"
  TRIED_UPDATE=1
  have apt-get && have dpkg-deb && [ -r /etc/os-release ] || return 1
  # shellcheck disable=SC1091
  . /etc/os-release
  VERSION_CODENAME=${VERSION_CODENAME:-sid}
  mkdir -p "$APT/lists/partial" "$APT/cache/archives/partial"
  : >"$APT/status"
  { [ "$ID" = debian ] && fetch_lists "$VERSION_CODENAME" testing; } ||
    fetch_lists "$VERSION_CODENAME" || return 1
  TRIED_UPDATE=0
}

# Oldest first: this release's own, then those of the ones to come.
versions() { # PACKAGE -> its versions, one a line
  private_apt apt-cache madison "$1" 2>/dev/null | awk -F' *[|] *' '{ gsub(/ /, "", $2); print $2 }' |
    sort -u -V
}

fetch_and_unpack() { # PACKAGE VERSION FOLDER
  (cd "$APT/new" && private_apt apt-get download "$1=$2") && dpkg-deb -x "$APT/new/"*.deb "$3"
}

unpack() { # PACKAGE VERSION -> the folder it is in, as $UNPACKED
  UNPACKED="$DEB/$1_$2"
  [ -e "$UNPACKED/.complete" ] && return
  rm -rf "$UNPACKED" "$APT/new"
  mkdir -p "$UNPACKED" "$APT/new"
  timed "fetching $1 $2" fetch_and_unpack "$1" "$2" "$UNPACKED" || return 1
  rm -rf "$APT/new"
  touch "$UNPACKED/.complete"
}

# --- what goes to .tools/bin ----------------------------------------------------------

major_of() { # PROGRAM: of prometheus or promtool
  "$1" --version 2>&1 | sed -n 's/.*version \([0-9]*\)\..*/\1/p' | head -1
}

works() { # PROGRAM: it is there and starts
  [ -x "$1" ] && { "$1" --version >/dev/null 2>&1 || "$1" --help >/dev/null 2>&1 || "$1" -version >/dev/null 2>&1; }
}

link() { # NAME TARGET
  if ! works "$2"; then
    say "$2 does not run on this machine"
    return 1
  fi
  case $2 in
    "$TOOLS"/*) ln -sfn "../${2#"$TOOLS/"}" "$BIN/$1" ;;
    *) ln -sfn "$2" "$BIN/$1" ;;
  esac
}

path_of() { # PROGRAM: on PATH, but not below .tools
  local elsewhere
  elsewhere=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$BIN" | paste -sd:)
  (PATH=$elsewhere && type -P "$1")
}

# Links programs of a package, in this release's own version or in the newest there is.
from_package() { # own|newest PACKAGE NAME=PROGRAM...
  local which=$1 package=$2 pair version
  shift 2
  update_lists || return 1
  if [ "$which" = newest ]; then
    version=$(versions "$package" | tail -1)
  else
    version=$(versions "$package" | head -1)
  fi
  if [ -z "$version" ]; then
    say "there is no package $package for this machine"
    return 1
  fi
  unpack "$package" "$version" || return 1
  for pair in "$@"; do
    [ -x "$UNPACKED/usr/bin/${pair#*=}" ] || return 1
    link "${pair%%=*}" "$UNPACKED/usr/bin/${pair#*=}" || return 1
  done
}

all_there() { # NAME...
  local name
  for name in "$@"; do
    [ -x "$BIN/$name" ] || return 1
  done
}

MISSING=()
missing() { # WHAT HINT
  MISSING+=("$1: $2")
}

install_servers() {
  local name found
  for name in prometheus promtool; do
    # A program of the developer's own choice goes first.
    found=$(path_of "$name" || true)
    [ -z "$found" ] || all_there "$name" || link "$name" "$found" || true
    if [ "$(major_of "${found:-false}")" = 3 ] && ! all_there "${name}3"; then
      link "${name}3" "$found" || true
    fi
  done
  if ! all_there prometheus promtool; then
    # From Debian 13 on, promtool is a package of its own.
    from_package own prometheus prometheus=prometheus promtool=promtool ||
      { from_package own prometheus prometheus=prometheus && from_package own promtool promtool=promtool; } ||
      missing 'prometheus, promtool' 'the package prometheus, or a release of it on PATH'
  fi
  if ! all_there prometheus3 promtool3; then
    { from_package newest prometheus prometheus3=prometheus && from_package newest promtool promtool3=promtool &&
      [ "$(major_of "$BIN/prometheus3")" -ge 3 ]; } ||
      { rm -f "$BIN/prometheus3" "$BIN/promtool3" &&
        "$ROOT/tools/install-go-tools.sh" prometheus3 promtool3; } ||
      missing 'prometheus3, promtool3' 'Prometheus 3 on PATH as prometheus and promtool'
  fi
  if ! all_there alertmanager amtool; then
    for name in alertmanager amtool; do
      found=$(path_of "$name" || path_of "prometheus-$name" || true)
      [ -z "$found" ] || link "$name" "$found" || true
    done
    all_there alertmanager amtool ||
      from_package newest prometheus-alertmanager alertmanager=prometheus-alertmanager amtool=amtool ||
      from_package own prometheus-alertmanager alertmanager=prometheus-alertmanager amtool=amtool ||
      missing 'alertmanager, amtool' 'the package prometheus-alertmanager, or a release of it on PATH'
  fi
}

install_victoria() {
  all_there victoria-metrics vmalert vmalert-tool ||
    from_package newest victoria-metrics victoria-metrics=victoria-metrics vmalert=vmalert vmalert-tool=vmalert-tool ||
    missing 'victoria-metrics, vmalert, vmalert-tool' 'VictoriaMetrics, or Debian 13 or newer'
}

install_apparmor() {
  local found
  all_there apparmor_parser && return
  found=$(path_of apparmor_parser || true)
  # /usr/sbin from Debian 13 on.
  { [ -n "$found" ] && link apparmor_parser "$found"; } ||
    from_package own apparmor apparmor_parser=../sbin/apparmor_parser ||
    from_package own apparmor apparmor_parser=../../sbin/apparmor_parser ||
    missing apparmor_parser 'the package apparmor'
}

install_chromium() {
  local name
  for name in chromium chromium-browser google-chrome; do
    path_of "$name" >/dev/null && return
  done
  { is_root_with_apt && apt_root_install chromium fonts-dejavu-core; } ||
    missing chromium 'as root: apt-get install chromium'
}

install_webp() {
  have img2webp || { is_root_with_apt && apt_root_install webp; } || missing img2webp 'the package webp'
}

[ $# -gt 0 ] || set -- servers
only_one tools
for group in "$@"; do
  case $group in
    servers | victoria | apparmor | chromium | webp) "install_$group" ;;
    *) fail "usage: $0 [servers] [victoria] [apparmor] [chromium] [webp]" ;;
  esac
done
# The packages lie unpacked; lists and cache are of no more use.
[ -z "$TRIED_UPDATE" ] || rm -rf "$APT"

[ ${#MISSING[@]} -eq 0 ] ||
  fail "tests need programs that could not be had here; install by hand:" "${MISSING[@]}" \
    "(make test-fast needs none of them.)"
