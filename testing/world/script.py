"""What users and operators do in a simulated world: pure data, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

USERS = (1001, 1002, 1003)
STRANGER = 1004
"""A user without a daemon."""

Kind = Literal[
    "host",
    "start_daemon",
    "kill_daemon",
    "quit",
    "start_client",
    "end_client",
    "fault",
    "terminate",
    "kill_server",
    "stop_daemon",
    "stop_server",
    "forge",
    "hide_log",
    "truncate",
    "exhaust",
    "clock_step",
]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    at: float
    """Seconds after the world's start."""
    kind: Kind
    target: str
    """A daemon, "d" and its number, or one of its clients, "d0/c7"."""
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{self.at:8.3f} s  {self.kind} {self.target}{': ' if values else ''}{values}"


@dataclass(frozen=True)
class Theme:
    """What may happen in the world of a seed."""

    users: bool
    gpus: int
    daemons: int
    deaths: bool
    faults: bool
    operators: bool
    stops: bool
    hostile: bool
    logs: bool
    collisions: bool
    kernel_log: bool
    nvml: bool

    @classmethod
    def of(cls, seed: int) -> Theme:
        def chance(what: str, probability: float) -> bool:
            return Random(f"{seed}/theme/{what}").random() < probability

        gpus = Random(f"{seed}/theme/gpus").choice((1, 1, 2, 3))
        return cls(
            users=chance("users", 0.7),
            gpus=gpus,
            daemons=gpus if chance("daemons", 0.5) else 1,
            deaths=chance("deaths", 0.5),
            faults=chance("faults", 0.4),
            operators=chance("operators", 0.4),
            stops=chance("stops", 0.3),
            hostile=chance("hostile", 0.3),
            logs=chance("logs", 0.2),
            collisions=chance("collisions", 0.2),
            kernel_log=chance("kernel_log", 0.7),
            nvml=chance("nvml", 0.5),
        )


def generate(seed: int, minutes: float) -> tuple[Action, ...]:
    """Return the actions of a world; each client's are independent of all others."""
    theme = Theme.of(seed)
    host = {name: getattr(theme, name) for name in ("gpus", "kernel_log", "nvml", "collisions")}
    actions = [Action(0.0, "host", "host", host)]
    clock = Random(f"{seed}/clock")
    if clock.random() < 0.1:
        at, seconds = clock.uniform(0, minutes * 60), clock.choice((-300, -3, 3, 300, 3600))
        actions.append(Action(at, "clock_step", "host", {"seconds": seconds}))
    for number in range(theme.daemons):
        actions += _daemon(seed, theme, f"d{number}", minutes)
    return tuple(sorted(actions))


def _daemon(seed: int, theme: Theme, name: str, minutes: float) -> Iterator[Action]:
    """Yield the actions around one daemon: root's, or a user's own."""
    random = Random(f"{seed}/{name}")
    gpus = tuple(range(theme.gpus)) if theme.daemons == 1 else (int(name[1:]),)
    uid = 0 if name == "d0" or random.random() < 0.3 else random.choice(USERS)
    multiuser = uid == 0 and theme.users and random.random() < 0.2
    values: dict[str, Any]
    setting = {"uid": uid, "gpus": gpus, "multiuser": multiuser}
    yield Action(0.0, "start_daemon", name, setting)
    users = (uid, uid, uid, STRANGER) if uid else USERS if theme.users else (0,)
    for number in range(round(minutes * random.uniform(0.5, 6.0) / theme.daemons)):
        yield from _client(seed, theme, f"{name}/c{number}", minutes, users, len(gpus))
    crowd = Random(f"{seed}/{name}/crowd")
    if crowd.random() < 0.04:
        begin = crowd.uniform(0, minutes * 60)
        for number in range(900, 955):
            start = begin + crowd.random()
            values = {"uid": users[0], "gpus": (0,)}
            yield Action(start, "start_client", f"{name}/c{number}", values)
            yield Action(start + crowd.uniform(10, 30), "end_client", f"{name}/c{number}")
    for kind, moments in _moments(seed, theme, name, uid, minutes):
        for number, at in enumerate(moments):
            chosen = Random(f"{seed}/{name}/{kind}/{number}")
            values = {"seconds": chosen.randint(3, 30)}
            if kind in ("hide_log", "truncate"):
                values["log"] = chosen.choice(("control", "server"))
            yield Action(at, kind, name, values)
            if kind in ("quit", "kill_daemon"):
                yield Action(at + chosen.uniform(5.0, 60.0), "start_daemon", name, setting)


def _moments(
    seed: int, theme: Theme, name: str, uid: int, minutes: float
) -> Iterator[tuple[Kind, list[float]]]:
    """Yield when something is done to a daemon, its server or its logs."""
    kinds: tuple[tuple[bool, Kind, int], ...] = (
        (theme.deaths, "kill_server", 2),
        (theme.operators, "quit", 1),
        (theme.operators, "kill_daemon", 1),
        (theme.stops, "stop_daemon", 1),
        (theme.stops, "stop_server", 1),
        (theme.hostile and uid != 0, "forge", 3),
        (theme.logs, "hide_log", 1),
        (theme.logs, "truncate", 2),
        (theme.stops, "exhaust", 2),
    )
    for wanted, kind, most in kinds:
        random = Random(f"{seed}/{name}/{kind}")
        if wanted:
            moments = range(random.randint(0, most))
            yield kind, [random.uniform(0, minutes * 60) for _ in moments]


def _client(
    seed: int, theme: Theme, name: str, minutes: float, users: tuple[int, ...], gpus: int
) -> Iterator[Action]:
    random = Random(f"{seed}/{name}")
    start = random.uniform(1.0, minutes * 60)
    values: dict[str, Any] = {"uid": random.choice(users), "busy": random.random() < 0.7}
    if theme.faults or random.random() < 0.7:
        values["gpus"] = (random.randrange(gpus),)
    if random.random() < 0.1:
        values["percentage"] = random.choice((10.0, 25.0, 50.0))
    if random.random() < 0.05:
        values["pid_of"] = f"{name.partition('/')[0]}/c{random.randrange(20)}"
    if theme.faults and random.random() < 0.05:
        values["fork_of"] = f"{name.partition('/')[0]}/c{random.randrange(20)}"
    end = start + random.uniform(1.0, 60.0)
    yield Action(start, "start_client", name, values)
    if theme.faults and random.random() < 0.2:
        pointer = random.choice(("overrun", "overrun", "null", "wild"))
        yield Action(random.uniform(start, end), "fault", name, {"pointer": pointer})
    if theme.operators and random.random() < 0.1:
        yield Action(random.uniform(start, end), "terminate", name)
    how = random.choice(("exit", "SIGTERM", "SIGKILL")) if theme.deaths else "exit"
    work = theme.faults and random.random() < 0.2
    yield Action(end, "end_client", name, {"how": how, "work": work})
