"""Whose limits hold for a process: what the kernel shows decides, not the number of its user."""

import os
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.sources.processes import Account, Processes
from testing.fake_proc import ALL_CAPABILITIES, HOST_NAMESPACE, FakeProc

SYS_ADMIN = 1 << 21
DOCKER = 0xA80425FB  # What a container has by default.
OWN_NAMESPACE = {"namespace_pids": (7,), "pid_namespace": 4026532999}
CONTAINER = {**OWN_NAMESPACE, "mount": 90, "capabilities": DOCKER}
NONE_READABLE = {"pid_namespace": None}


@pytest.mark.parametrize(
    ("process", "account"),
    [
        pytest.param({"uid": 0}, None, id="root on the host"),
        pytest.param({"uid": 0, **NONE_READABLE}, None, id="root, for an exporter without rights"),
        pytest.param({"uid": 0, "mount": 90}, None, id="a unit with mounts of its own"),
        pytest.param({"uid": 0, "capabilities": 0}, None, id="a unit without capabilities"),
        pytest.param(
            {"uid": 0, **OWN_NAMESPACE, "mount": 90, "capabilities": ALL_CAPABILITIES},
            None,
            id="a privileged container: the device plugin's and DRA's daemons",
        ),
        pytest.param(
            {"uid": 0, "mount": 90, "capabilities": DOCKER | SYS_ADMIN},
            None,
            id="a container that administrates its host",
        ),
        pytest.param({"uid": 0, **CONTAINER}, (0, 4026532999), id="root of a container"),
        pytest.param(
            {"uid": 0, **CONTAINER, "pid_namespace": None}, (0, None), id="the same, without rights"
        ),
        pytest.param(
            {"uid": 0, "mount": 90, "capabilities": DOCKER},
            (0, HOST_NAMESPACE),
            id="root of a container with the host's PIDs",
        ),
        pytest.param(
            {"uid": 0, **OWN_NAMESPACE, "capabilities": 0},
            (0, 4026532999),
            id="root of a PID namespace with the host's mounts",
        ),
        pytest.param(
            {"uid": 0, "users": "         0          0      65536\n"},
            (0, HOST_NAMESPACE),
            id="root of a user namespace, with all capabilities there",
        ),
        pytest.param({"uid": 2001}, (2001, None), id="an ordinary user"),
        pytest.param(
            {"uid": 2001, **OWN_NAMESPACE, "capabilities": ALL_CAPABILITIES, "users": "0 2001 1\n"},
            (2001, None),
            id="an ordinary user in namespaces of theirs",
        ),
        pytest.param({"uid": 64730}, None, id="the exporter's user"),
        pytest.param({"uid": 64730, **CONTAINER}, (64730, None), id="a pod with that user"),
        pytest.param({"uid": 64730, **NONE_READABLE}, (64730, None), id="that user, not readable"),
    ],
)
def test_whose_limits_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: dict[str, Any], account: Account
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 64730)
    proc = FakeProc(tmp_path / "proc")
    proc.add(5, argv=["x"], **process)
    assert Processes(str(proc.root)).account(5) == account


def test_process_one_that_is_hidden_proves_nothing(tmp_path: Path) -> None:
    """The mount option hidepid, for an exporter that may see this process for another reason."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(5, argv=["x"], uid=0)
    proc.remove(1)
    assert Processes(str(proc.root)).account(5) == (0, HOST_NAMESPACE)


@pytest.mark.skipif(os.geteuid() != 0, reason="this process must be root's")
def test_this_process_is_roots() -> None:
    assert Processes().account(os.getpid()) is None
