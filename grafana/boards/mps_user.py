"""One user: why is my job waiting, what did I lose, and what did I get?"""

from dataclasses import replace

from grafana import style
from grafana.board import Board, Row, Variable, eventful, instance, job
from grafana.boards import shared
from grafana.panels import (
    CAUSES_ALIKE,
    Column,
    Query,
    events,
    hidden,
    names_tile,
    strip,
    table,
    tile,
    timeline,
)
from grafana.promql import new_in_range, new_in_step

_MINE = '{uid=~"$uid"}'
_MY_JOB = '{uid=~"$uid", slurm_job_id=~"$slurm_job_id"}'
_OTHERS = '{uid!~"$uid"}'
_NOWHERE = f'label_replace({shared.NOTHING}, "instance", "nowhere", "", "")'
WAITING = f"mps_uid_waiting_clients{_MINE} - mps_uid_waiting_dead_clients{_MINE}"
_I_WAIT = f"mps_uid_waiting_clients{_MINE} > 0"
_WHERE_I_WAIT = f"on ({shared.DAEMONS}) {_I_WAIT}"
# The user with clients on the daemon now; without clients, the user of its server.
_HOLDS = (
    f"(count by ({shared.USERS}) (mps_client_info{_OTHERS})"
    f" or count by ({shared.USERS}) (mps_server_info{_OTHERS}))"
)
_SINCE = f"mps_uid_waiting_since_timestamp_seconds{_MINE}"
# Users of the same daemon whose wait began before mine.
_AHEAD = (
    f"count by ({shared.DAEMONS}) (mps_uid_waiting_since_timestamp_seconds{_OTHERS}"
    f" < on ({shared.DAEMONS}) group_left () max by ({shared.DAEMONS}) ({_SINCE}))"
)
POSITION = f"({_AHEAD} or 0 * count by ({shared.DAEMONS}) ({_SINCE})) + 1"

_LONGEST = f"topk(1, max by (instance) (time() - {_SINCE}))"

TILES = strip(
    "My programs",
    tile(
        "My state",
        "Healthy: connected. Whether any of this user's programs has a place on a GPU now. "
        "Waiting: it hangs in cuInit until the holder's last client exits; do not kill it, "
        "because a process that dies in the queue makes the daemon hang. Torn down: a fatal GPU "
        "error hit it, and it cannot use the GPU any more.",
        f"count(mps_uid_waiting_dead_clients{_MINE} > 0) * 0 + 25"
        f" or count(mps_uid_waiting_clients{_MINE} > 0) * 0 + 22"
        f' or count(mps_client_state{{uid=~"$uid", state="torn_down"}} == 1) * 0 + 26'
        f" or count(mps_client_info{_MINE}) * 0 + 23"
        f" or count(mps_server_info{_MINE}) * 0 + 21"
        f" or {shared.NOTHING} or {shared.UNREACHABLE}",
        states=(*style.DAEMON_STATES[:1], *style.USER_STATES),
    ),
    tile(
        "Longest wait",
        "Healthy: seconds, the price of a hand-over. Orange and red are where the alerts "
        "MpsUidWaitLong and MpsUidStarved fire.",
        shared.on_host(f"{_LONGEST} or on () {_NOWHERE}"),
        style.DURATION,
        shared.WAIT_STEPS,
        name="{{host}}",
    ),
    tile(
        "Queue place",
        "For information: 1 is next. Users are served in the order in which they began to wait; "
        "the turn comes when the holder's last client exits and the daemon's back-off is over.",
        shared.on_host(
            f"max by (instance) ({POSITION}) and on (instance) {_LONGEST} or on () {_NOWHERE}"
        ),
        words=(style.State(0, "not waiting", style.QUIET),),
        name="{{host}}",
    ),
    tile(
        "Connected",
        "For information: this user's programs that are connected to MPS now.",
        f"count(mps_client_info{_MINE}) or {shared.NOTHING}",
    ),
    shared.events_tile(
        "Lost",
        "Healthy: 0. This user's programs that MPS took down in this time range.",
        f"mps_client_losses_total{_MINE}",
    ),
    width=16,
    height=6,
    titleSize=12,
)

_BEHIND_FOR = (
    f"({_HOLDS} and {_WHERE_I_WAIT}) * 0 + on ({shared.DAEMONS}) group_left ()"
    f" max by ({shared.DAEMONS}) (time() - {_SINCE})"
)
BEHIND = names_tile(
    "Behind",
    "For information: who holds the GPU that this user waits for. Ask them how long they need.",
    (
        # The longest wait first, as in the table.
        f"sort_desc({shared.on_host(f'max by (uid, instance) ({_BEHIND_FOR})')})",
        "uid {{uid}} · {{host}}",
        style.WARN,
    ),
    (f"{shared.NOTHING} unless on () count({_I_WAIT})", "nobody", style.QUIET),
    (shared.UNREACHABLE, "unreachable", style.QUIET),
    none="no data",
)

WHERE = table(
    "Where do I wait, and what comes next?",
    "Healthy: empty. Each daemon on which this user waits: for how long, behind whom, how many "
    "users come first, and how long the daemon backs off between attempts to replace the server.",
    (
        f"topk(50, max by ({shared.DAEMONS}) (time() - {_SINCE}))",
        f"max by ({shared.DAEMONS}) ({WAITING}) > 0",
        f"max by ({shared.DAEMONS}) ({POSITION})",
        f"max by ({shared.DAEMONS}) (mps_uid_handover_backoff_seconds and {_WHERE_I_WAIT})",
        f"max by ({shared.DAEMONS}, holder) (label_replace({_HOLDS} and {_WHERE_I_WAIT},"
        ' "holder", "uid $1", "uid", "(.*)"))',
    ),
    (
        # The first three are what a phone shows.
        shared.host_column("mps-sharing", width=128),
        Column("Waiting for", "A", unit=style.DURATION, steps=shared.WAIT_STEPS, width=118),
        Column("Behind", "holder", least=93),
        Column("Place in queue", "C", width=125),
        Column("My programs", "B", width=115),
        Column("Back-off", "D", unit=style.SECONDS, width=100),
        Column("Daemon", "daemon"),
        *hidden("E", "job"),
    ),
    sort="Waiting for",
    none="No wait of this user is known.",
    found=_SINCE,
    two_lines=True,
)

_LOSSES = "mps_client_losses_total"
_I_LOST = f"{new_in_range(_LOSSES + _MINE, shared.DAEMONS)} > 0"
_OWN_FAULT = 'mps_client_losses_total{uid!~"$uid", cause="own_fault"}'
_LEFT_WORK = 'mps_client_unfinished_exits_total{uid!~"$uid"}'
TO_WHOM = table(
    "Lost to whom?",
    "Healthy: empty. Other users on the daemons where this user lost programs in this time range: "
    "whose clients ended with GPU work in flight, which took others down, and whose own programs "
    "used a bad pointer, both proved by the kernel log.",
    (
        f"topk(20, ({new_in_range(_LEFT_WORK, shared.USERS)} > 0"
        f" or ({new_in_range(_OWN_FAULT, shared.USERS)} > 0) * 0)"
        f" and on ({shared.DAEMONS}) {_I_LOST})",
        f"{new_in_range(_OWN_FAULT, shared.USERS)} > 0 and on ({shared.DAEMONS}) {_I_LOST}",
    ),
    (
        Column("User", "uid"),
        Column("Unfinished", "A", width=110, decimals=0),
        Column("Bad pointer", "B", width=125, decimals=0),
        shared.host_column("mps-incidents", width=None),
        *hidden("daemon", "job"),
    ),
    sort="Unfinished",
    none="Nobody else is known.",
    width=12,
    height=8,
)

_PROGRAM = "job, instance, daemon, pid, gpu"
# All columns are of the same programs.
_SHOWN_PROGRAMS = (
    f"topk(100, max by ({_PROGRAM}, command, slurm_job_id)"
    " (mps_client_memory_used_bytes * on (job, instance, daemon, server, pid)"
    f" group_left (command, slurm_job_id) mps_client_info{_MY_JOB}))"
)
_OF_SHOWN = f"and on ({_PROGRAM}) {_SHOWN_PROGRAMS}"
GOT = table(
    "What do my programs get?",
    "For information: this user's connected programs, those of the chosen Slurm job, their SMs and "
    "memory, and the limits; at most 100.",
    (
        _SHOWN_PROGRAMS,
        f"max by ({_PROGRAM}) (mps_client_memory_limit_bytes {_OF_SHOWN})",
        f"max by ({_PROGRAM}) (mps_client_sm_limit {_OF_SHOWN})",
        f"max by ({_PROGRAM}) ((mps_client_memory_used_bytes {_OF_SHOWN}) * 0"
        " + on (job, instance, daemon, server, pid) group_left ()"
        " mps_client_start_time_seconds) * 1000",
    ),
    (
        Column("Program", "command"),
        shared.host_column("mps-host", width=None),
        Column("GPU", "gpu", width=70),
        Column("PID", "pid", width=90),
        Column("Slurm job", "slurm_job_id", width=110),
        Column("Connected", "D", unit=style.AGO, width=115),
        Column("SMs", "C", width=75),
        Column("Memory", "A", unit=style.BYTES, width=100),
        Column("Memory limit", "B", unit=style.BYTES, width=108),
        *hidden("daemon", "job"),
    ),
    sort="Memory",
    none="No connected program is known.",
    found=f"mps_client_info{_MY_JOB}",
)

# The daemons where this user waited in the time range, then those where a server of the user ran.
_SHOWN = (
    f"topk(10, max by ({shared.DAEMONS}) (max_over_time("
    f"mps_uid_waiting_clients{_MINE}[$__range] @ end())"
    f" or 0 * last_over_time(mps_server_info{_MINE}[$__range] @ end())))"
)

# All clients of all hosts are read at each point: 90 points of 1,000 hosts took 1.1 s.
TIMELINE = replace(
    timeline(
        "Who holds the GPUs that I use",
        "Healthy: no long orange, no red. A row for each user on each daemon that this "
        "user's programs use or wait for. Blue: clients are connected. Orange: they "
        "hang in cuInit behind the user whose row is blue. At most 10 daemons, those "
        "with waits first.",
        shared.user_rows(
            f"({shared.HOLDERS}) and on ({shared.DAEMONS}) (mps_server_info{_MINE}"
            f" or mps_uid_waiting_clients{_MINE} > 0)"
            f" and on ({shared.DAEMONS}) {_SHOWN}"
        ),
        Query(
            f"{shared.NOTHING} unless on () count(mps_server_info{_MINE}"
            f" or mps_uid_waiting_clients{_MINE} > 0) or {shared.UNREACHABLE}",
            "uid $uid",
        ),
        states=(*style.DAEMON_STATES[:1], *style.USER_STATES[:1], *style.HOLDER_STATES),
        height=10,
    ),
    points=70,
)

# All users; with a Slurm job or a pod chosen, its user: the other series lack that label.
_USERS = (
    '{__name__=~"mps_client_connections_total|mps_client_info|client:mps_client_info:pod",'
    ' job=~"$job", instance=~"$instance", slurm_job_id=~"$slurm_job_id", pod=~"$pod"}'
)

BOARD = Board(
    uid="mps-user",
    name="User",
    description="Why is my job waiting, what did I lose, and what did I get?",
    variables=(
        job(),
        replace(instance(), several=False),
        eventful(),
        Variable("slurm_job_id", "Slurm job", "mps_client_info", filters=False, several=False),
        Variable("pod", "Pod", "client:mps_client_info:pod", filters=False, several=False),
        Variable("uid", "User", _USERS, everything=False, filters=False, several=False),
    ),
    rows=(
        Row("Why is my job waiting?", (TILES, replace(BEHIND, height=6))),
        Row("Behind whom, and what comes next?", (WHERE, TIMELINE)),
        Row("What do I get?", (GOT,)),
        Row(
            "What did I lose, and when?",
            (
                events(
                    "Lost or refused, by cause",
                    "Healthy: empty. Programs that MPS took down or refused. neighbour_fault: "
                    "another client's pointer.",
                    Query(
                        new_in_step(f"mps_client_losses_total{_MINE}", "cause"), "lost: {{cause}}"
                    ),
                    Query(
                        new_in_step(f"mps_client_rejections_total{_MINE}", "cause"),
                        "refused: {{cause}}",
                    ),
                    overrides=CAUSES_ALIKE,
                    height=8,
                    none="No lost or refused program is known in this time range.",
                ),
                TO_WHOM,
            ),
            collapsed=True,
        ),
    ),
)
