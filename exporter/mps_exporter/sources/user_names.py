"""Names of users, from a file like /etc/passwd and, on the host itself, its directory services."""

import pwd
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mps_exporter import limits_timeouts_intervals as policy

HOST_USERS = "/etc/passwd"


class PasswdNames:
    """Names in a file like /etc/passwd; for the host's, also in directory services."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._names: dict[int, str | None] = {}
        self._read_at = float("-inf")

    def name_of(self, uid: int | None) -> str | None:
        if uid is None:
            return None
        if self._clock() - self._read_at >= policy.PROCESS_REFRESH_INTERVAL_SECONDS:
            with suppress(OSError), Path(self._path).open("rb") as file:
                self._names = {**parse_passwd(file.read(policy.MAX_PROC_FILE_BYTES))}
            self._read_at = self._clock()
        if uid not in self._names:
            self._names[uid] = None
            if self._path == HOST_USERS:
                with suppress(KeyError, OverflowError):
                    self._names[uid] = pwd.getpwuid(uid).pw_name
        return self._names[uid]


def parse_passwd(raw: bytes) -> dict[int, str]:
    """Parse /etc/passwd: user ID -> name. If an ID is listed twice, the first name wins."""
    names: dict[int, str] = {}
    for line in raw.split(b"\n"):
        fields = line.split(b":")
        if len(fields) >= 3 and re.fullmatch(rb"\d{1,10}", fields[2]) and fields[0]:
            names.setdefault(int(fields[2]), fields[0].decode("utf-8", "backslashreplace"))
    return names
