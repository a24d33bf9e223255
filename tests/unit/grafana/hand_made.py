"""A host made by hand, for what no recording has: broken hardware, NVLink, a strange log.

It is rendered by the exporter's own renderer.
"""

from mps_exporter.mps.incidents_and_counters import Counters
from mps_exporter.observations import DaemonFacts, GpuObservation, LogState, Reading
from mps_exporter.snapshot import (
    Client,
    CollectorResult,
    ControlDaemon,
    Gpu,
    LogMetricValues,
    Server,
    Snapshot,
    Wait,
)
from testing.page import text_of

NAME = "made by hand"
UUID = "GPU-00000000-0000-0000-0000-000000000000"
LOST = "GPU-00000000-0000-0000-0000-000000000001"

RECORDED = f"""gpu_uid:mps_client_sms:avg5m{{gpu="0",uuid="{UUID}",uid="1001",bound="high"}} 66
gpu_uid:mps_client_sms:avg5m{{gpu="0",uuid="{UUID}",uid="1001",bound="low"}} 12
client:mps_client_info:pod{{daemon="/run/mps",pid="4242",uid="1001",pod="train-0"}} 1
job_uid:mps_uid_holding_gpus:avg5m{{uid="1001"}} 2
job_uid:mps_uid_waiting_gpus:sum{{uid="1002"}} 1
job_le:mps_uid_wait_seconds_bucket:increase1h{{le="60.0"}} 3
job_le:mps_uid_wait_seconds_bucket:increase1h{{le="+Inf"}} 4
"""
"""What rules record of it."""


def _readings(seconds: float) -> tuple[Reading, ...]:
    """Counters that grow by the second, and states of a GPU that has had its day."""
    grown = float(int(seconds))
    return (
        Reading("up", 1.0),
        Reading("recovery_action", 1.0, (("state", "gpu_reset"),)),
        Reading("row_remap_failure", 1.0),
        Reading("row_remap_pending", 1.0),
        Reading("remapped_rows", 8.0, (("cause", "uncorrectable"),)),
        Reading(
            "ecc_errors",
            grown,
            (("kind", "uncorrected"), ("scope", "volatile"), ("location", "dram")),
        ),
        Reading("xid_errors", grown, (("xid", "48"),)),
        Reading("pcie_replays", grown),
        Reading("pcie_errors", grown, (("kind", "bad_tlp"),)),
        Reading("nvlink_errors", grown, (("kind", "crc"),)),
        Reading("nvlink_receive_bytes", grown * 1e9),
        Reading("nvlink_transmit_bytes", grown * 2e9),
        Reading("memory_used", 60e9),
        Reading("memory_total", 80e9),
    )


def _counters(grown: int, now: float) -> LogMetricValues:
    counters = Counters()
    counters.increment("mps_uid_overtakes_total", grown, uid=1001)
    counters.set_latest("mps_server_last_exit_timestamp_seconds", now - 100, cause="crashed")
    counters.increment("mps_client_losses_total", grown, uid=1001, cause="own_fault")
    counters.increment("mps_client_losses_total", grown, uid=1002, cause="unfinished_work")
    counters.increment("mps_client_unfinished_exits_total", grown, uid=1001)
    counters.set_latest("mps_client_last_loss_timestamp_seconds", now + grown)
    counters.increment("mps_control_log_lines_total", 20 * grown, log="control")
    counters.increment("mps_control_log_lines_total", 10 * grown, log="server")
    counters.increment("mps_control_log_unrecognized_lines_total", grown, log="control")
    counters.increment("mps_control_log_query_lines_total", 4 * grown)
    return counters.snapshot()


def snapshot(seconds: float, now: float) -> Snapshot:
    """Return the host after this many seconds."""
    grown = int(seconds)
    client = Client(
        pid=4242,
        server_pid=4000,
        uid=1001,
        user="ada",
        command="train",
        slurm_job_id="4711",
        contexts={UUID: 1},
        memory_used_bytes={UUID: 39_000_000_000},
        memory_limit_bytes={UUID: 40_000_000_000},
        sm_limit={UUID: 66},
    )
    daemon = ControlDaemon(
        pipe_directory="/run/mps",
        log_directory="/var/log/mps",
        state="unresponsive",
        facts=DaemonFacts("/run/mps", "/var/log/mps"),
        queries=grown,
        query_failures={"timeout": grown},
        servers=(
            Server(pid=4000, uid=1001, user="ada", state="ACTIVE", ghost=True, clients=(client,)),
        ),
        waits=(Wait(pid=77, uid=1002, since=now - 3600, behind_uid=1001, dead=True),),
        gpu_uuids=(UUID,),
        logs=(LogState("/run/mps", "control", "control.log", readable=True, size_bytes=2**31),),
        counters=_counters(grown, now),
        dropped_clients=12,
    )
    gpu = Gpu(
        GpuObservation(0, UUID, name="NVIDIA A100", sm_count=108, readings=_readings(seconds)),
        index="0",
        uuid=UUID,
    )
    lost = Gpu(GpuObservation(1, LOST, readings=(Reading("up", 0.0),), lost=True), "1", LOST)
    failing = CollectorResult("control", success=False, duration_seconds=2.0, timed_out=True)
    return Snapshot(
        taken_at=now,
        gpus=(gpu, lost),
        gpu_indexes={UUID: "0", LOST: "1"},
        daemons=(daemon,),
        collectors=(failing,),
        unreadable_environments=1,
    )


def page(seconds: float, began: float) -> str:
    """Return its page this many seconds after it began (Unix time)."""
    return text_of(snapshot(seconds, began + seconds)) + RECORDED
