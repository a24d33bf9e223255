#!/bin/sh
# Before the files go, and not before an upgrade (Debian: "upgrade", RPM: 1).
set -e
case $1 in
  remove | 0)
    if [ -d /run/systemd/system ]; then
      # Both at once: a scrape would start the service again.
      systemctl stop mps-exporter.socket mps-exporter.service
    fi
    ;;
esac
