#!/bin/sh
# After the files are there: Debian calls it with "configure" and the version that was configured
# before, RPM with the number of versions (1: the first). The user first: the service runs as it.
set -e
systemd-sysusers mps-exporter.conf
overrides=/etc/systemd/system/mps-exporter.socket.d
# Port 9400 (0x24B8) may be taken, as by dcgm-exporter; an administrator's choice stays.
case $1:$2 in
  configure: | 1:*)
    if ! [ -d "$overrides" ] && grep -Eqs ':24B8 [0-9A-F]+:0000 0A' /proc/net/tcp /proc/net/tcp6; then
      mkdir "$overrides"
      printf '[Socket]\nListenStream=\nListenStream=9401\n' >"$overrides/port.conf"
      echo 'mps-exporter: another program listens on port 9400, so this one takes 9401' >&2
    fi
    ;;
esac
# Who disabled the service keeps it disabled in later versions.
case $1:$2 in
  configure: | 1:*) systemctl enable --quiet mps-exporter.socket mps-exporter.service ;;
esac
# In a chroot no systemd runs: then nothing is started.
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  if systemctl is-enabled --quiet mps-exporter.socket; then
    # On Debian, policy-rc.d may forbid it.
    invoke=$(command -v deb-systemd-invoke || echo systemctl)
    $invoke restart mps-exporter.socket mps-exporter.service || cat >&2 <<'END'
mps-exporter does not run: `systemctl status mps-exporter.socket` has the reason. Where another program
listens on port 9400, as dcgm-exporter does, take port 9401:
  mkdir -p /etc/systemd/system/mps-exporter.socket.d
  cp /usr/share/doc/mps-exporter/examples/port-9401.conf /etc/systemd/system/mps-exporter.socket.d/
  systemctl daemon-reload && systemctl restart mps-exporter.socket mps-exporter.service
END
  fi
fi
