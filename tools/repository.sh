#!/usr/bin/env bash
# Lays packages out as signed repositories for apt and yum, in a folder for any web server:
#
#   tools/repository.sh FOLDER URL KEY PACKAGE...
#
# URL is where FOLDER will be served, KEY a secret key of gpg. Packages that FOLDER has stay there. What a
# host needs is in FOLDER/mps-exporter.sources (apt 2.4 or newer) and FOLDER/mps-exporter.repo.
# It needs dpkg-dev, gpg, and createrepo_c, which is also on PyPI.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
[ $# -ge 4 ] && [ -n "$2" ] && [ -n "$3" ] || fail "usage: $0 FOLDER URL KEY PACKAGE..."
FOLDER=$1 URL=${2%/} KEY=$3
shift 3
export LC_ALL=C
for tool in dpkg-scanpackages gpg createrepo_c; do
  have "$tool" || fail "$tool is missing (dpkg-scanpackages: package dpkg-dev)"
done

sign() { gpg --batch --yes --local-user "$KEY" --armor "$@"; }

mkdir -p "$FOLDER/apt" "$FOLDER/yum"
for package in "$@"; do
  case $package in
    *.deb) cp "$package" "$FOLDER/apt/" ;;
    *.rpm) cp "$package" "$FOLDER/yum/" ;;
    *) fail "$package is neither a .deb nor an .rpm" ;;
  esac
done
cd "$FOLDER"
gpg --batch --armor --export "$KEY" >key.asc
[ -s key.asc ] || fail "gpg has no key $KEY"

(
  cd apt
  dpkg-scanpackages --multiversion . >Packages
  gzip --no-name --keep --force Packages
  {
    date --utc '+Date: %a, %d %b %Y %T UTC'
    printf '%s\n' 'Origin: mps-exporter' 'Label: mps-exporter' 'SHA256:'
    for file in Packages Packages.gz; do
      echo " $(sha256sum <"$file" | cut -d' ' -f1) $(stat --format %s "$file") $file"
    done
  } >Release
  sign --output InRelease --clear-sign Release
)
createrepo_c --quiet --general-compress-type gz yum
sign --output yum/repodata/repomd.xml.asc --detach-sign yum/repodata/repomd.xml

printf '%s\n' 'Types: deb' "URIs: $URL/apt/" 'Suites: ./' 'Signed-By:' >mps-exporter.sources
sed 's/^$/./; s/^/ /' key.asc >>mps-exporter.sources
# The packages have no signatures: that of the index, which has their hashes, is checked.
printf '%s\n' '[mps-exporter]' 'name=mps-exporter' "baseurl=$URL/yum/" 'gpgcheck=0' 'repo_gpgcheck=1' \
  "gpgkey=$URL/key.asc" >mps-exporter.repo
say "the repository: $FOLDER"
