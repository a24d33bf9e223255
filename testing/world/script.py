"""What users and operators do in a simulated world: pure data, made from a seed."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from testing.mps_logs import PIPE

USERS = (1001, 1002, 1003)
STRANGER = 1004  # A user without a daemon.

Kind = Literal[
    "host",
    "start_daemon",
    "kill_daemon",
    "quit",
    "start_client",
    "start_direct",
    "end_direct",
    "end_client",
    "fault",
    "terminate",
    "halt",
    "kill_server",
    "stop_daemon",
    "stop_server",
    "forge",
    "hide_log",
    "truncate",
    "rename",
    "exhaust",
    "clock_step",
    "lose_gpu",
    "xid",
]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    at: float  # Seconds after the world's start.
    kind: Kind
    target: str
    """A daemon, "d" and its number, or one of its clients, "d0/c7"."""
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{self.at:8.3f} s  {self.kind} {self.target}{': ' if values else ''}{values}"


THEMES = {
    "users": 0.7,
    "daemons": 0.5,
    "deaths": 0.5,
    "faults": 0.4,
    "operators": 0.4,
    "stops": 0.3,
    "hostile": 0.3,
    "logs": 0.2,
    "collisions": 0.2,
    "kernel_log": 0.7,
    "nvml": 0.5,
    "mps_v3": 0.12,
    "direct": 0.4,
    "gpus": 0.4,
}
"""Theme -> share of the worlds that have it."""
XIDS = (
    "43, pid=77, name=-, Ch 00000008",
    "13, pid='<unknown>', name=<unknown>, Graphics Exception: ESR 0x404490=0x80000001",
    "31, pid=77, name=-, channel 0x0000000e, intr 00000000. MMU Fault: ENGINE GRAPHICS "
    "GPC5 GPCCLIENT_T1_11 faulted @ 0x7f12_34567000. Fault is of type FAULT_PDE "
    "ACCESS_TYPE_VIRT_WRITE",
    "31",
)
"""Lines of the kernel log about no MPS client."""
OF_DAEMONS: tuple[tuple[Kind, str, int], ...] = (
    ("kill_server", "deaths", 2),
    ("quit", "operators", 1),
    ("kill_daemon", "operators", 1),
    ("stop_daemon", "stops", 1),
    ("stop_server", "stops", 1),
    ("forge", "hostile", 3),
    ("hide_log", "logs", 1),
    ("truncate", "logs", 2),
    ("rename", "logs", 1),
    ("exhaust", "stops", 2),
)
"""What is done to a daemon, its server or its logs; the theme; the most times in a world."""


@dataclass(frozen=True)
class Plan:
    """The world of a seed: a random number depends on what it is for, and on no other."""

    seed: int
    minutes: float

    def random(self, *what: object) -> Random:
        return Random("/".join(map(str, (self.seed, *what))))

    def has(self, theme: str) -> bool:
        return self.random("theme", theme).random() < THEMES[theme]

    def moment(self, random: Random, least: float = 0) -> float:
        return random.uniform(least, self.minutes * 60)


def generate(seed: int, minutes: float, pace: float = 1.0) -> tuple[Action, ...]:
    """Return the actions of a world, at this pace; each client's are independent of all others."""
    plan = Plan(seed, minutes * pace)
    gpus = plan.random("theme", "gpus").choice((1, 1, 2, 3))
    sight = {name: plan.has(name) for name in ("kernel_log", "nvml", "collisions")}
    actions = [Action(0.0, "host", "host", {"gpus": gpus, **sight})]
    clock = plan.random("clock")
    if clock.random() < 0.1:
        at, seconds = plan.moment(clock), clock.choice((-300, -3, 3, 300, 3600))
        actions.append(Action(at, "clock_step", "host", {"seconds": seconds}))
    for kind in ("lose_gpu", "xid") if plan.has("gpus") else ():
        random = plan.random(kind)
        for _ in range(random.randint(1, 2)):
            values = {"gpu": random.randrange(gpus), "seconds": random.randint(10, 60)}
            text = {"text": random.choice(XIDS)} if kind == "xid" else {}
            actions.append(Action(plan.moment(random), kind, "host", {**values, **text}))
    daemons = gpus if plan.has("daemons") and not plan.has("mps_v3") else 1
    for number in range(daemons):
        actions += _daemon(plan, number, (number,) if daemons > 1 else tuple(range(gpus)), daemons)
    if plan.has("direct"):
        for number in range(round(plan.minutes)):
            actions += _direct(plan, number, gpus)
    return tuple(sorted(replace(one, at=one.at / pace) for one in actions))


def _direct(plan: Plan, number: int, gpus: int) -> Iterator[Action]:
    """Yield a process without MPS, which may name a daemon's directory, or another one."""
    name, start = f"x{number}", plan.moment(random := plan.random("x", number))
    values = {
        "uid": random.choice((*USERS, STRANGER)),
        "gpu": random.randrange(gpus),
        "directory": random.choice((None, PIPE, f"{PIPE}-1", "/tmp/none", "/tmp/closed/mps")),
    }
    yield Action(start, "start_direct", name, values)
    yield Action(start + random.uniform(5.0, 120.0), "end_direct", name)


def _daemon(plan: Plan, number: int, gpus: tuple[int, ...], daemons: int) -> Iterator[Action]:
    """Yield the actions around one daemon: root's, or a user's own."""
    name = f"d{number}"
    random = plan.random(name)
    uid = 0 if number == 0 or random.random() < 0.3 else random.choice(USERS)
    v3 = plan.has("mps_v3")
    multiuser = uid == 0 and not v3 and plan.has("users") and random.random() < 0.2
    setting = {"uid": uid, "gpus": gpus, "multiuser": multiuser, "v3": v3}
    setting["contained"] = not (uid or v3) and plan.random(name, "contained").random() < 0.1
    default = plan.random(name, "default")
    setting["percentage"] = default.choice((100.0, 100.0, 60.0))
    setting["limits"] = default.choice(({}, {"0": "1G"}))
    yield Action(0.0, "start_daemon", name, setting)
    users = (uid, uid, uid, STRANGER) if uid else USERS if plan.has("users") else (0,)
    for client in range(round(plan.minutes * random.uniform(0.5, 6.0) / daemons)):
        yield from _client(plan, f"{name}/c{client}", users, len(gpus))
    crowd = plan.random(name, "crowd")
    if crowd.random() < 0.04:
        yield from _crowd(crowd, plan.moment(crowd), name, users[0])
    for kind, theme, most in OF_DAEMONS:
        random = plan.random(name, kind)
        if not plan.has(theme) or (kind == "forge" and uid == 0):
            continue
        moments = [plan.moment(random) for _ in range(random.randint(0, most))]
        for count, at in enumerate(moments):
            chosen = plan.random(name, kind, count)
            values: dict[str, Any] = {"seconds": chosen.randint(3, 30), "how": chosen.choice("Tt")}
            if kind in ("hide_log", "truncate", "rename"):
                values["log"] = chosen.choice(("control", "server"))
            yield Action(at, kind, name, values)
            if kind in ("quit", "kill_daemon"):
                yield Action(at + chosen.uniform(5.0, 60.0), "start_daemon", name, setting)


def _crowd(random: Random, begin: float, daemon: str, uid: int) -> Iterator[Action]:
    """Yield more clients on one GPU than MPS serves."""
    for number in range(900, 955):
        start = begin + random.random()
        name = f"{daemon}/c{number}"
        yield Action(start, "start_client", name, {"uid": uid, "gpus": (0,)})
        yield Action(start + random.uniform(10, 30), "end_client", name)


def _client(plan: Plan, name: str, users: tuple[int, ...], gpus: int) -> Iterator[Action]:
    random, faults = plan.random(name), plan.has("faults")
    start = plan.moment(random, least=1.0)
    other = f"{name.partition('/')[0]}/c"
    values: dict[str, Any] = {"uid": random.choice(users), "busy": random.random() < 0.7}
    if faults or random.random() < 0.7:
        values["gpus"] = (random.randrange(gpus),)
    if random.random() < 0.05:
        values["pid_of"] = f"{other}{random.randrange(20)}"
    if faults and random.random() < 0.05:
        values["fork_of"] = f"{other}{random.randrange(20)}"
    end = start + random.uniform(1.0, 60.0)
    yield Action(start, "start_client", name, values)
    if faults and random.random() < 0.2:
        pointer = random.choice(("overrun", "overrun", "null", "wild"))
        yield Action(random.uniform(start, end), "fault", name, {"pointer": pointer})
    if plan.has("operators") and random.random() < 0.1:
        yield Action(random.uniform(start, end), "terminate", name)
    halts = plan.random(name, "halts")
    if plan.has("stops") and halts.random() < 0.4:
        ways = {"how": halts.choice(("T", "t", "frozen")), "seconds": halts.randint(5, 60)}
        yield Action(halts.uniform(start, end), "halt", name, ways)
    how = random.choice(("exit", "SIGTERM", "SIGKILL")) if plan.has("deaths") else "exit"
    work = faults and random.random() < 0.2
    yield Action(end, "end_client", name, {"how": how, "work": work})


Fails = Callable[[Sequence[Action]], Awaitable[bool]]


async def shrink(actions: Sequence[Action], fails: Fails) -> tuple[Action, ...]:
    """Return the shortest actions that still fail: remove halves, quarters ... single actions.

    Every delay of a world depends on its own entity only, so the rest of the history stays.
    """
    kept = list(actions)
    size = max(len(kept) // 2, 1)
    while True:
        removed = False
        for begin in range(len(kept) - size, -1, -size):
            fewer = kept[:begin] + kept[begin + size :]
            if await fails(fewer):
                kept, removed = fewer, True
        if size == 1 and not removed:
            return tuple(kept)
        size = max(size // 2, 1)
