#!/bin/sh
# Installs the exporter's package on this host and shows that it serves metrics:
#
#   install.sh [OPTION...] PACKAGE.deb|PACKAGE.rpm
#
#   --port PORT          listen on PORT in place of 9400, which is also dcgm-exporter's
#   --set NAME=VALUE     a setting of /etc/default/mps-exporter: MPS_EXPORTER_...; repeatable
#   --least              run without the capabilities
#   --slurm-epilog PATH  add the epilog for MPS clients to PATH, a folder of Slurm's Epilog=; where that is
#                        one file, print the line to add to it. Next to PATH: mps-health.sh for
#                        HealthCheckProgram=. Copy both to all nodes, also to those without the package
#   --remove             remove the package with its settings and its user; needs no PACKAGE. What
#                        --slurm-epilog wrote stays, as slurm.conf names it, and does nothing
#   --help
#
# It needs root and systemd, and no network where Python 3.11 or newer is installed. A second run with the
# same package and settings changes and restarts nothing; other options change the settings. For many
# hosts, copy this file and the package there and run it with pdsh, clush or ansible (-m script).
set -eu

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

remove() {
  if command -v dpkg-query >/dev/null && dpkg-query -W mps-exporter >/dev/null 2>&1; then
    dpkg --purge mps-exporter
  elif command -v rpm >/dev/null && rpm -q mps-exporter >/dev/null 2>&1; then
    rpm --erase mps-exporter
  else
    fail 'mps-exporter is not installed as a package'
  fi
}

# The package manager that fetches Python where it is missing, else the one that only unpacks.
install_package() { # FILE
  case $1 in
    *.deb)
      if command -v apt-get >/dev/null; then
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-downgrades \
          --reinstall -o Dpkg::Options::=--force-confold "$1"
      else
        dpkg --install "$1"
      fi
      ;;
    *.rpm)
      if command -v dnf >/dev/null; then
        dnf install -y "$1"
      elif command -v zypper >/dev/null; then
        zypper --non-interactive install --allow-unsigned-rpm "$1"
      else
        rpm --upgrade --replacepkgs "$1"
      fi
      ;;
    *) fail "$1 is neither a .deb nor an .rpm" ;;
  esac
}

is_installed() { # FILE: the same package, not only the same version
  case $1 in
    *.deb)
      dpkg-deb --ctrl-tarfile "$1" | tar -xO ./md5sums 2>/dev/null |
        cmp -s - /var/lib/dpkg/info/mps-exporter.md5sums &&
        [ "$(dpkg-query -W -f '${Version}${db:Status-Status}' mps-exporter)" = \
          "$(dpkg-deb -f "$1" Version)installed" ]
      ;;
    *.rpm)
      [ "$(rpm -q --qf '%{SHA256HEADER}' mps-exporter)" = \
        "$(rpm -qp --nosignature --qf '%{SHA256HEADER}' "$1")" ]
      ;;
  esac
}

all_settings() {
  cat "$settings" "$units"/mps-exporter.socket.d/*.conf "$units"/mps-exporter.service.d/*.conf 2>/dev/null | cksum
}

write_setting() { # NAME=VALUE
  case $1 in
    MPS_EXPORTER_*=*) ;;
    *) fail "--set $1: a setting is MPS_EXPORTER_...=VALUE" ;;
  esac
  ! grep -qxF "$1" "$settings" 2>/dev/null || return 0
  touch "$settings"
  { grep -v "^${1%%=*}=" "$settings" || true; } >"$settings.new"
  echo "$1" >>"$settings.new"
  cat "$settings.new" >"$settings"
  rm "$settings.new"
}

# Prints the scheme: a web configuration may ask for TLS and a password. Not by curl, which asks a proxy.
ready() { # PORT
  for python in /usr/bin/python3.1[1-9]; do
    [ -x "$python" ] && "$python" - "$1" <<'END' && return
import http.client, ssl, sys
at = {"host": "127.0.0.1", "port": int(sys.argv[1]), "timeout": 5}
tls = http.client.HTTPSConnection(**at, context=ssl._create_unverified_context())
for scheme, server in ("http", http.client.HTTPConnection(**at)), ("https", tls):
    try:
        server.request("GET", "/-/ready")
        if server.getresponse().status in (200, 401):
            sys.exit(print(scheme))
    except (OSError, http.client.HTTPException):
        pass
sys.exit(1)
END
  done
  return 1
}

port='' package='' least='' epilog='' wanted=''
settings=/etc/default/mps-exporter
units=/etc/systemd/system
[ $# -gt 0 ] || fail 'usage: install.sh [OPTION...] PACKAGE; --help has the options'
while [ $# -gt 0 ]; do
  case $1 in
    --port) port=${2:?"--port needs a number"} && shift ;;
    --set) wanted="$wanted${2:?"--set needs NAME=VALUE"}
" && shift ;;
    --least) least=yes ;;
    --slurm-epilog) epilog=${2:?"--slurm-epilog needs a folder"} && epilog=${epilog%/\*} && shift ;;
    --remove) remove && exit ;;
    --help | -h)
      sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
      exit
      ;;
    -*) fail "unknown option: $1" ;;
    *) package=$1 ;;
  esac
  shift
done
[ "$(id -u)" -eq 0 ] || fail 'this needs root'
[ -r "$package" ] || fail "there is no package ${package:-(none was given)}"
case $port in *[!0-9]*) fail "--port $port: not a number" ;; esac
case $epilog in '' | /?*) ;; *) fail "--slurm-epilog $epilog: no absolute path" ;; esac
before=$(all_settings)

# Before the package: it starts the service.
if [ -n "$port" ]; then
  mkdir -p "$units/mps-exporter.socket.d"
  printf '[Socket]\nListenStream=\nListenStream=%s\n' "$port" >"$units/mps-exporter.socket.d/port.conf"
fi
if [ -n "$least" ]; then
  mkdir -p "$units/mps-exporter.service.d"
  printf '[Service]\nAmbientCapabilities=\nCapabilityBoundingSet=\n' \
    >"$units/mps-exporter.service.d/least.conf"
fi
package=$(readlink -f "$package")
changed=''
is_installed "$package" || {
  install_package "$package"
  changed=yes
}
printf '%s' "$wanted" | while read -r setting; do
  write_setting "$setting"
done
# Slurm keeps a node out of service whose epilog or health check is missing or fails.
guard() { # epilog|health
  script=/usr/lib/mps-exporter/jobs/mps-slurm-$1.sh
  echo "[ ! -x $script ] || $script"
}
write_guard() { # epilog|health FILE
  printf '#!/bin/sh\n%s\n' "$(guard "$1")" >"$2"
  chmod 755 "$2"
}
if [ -n "$epilog" ]; then
  [ -e "$epilog" ] || mkdir -p "$epilog"
  write_guard health "$(dirname "$epilog")/mps-health.sh"
fi
if [ -d "$epilog" ]; then
  # Slurm runs a folder from z to 0: this comes before any that ends processes.
  rm -f "$epilog"/*mps-exporter.sh
  write_guard epilog "$epilog/zz-mps-exporter.sh"
elif [ -n "$epilog" ] && ! grep -qF mps-slurm-epilog.sh "$epilog"; then
  echo "install.sh: $epilog is one file; add this line to it, before any that ends processes: $(guard epilog)" >&2
fi
if [ -n "$changed" ] || [ "$(all_settings)" != "$before" ] ||
  ! systemctl is-active --quiet mps-exporter.socket || ! systemctl is-active --quiet mps-exporter.service; then
  systemctl daemon-reload
  systemctl restart mps-exporter.socket mps-exporter.service
fi

[ -n "$port" ] || port=$(systemctl show --property Listen mps-exporter.socket | sed -n 's/.*[=:]\([0-9]*\) .*/\1/p')
/usr/bin/mps-exporter --version >/dev/null
tries=30
until scheme=$(ready "$port"); do
  tries=$((tries - 1))
  [ "$tries" -gt 0 ] || fail 'it does not answer: journalctl -u mps-exporter.service has the reason'
  sleep 1
done
echo "mps-exporter serves $scheme://localhost:$port/metrics; \`mps-exporter doctor\` looks at this host"
