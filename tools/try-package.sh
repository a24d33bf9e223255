#!/usr/bin/env bash
# Tries a Debian package on a fresh system: installed, serving, installed again, removed without a trace.
#
#   tools/try-package.sh SUITE PACKAGE.deb [INSTALL.SH]    SUITE: bookworm, trixie, noble, ...
#
# debootstrap makes the system in a temporary folder, from the mirror that this machine is set up with,
# and it boots with its own systemd in namespaces of its own: nothing of this machine changes, and its
# ports are free. It needs root, debootstrap, and Linux with cgroup v2 (mounted or not).
# ROOTS names a folder in which fresh systems are kept for the next time.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/say.sh"
[ $# -ge 2 ] || fail "usage: $0 SUITE PACKAGE.deb [INSTALL.SH]"
SUITE=$1 PACKAGE=$(readlink -f "$2") INSTALL=$(readlink -f "${3:-$ROOT/deploy/install.sh}")
[ "$(id -u)" -eq 0 ] || fail 'this needs root'
have debootstrap || fail 'debootstrap is missing' 'apt-get install debootstrap'

PLACE=$(mktemp -d)
MACHINE="$PLACE/machine" CGROUPS="$PLACE/cgroup" INIT='' STARTER=''
GROUP="mps-exporter-try-$$"

end() {
  [ -z "$INIT" ] || kill -KILL "$INIT" 2>/dev/null || true
  [ -z "$STARTER" ] || wait "$STARTER" 2>/dev/null || true
  if mountpoint -q "$CGROUPS"; then
    for ((tries = 50; tries; tries--)); do
      find "$CGROUPS/$GROUP" -depth -type d -exec rmdir {} + 2>/dev/null && break
      sleep 0.1
    done
    umount "$CGROUPS"
  fi
  rm -rf --one-file-system "$PLACE"
}
trap end EXIT

make_system() { # FOLDER: with Python and curl, which are no part of what is tried
  local mirror
  # shellcheck disable=SC1091
  . /etc/os-release
  mirror=${MIRROR:-$(apt-get update --print-uris |
    sed -n "s#^'\(.*/\)dists/$VERSION_CODENAME/InRelease'.*#\1#p" | head -1)}
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,python3,curl,ca-certificates \
    "$SUITE" "$1" "$mirror"
}

boot() {
  mkdir -p "$CGROUPS"
  mount -t cgroup2 none "$CGROUPS"
  mkdir "$CGROUPS/$GROUP"
  # shellcheck disable=SC2016  # expanded by the inner shell
  unshare --mount --pid --fork --uts --ipc --net --propagation private -- bash -euc '
    echo 0 >"$2/cgroup.procs"
    root=$1
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for node in null zero full random urandom tty; do
      touch "$root/dev/$node" && mount --bind "/dev/$node" "$root/dev/$node"
    done
    mkdir "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    cd "$root" && pivot_root . mnt
    umount --lazy /mnt
    exec env -i container=other /bin/sh -c "
      exec unshare --cgroup -- /bin/sh -c \"
        mount -t cgroup2 none /sys/fs/cgroup
        exec /lib/systemd/systemd --system --log-target=null
      \""
  ' boot "$MACHINE" "$CGROUPS/$GROUP" >"$PLACE/boot.log" 2>&1 &
  STARTER=$!
  until INIT=$(pgrep --parent "$STARTER"); do
    kill -0 "$STARTER" 2>/dev/null || fail "the system does not start" "$(cat "$PLACE/boot.log")"
  done
}

inside() { # COMMAND...
  nsenter --target "$INIT" --mount --pid --uts --ipc --net --cgroup --root --wd=/ -- \
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
}

wait_for() { # WHAT COMMAND...
  local what=$1 tries
  shift
  for ((tries = 300; tries; tries--)); do
    ! "$@" >/dev/null 2>&1 || return 0
    sleep 0.2
  done
  inside journalctl --no-pager --lines 60 >&2 || true
  cat "$PLACE/boot.log" >&2
  fail "this did not come: $what"
}

check() { # WHAT COMMAND...
  local what=$1
  shift
  "$@" >"$PLACE/check.log" 2>&1 || {
    cat "$PLACE/check.log" >&2
    inside journalctl --no-pager --lines 40 >&2 || true
    fail "$SUITE: not true: $what"
  }
  say "$SUITE: $what"
}

metrics() { # PORT
  inside curl --silent --fail --max-time 5 "http://localhost:$1/metrics" | grep -q '^mps_exporter_build_info'
}

# Every file with its mode, and accounts; not what package managers and systemd write by themselves.
traces() {
  inside find / -xdev \( -path /var/log -o -path /var/cache -o -path /var/lib/apt -o -path /var/lib/dpkg \
    -o -path /var/lib/systemd -o -path /var/backups -o -path /root -o -path /var/tmp \) -prune \
    -o ! -name 'passwd-' ! -name 'group-' ! -name '*shadow-' ! -name .pwd.lock ! -name ld.so.cache \
    -printf '%p %M %u\n' | sort
  inside sort /etc/passwd /etc/group /etc/shadow /etc/gshadow
  inside dpkg --get-selections | sort
}

not() { ! "$@"; }
runs_as() { [ "$(inside ps -o user= -C "$1" 2>/dev/null | sort -u)" = "$2" ]; }

fresh="${ROOTS:-$PLACE}/$SUITE"
[ -e "$fresh/.complete" ] || { timed "making a fresh $SUITE" make_system "$fresh" && touch "$fresh/.complete"; }
cp -a "$fresh" "$MACHINE"
rm "$MACHINE/.complete"
cp "$PACKAGE" "$MACHINE/root/package.deb"
cp "$INSTALL" "$MACHINE/root/install.sh"
boot
# "degraded" where a part of it asks for more than a machine in namespaces has, such as modules.
has_started() {
  case $(inside systemctl is-system-running || true) in running | degraded) ;; *) return 1 ;; esac
}
wait_for 'systemd has started' has_started
inside systemctl start dbus 2>/dev/null || true
say "$SUITE: $(inside sed -n 's/^PRETTY_NAME=//p' /etc/os-release), $(inside python3 -V), started"

traces >"$PLACE/before"
check 'the package is installed, without a network' inside apt-get install -y /root/package.deb
check 'socket and service are active' inside systemctl is-active mps-exporter.socket mps-exporter.service
wait_for 'metrics on port 9400' metrics 9400
check 'metrics are served on port 9400' metrics 9400
user=$(inside systemctl show --property MainPID --value mps-exporter.service)
check 'it runs as mps-exporter' inside sh -c "[ \$(stat -c %U /proc/$user) = mps-exporter ]"
check 'the doctor runs' inside sh -c 'mps-exporter doctor; [ $? -le 2 ]'
check 'it reports its version' inside mps-exporter --version

check 'installed again, it is still active' inside apt-get install -y --reinstall /root/package.deb
wait_for 'metrics after the second installation' metrics 9400
inside systemctl disable --now --quiet mps-exporter.socket mps-exporter.service
check 'a disabled service is installed again' inside apt-get install -y --reinstall /root/package.deb
check 'and stays disabled' not inside systemctl is-active mps-exporter.socket
inside systemctl enable --now --quiet mps-exporter.socket mps-exporter.service

check 'removed, and the port is free' inside apt-get remove -y mps-exporter
check 'nothing serves any more' not metrics 9400
inside systemd-run --quiet --unit other-exporter python3 -m http.server 9400
wait_for 'the other program on port 9400' inside curl --silent --output /dev/null http://localhost:9400/
check 'installed although the port is in use' inside apt-get install -y /root/package.deb
cp "$PLACE/check.log" "$PLACE/installed.log"
check 'and the installation names the other port' grep -q 'port-9401.conf' "$PLACE/installed.log"
check 'the installer takes another port' inside sh /root/install.sh --port 9401 \
  --set MPS_EXPORTER_COLLECTOR_CLIENTS_MAX=200 /root/package.deb
check 'metrics are served on port 9401' metrics 9401
check 'the setting holds' inside sh -c "curl -s http://localhost:9401/metrics >/dev/null &&
  tr '\0' '\n' </proc/\$(systemctl show --property MainPID --value mps-exporter.service)/environ |
  grep -qx MPS_EXPORTER_COLLECTOR_CLIENTS_MAX=200"
inside cp -p /etc/default/mps-exporter /root/settings
inside sh -c 'printf "ARGS=--no-collector.logs\nOPTIONS=--no-collector.control\n" >>/etc/default/mps-exporter'
inside systemctl restart mps-exporter.service
wait_for 'metrics with ARGS' metrics 9401
check 'the flags in ARGS hold' not inside sh -c 'curl -s http://localhost:9401/metrics | grep -q collector=.logs'
check 'and the log names a setting of others' inside sh -c 'journalctl -u mps-exporter | grep -q "OPTIONS is no"'
# shellcheck disable=SC2016  # a hash of a password, no variables
inside sh -c 'mkdir /etc/slurm && echo "basic_auth_users: {a: \$2y\$10\$abcdefghijklmnopqrstuuu5cLGXyXcBLqrkSjqIIbOMTPlzgQNbm}" >/etc/slurm/web.yml'
check 'the installer takes a password and an epilog' inside sh /root/install.sh --port 9401 \
  --slurm-epilog /etc/slurm/epilog.d --set MPS_EXPORTER_WEB_CONFIG_FILE=/etc/slurm/web.yml /root/package.deb
inside mv /root/settings /etc/default/mps-exporter
inside systemctl restart mps-exporter.service
started() { inside systemctl show --property InvocationID mps-exporter.service mps-exporter.socket; }
started >"$PLACE/started"
traces >"$PLACE/installed"
check 'the same installation again succeeds' inside sh /root/install.sh --port 9401 \
  --set MPS_EXPORTER_COLLECTOR_CLIENTS_MAX=200 /root/package.deb
started >"$PLACE/started-again"
traces >"$PLACE/installed-again"
check 'it restarts nothing' diff "$PLACE/started" "$PLACE/started-again"
check 'it changes nothing' diff "$PLACE/installed" "$PLACE/installed-again"
check 'mps-terminate, mps-run and mps-scancel are on PATH' inside sh -c \
  'mps-terminate --uid 0 && mps-run true && ! mps-scancel 2>/dev/null'
check 'and so are their man pages' inside sh -c \
  'cd /usr/share/man/man1 && gzip -t mps-exporter.1.gz mps-terminate.1.gz mps-run.1.gz mps-scancel.1.gz'
check 'removed with its settings' inside sh /root/install.sh --remove
check 'what is left for Slurm does nothing' inside sh -c '/etc/slurm/epilog.d/zz-mps-exporter.sh && /etc/slurm/mps-health.sh'
inside rm -r /etc/slurm

check 'the first installation finds the port in use' inside apt-get install -y /root/package.deb
check 'and takes 9401' metrics 9401
check 'a listen address is refused' not inside sh /root/install.sh \
  --set MPS_EXPORTER_WEB_LISTEN_ADDRESS=:9500 /root/package.deb
check 'and the log has the reason' inside sh -c \
  'journalctl -u mps-exporter | grep -q "the socket unit has the address"'
inside systemctl stop other-exporter
check 'removed again' inside sh /root/install.sh --remove
traces >"$PLACE/after"
check 'no trace is left' diff "$PLACE/before" "$PLACE/after"
say "$SUITE: passed"
