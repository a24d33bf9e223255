#!/bin/sh
# HealthCheckProgram of slurm.conf: drains this node while `mps-exporter doctor` finds something
# critical, and resumes it once that is gone. It leaves a node alone that is drained, down or failing
# for another reason.
#
# Trouble of one GPU drains a node that has more of them only with MPS_HEALTH_DRAIN_FOR_ONE_GPU=1.
# Daemons of ordinary users do not count. What cannot be seen changes nothing.
#
# Exit status: always 0. Slurm ignores it.
set -u
PATH=${PATH:-}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
node=${SLURMD_NODENAME:-$(hostname -s)}

# The daemons that the service watches. The file is systemd's: no shell code, values without quotes, too.
while IFS='=' read -r name value; do
  case $name in
    MPS_EXPORTER_*[!A-Z_]*) ;;
    MPS_EXPORTER_MPS_*)
      value=${value#[\"\']}
      export "$name=${value%[\"\']}"
      ;;
  esac
done 2>/dev/null <"${1:-/etc/default/mps-exporter}"

# "drain REASON", "well", or nothing if it is not known.
verdict=$(mps-exporter doctor --json | python3 -c '
import json, subprocess, sys

seen = json.load(sys.stdin)
critical = [
    one for one in seen["findings"] if one["severity"] == "critical" and not one["ordinary_user"]
]
gpus = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout.splitlines()
if sys.argv[1] != "1" and len(gpus) > 1:
    of_gpus = {one["uuid"] or one["gpu"] for one in critical if one["gpu"]}
    if len(of_gpus) < len(gpus):
        critical = [one for one in critical if not one["gpu"]]
if critical:
    text = critical[0]["name"] + ": " + critical[0]["evidence"]
    print("drain mps-exporter: " + "".join(c if c.isprintable() else " " for c in text)[:100])
elif not seen["not_seen"]:
    print("well")
' "${MPS_HEALTH_DRAIN_FOR_ONE_GPU:-}" 2>/dev/null) ||
  logger -t mps-slurm-health 'mps-exporter doctor --json gave no answer'

shown=$(scontrol show node "$node" 2>/dev/null | sed -n 's/^ *\(State=[^ ]*\).*/\1/p; s/^ *Reason=/Reason=/p')
case ${shown%%Reason=*} in
  # Another's drain keeps its reason: a node with this program's reason would be resumed.
  *DRAIN* | *DOWN* | *FAIL*)
    case $verdict:${shown#*Reason=} in
      'well:mps-exporter: '*) scontrol update nodename="$node" state=resume ;;
    esac
    ;;
  *State=*)
    case $verdict in
      'drain '*) scontrol update nodename="$node" state=drain reason="${verdict#drain }" ;;
    esac
    ;;
esac
exit 0
