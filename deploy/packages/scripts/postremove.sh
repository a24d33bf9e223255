#!/bin/sh
# After the files are gone. On Debian, what `systemctl enable` made and the user stay until the package
# is purged, like its settings and the recordings of incidents, its only files.
set -e
case $1 in
  purge | 0)
    rm -rf /var/lib/mps-exporter /etc/systemd/system/mps-exporter.service.d /etc/systemd/system/mps-exporter.socket.d \
      /etc/systemd/system/multi-user.target.wants/mps-exporter.service \
      /etc/systemd/system/sockets.target.wants/mps-exporter.socket
    for folder in sockets multi-user; do
      rmdir --ignore-fail-on-non-empty "/etc/systemd/system/$folder.target.wants" 2>/dev/null || :
    done
    if getent passwd mps-exporter >/dev/null; then
      userdel mps-exporter
    fi
    ;;
esac
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
fi
