"""What keeps the process small."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest


def test_large_blocks_stay_outside_a_full_heap() -> None:
    """One block proves nothing: the heap may have room for it."""
    code = """
import ctypes, sys
from mps_exporter.cli import configure_malloc
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if sys.argv[1] == "configured":
    configure_malloc()
larger = bytes(1 << 20)
del larger  # by default blocks of this size are in the heap from now on
before = libc.mallinfo2().hblks
large = [bytes(100_000) for _ in range(40)]
print(libc.mallinfo2().hblks - before)
"""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    environment.pop("GLIBC_TUNABLES", None)
    mapped = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", code, how],
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for how in ("configured", "default")
    }
    assert mapped["configured"] >= 30
    assert mapped["default"] == 0
