import tracemalloc
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.sources.daemon_programs_and_directories import (
    parse_control_sockets,
    parse_daemon_flags,
)
from mps_exporter.sources.processes import (
    ProcessStat,
    ProcessStatus,
    find_limiter,
    parse_arguments,
    parse_mountinfo,
    parse_mps_environment,
    parse_passwd,
    parse_stat,
    parse_status,
)

TAIL = b" S 1 413 413 0 -1 4194368 94 0 0 0 0 0 0 0 20 0 2 0 2140 8738541568 516"


@pytest.mark.parametrize("comm", [b"a b", b")) R 1 (x", b"a\nb", b"\xff", b""])
def test_stat_whatever_the_name(comm: bytes) -> None:
    name = comm.decode(errors="backslashreplace")
    assert parse_stat(b"413 (" + comm + b")" + TAIL + b"\n") == ProcessStat(name, "S", 1, 2140)


@pytest.mark.parametrize(
    "raw", [b"", b"413 (x", b")(", b"413 (x) S 1 2", b"413 (x) S a" + b" 1" * 30]
)
def test_what_is_no_stat(raw: bytes) -> None:
    assert parse_stat(raw) is None


def test_status_has_the_effective_user() -> None:
    raw = (
        b"PPid:\t7\nUid:\t1000\t1001\t1000\t1000\nGid:\t5\t5\t5\t5\nNSpid:\t443\t3\nGroups:\t8 9\n"
    )
    groups = frozenset({5}), frozenset({8, 9})
    assert parse_status(raw) == ProcessStatus(1001, (443, 3), 7, 1000, True, *groups)
    assert not parse_status(raw.replace(b"1001", b"1000")).several_uids


def test_arguments() -> None:
    assert parse_arguments(b"nvidia-cuda-mps-control\0-d\0") == ("nvidia-cuda-mps-control", "-d")
    assert parse_arguments(b"a\0\0b\0") == ("a", "", "b")
    assert parse_arguments(b"\xff\0") == ("\\xff",)
    assert parse_arguments(b"") == ()


def test_of_the_environment_only_what_concerns_mps() -> None:
    raw = (
        b"HOME=/root\0AWS_SECRET=x\0CUDA_MPS_PIPE_DIRECTORY=/tmp/mps\0CUDA_VISIBLE_DEVICES=0\0"
        b"CUDA_HOME=/usr\0CUDA_DEVICE_MAX_CONNECTIONS=8\0CUDA_MPS_X=a=b\0CUDA_MPS_X=later\0"
        b"CUDA_MPS_BROKEN\0CUDA_MPS_BYTES=\xff\0CUDA_MPS_EMPTY=\0"
    )
    assert parse_mps_environment(raw) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "CUDA_MPS_X": "a=b",
        "CUDA_MPS_BYTES": "\\xff",
        "CUDA_MPS_EMPTY": "",
    }


def test_the_mounts_that_decide_about_mps() -> None:
    row = b"53 31 0:%d / %s rw,nosuid shared:4 - tmpfs shm rw\n"
    raw = row % (25, b"/dev/shm") + row % (26, b"/dev/shm/x") + row % (27, b"/dev/shm")
    assert parse_mountinfo(raw + b"broken\n") == ("0:27", False), "the last mount hides others"
    assert parse_mountinfo(row % (5, b"/tmp/nvidia-mps")) == ("", True)


@pytest.mark.parametrize(
    ("environment", "mounts", "name"),
    [
        (b"A=b\0LD_PRELOAD=libnvshare.so\0", b"", "nvshare"),
        (b"LD_PRELOAD=/x.so:/opt/libshimcuda.so\0", b"", "xsched"),
        (b"", b"9 8 0:1 /a/libvgpu.so /usr/local/vgpu/libvgpu.so ro - ext4 x rw\n", "HAMi-core"),
        (b"LIBRARY=/libvgpu.so\0LD_PRELOAD=/libvgpu.socket\0", b"", ""),
    ],
)
def test_the_limiter_of_a_process(environment: bytes, mounts: bytes, name: str) -> None:
    assert find_limiter(environment, mounts) == name


@pytest.mark.parametrize("word", [b"", b"ab", b"CUDA_=", b"CUDA_MPS_A=", b"LD_PRELOAD="])
def test_an_environment_of_many_words_takes_no_memory(word: bytes) -> None:
    raw = (word + b"\0") * 1_000_000
    tracemalloc.start()
    parse_mps_environment(raw)
    find_limiter(raw, b"")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_control_sockets() -> None:
    raw = b"""Num       RefCount Protocol Flags    Type St Inode Path
00000000015d0055: 00000002 00000000 00010000 0005 01 15372 /tmp/labmps/control_privileged
000000007c3edf94: 00000002 00000000 00010000 0005 01 15373 /tmp/labmps/control
000000007c3edf95: 00000003 00000000 00000000 0005 03 15374 /tmp/labmps/control
000000007c3edf96: 00000002 00000000 00010000 0005 01 15375 /run/with blank/control
000000007c3edf97: 00000002 00000000 00010000 0001 01 15376 /run/stream/control
000000007c3edf98: 00000002 00000000 00010000 0005 01 15377 @abstract/control
000000007c3edf99: 00000002 00000000 00010000 0005 01 15378
"""
    assert list(parse_control_sockets(BytesIO(raw))) == ["/tmp/labmps", "/run/with blank"]


def test_users() -> None:
    raw = b"root:x:0:0:root:/root:/bin/sh\n\n#\nbad:x:y:1\nann:x:1001:1\nbea:x:1001:1\n:x:5:1\n"
    assert parse_passwd(raw) == {0: "root", 1001: "ann"}


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["--daemon"], {"daemon"}),
        (["--forground"], {"daemon", "foreground"}),
        (["-dM"], {"daemon", "multiuser"}),
        (["-f", "-S"], {"daemon", "foreground", "static_partitioning"}),
        (["-d", "--static-partitioning"], {"daemon", "static_partitioning"}),
        (["-multiuser-server"], {"multiuser"}),
        (["set_default_device_pinned_mem_limit", "0", "3G"], set()),
    ],
)
def test_flags_of_the_daemon(arguments: list[str], flags: set[str]) -> None:
    assert parse_daemon_flags(("nvidia-cuda-mps-control", *arguments)) == flags


@given(st.binary())
def test_no_bytes_are_too_strange(raw: bytes) -> None:
    parse_stat(raw)
    parse_status(raw)
    parse_arguments(raw)
    parse_mps_environment(raw)
    list(parse_control_sockets(BytesIO(raw)))
    parse_passwd(raw)
