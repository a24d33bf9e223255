from __future__ import annotations

from collections import Counter

from mps_exporter.sources.fair_share import (
    MAX_NEW_PROGRAMS_PER_SECOND,
    MAX_PROGRAMS,
    MAX_PROGRAMS_PER_USER,
    NEW_PROGRAMS_PER_SECOND,
    Allowances,
    FairShare,
)

OWN, ALICE, BOB = 900, 2001, 2002


class Table:
    """Processes, and how often each was looked at."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int | None, int | None]] = {}
        self.looks = 0

    def start(self, pid: int, user: int | None, parent: int = 1) -> None:
        self.rows[pid] = user, parent

    def look(self, pid: int) -> tuple[int | None, int | None]:
        self.looks += 1
        return self.rows[pid]


def test_roots_and_our_own_are_all_looked_at_and_some_of_each_other() -> None:
    table = Table()
    for number in range(100):
        table.start(1000 + number, 0)
        table.start(2000 + number, OWN)
        table.start(3000 + number, ALICE)
        table.start(4000 + number, BOB)
    chosen, left_out = FairShare(OWN).choose(sorted(table.rows), table.look)
    assert [pid for pid in chosen if pid < 3000] == [*range(1000, 1100), *range(2000, 2100)]
    assert [pid for pid in chosen if pid >= 3000] == [
        *range(3000, 3000 + MAX_PROGRAMS_PER_USER),
        *range(4000, 4000 + MAX_PROGRAMS_PER_USER),
    ]
    assert left_out == {ALICE: 100 - MAX_PROGRAMS_PER_USER, BOB: 100 - MAX_PROGRAMS_PER_USER}


def test_servers_of_roots_daemon_are_looked_at_whoever_they_serve() -> None:
    """A server runs as its clients' user."""
    table = Table()
    for number in range(100):
        table.start(100 + number, ALICE)
    table.start(5000, 0)
    table.start(5001, ALICE, parent=5000)
    table.start(5002, ALICE, parent=5001)  # she forks from it
    chosen, _ = FairShare(OWN).choose(sorted(table.rows), table.look)
    assert [pid for pid in chosen if pid >= 5000] == [5000, 5001]


def test_who_was_chosen_stays() -> None:
    table, share = Table(), FairShare(OWN)
    table.start(9000, ALICE)
    share.choose([9000], table.look)
    for pid in range(1, 1001):
        table.start(pid, ALICE)
    chosen, _ = share.choose(sorted(table.rows), table.look)
    assert 9000 in chosen


def test_a_crowd_is_looked_at_once() -> None:
    table, share = Table(), FairShare(OWN)
    for pid in range(1000):
        table.start(pid, ALICE)
    share.choose(sorted(table.rows), table.look)
    assert table.looks == 1000
    for _ in range(16):
        share.choose(sorted(table.rows), table.look)
    assert table.looks <= 2000 + 1000 // 16


def test_all_users_together_have_a_bound() -> None:
    table = Table()
    for pid in range(2000):
        table.start(pid, 100_000 + pid)  # subordinate users
    chosen, left_out = FairShare(OWN).choose(sorted(table.rows), table.look)
    assert len(chosen) == 512
    assert left_out.total() == 2000 - 512


def test_new_processes_of_a_user_are_looked_at_one_after_the_other() -> None:
    """Programs called like a daemon are started and ended by the dozen, each a new process."""
    now = 1000.0
    table, share = Table(), FairShare(OWN, lambda: now)

    def listing(number: int) -> tuple[Counter[int | None], Counter[int]]:
        """All of theirs are other processes than before."""
        table.rows.clear()
        for one in range(20):
            table.start(1000 * number + one, ALICE)
            table.start(1000 * number + 100 + one, 0)
        table.start(5, BOB)
        chosen, left_out = share.choose(sorted(table.rows), table.look)
        return Counter(table.rows[pid][0] for pid in chosen), left_out

    assert listing(1) == ({ALICE: 20, 0: 20, BOB: 1}, {})
    assert listing(2) == (
        {ALICE: MAX_PROGRAMS_PER_USER - 20, 0: 20, BOB: 1},
        {ALICE: 40 - MAX_PROGRAMS_PER_USER},
    )
    assert listing(3) == ({0: 20, BOB: 1}, {ALICE: 20})
    now += 3.0 / NEW_PROGRAMS_PER_SECOND
    assert listing(4) == ({ALICE: 3, 0: 20, BOB: 1}, {ALICE: 17})
    assert listing(4) == ({ALICE: 3, 0: 20, BOB: 1}, {ALICE: 17})  # what was chosen stays
    now += 3600.0
    assert listing(5)[0] == {ALICE: 20, 0: 20, BOB: 1}


def test_new_processes_of_all_users_together() -> None:
    """One who has many UIDs, as with /etc/subuid."""
    now = 1000.0
    table, share = Table(), FairShare(OWN, lambda: now)

    def listing(number: int) -> int:
        table.rows.clear()
        for one in range(MAX_PROGRAMS):
            table.start(10_000 * number + one, 100_000 + 10_000 * number + one)
        return len(share.choose(sorted(table.rows), table.look)[0])

    assert listing(1) == MAX_PROGRAMS
    assert listing(2) == 0
    now += 1.0
    assert listing(3) == MAX_NEW_PROGRAMS_PER_SECOND


def test_an_allowance_survives_a_clock_that_is_set_back() -> None:
    allowances = Allowances(2.0, 0.5)
    allowances.use(ALICE, 3.0, 1000.0)
    assert allowances.left(ALICE, 1000.0) == -1.0
    assert allowances.left(ALICE, 10.0) == -1.0
    allowances.use(BOB, 1.0, 10.0)
    assert allowances.left(ALICE, 12.0) == 0.0
    assert allowances.left(ALICE, 3600.0) == 2.0
    allowances.use(BOB, 1.0, 3600.0)
    assert set(allowances._used) == {BOB}  # nothing is kept of those who have all of it
