from collections import Counter
from collections.abc import Hashable

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import DaemonFacts
from mps_exporter.sources.fairness import UserBudget, UserTokenBuckets
from mps_exporter.sources.processes import ProcessStatus

OWN, ALICE, BOB = 900, 2001, 2002


def process(user: int, parent: int) -> ProcessStatus:
    account = None if user in (0, OWN) else (user, None)
    return ProcessStatus(real_uid=user, parent_pid=parent, account=account)


def crowd(first: int, user: int, number: int = 100) -> dict[int, ProcessStatus]:
    """Processes of a user, children of init."""
    return {first + one: process(user, 1) for one in range(number)}


def test_all_processes_of_trusted_users_and_some_of_each_other_are_admitted() -> None:
    owners = crowd(1000, 0) | crowd(2000, OWN) | crowd(3000, ALICE) | crowd(4000, BOB)
    admitted, ignored = UserBudget().admit_processes(owners)
    most = policy.MAX_PROCESSES_PER_USER
    assert admitted == [
        *range(1000, 1100),
        *range(2000, 2100),
        *range(3000, 3000 + most),
        *range(4000, 4000 + most),
    ]
    assert ignored == {ALICE: 100 - most, BOB: 100 - most}


def test_servers_of_roots_daemon_are_admitted_for_every_user() -> None:
    """A server runs as its clients' user."""
    owners = crowd(100, ALICE) | {
        5000: process(0, 1),
        5001: process(ALICE, 5000),
        5002: process(ALICE, 5001),  # a fork of hers
    }
    admitted, _ = UserBudget().admit_processes(owners)
    assert [pid for pid in admitted if pid >= 5000] == [5000, 5001]


def test_an_admitted_process_stays() -> None:
    now = 0.0
    budget = UserBudget(lambda: now)
    first = crowd(9000, ALICE, policy.MAX_PROCESSES_PER_USER)
    budget.admit_processes(first)
    now += 3600.0
    assert budget.admit_processes(first | crowd(1, ALICE, 1000))[0] == sorted(first)


def test_new_processes_of_a_user_are_admitted_at_a_rate() -> None:
    """Programs with a daemon's name are started and ended by the dozen, each a new process."""
    now = 1000.0
    budget = UserBudget(lambda: now)

    def scan(number: int) -> tuple[Counter[int | None], Counter[int]]:
        """Scan after all processes but Bob's were replaced."""
        owners = crowd(1000 * number, ALICE, 20) | crowd(1000 * number + 100, 0, 20)
        owners |= crowd(5, BOB, 1)
        admitted, ignored = budget.admit_processes(owners)
        return Counter(owners[pid].real_uid for pid in admitted), ignored

    most = policy.MAX_PROCESSES_PER_USER
    assert scan(1) == ({ALICE: 20, 0: 20, BOB: 1}, {})
    assert scan(2) == ({ALICE: most - 20, 0: 20, BOB: 1}, {ALICE: 40 - most})
    assert scan(3) == ({0: 20, BOB: 1}, {ALICE: 20})
    now += 3.0 / policy.NEW_PROCESSES_PER_SECOND
    assert scan(4) == ({ALICE: 3, 0: 20, BOB: 1}, {ALICE: 17})
    assert scan(4) == ({ALICE: 3, 0: 20, BOB: 1}, {ALICE: 17})  # admitted processes stay
    now += 3600.0
    assert scan(5)[0] == {ALICE: 20, 0: 20, BOB: 1}


def test_all_users_together_have_a_limit_and_new_processes_a_rate() -> None:
    now = 1000.0
    budget = UserBudget(lambda: now)

    def scan(number: int) -> int:
        first = 10_000 * number
        owners = {pid: process(100_000 + pid, 1) for pid in range(first, first + 2000)}
        admitted, ignored = budget.admit_processes(owners)
        assert len(admitted) + ignored.total() == 2000
        return len(admitted)

    assert scan(1) == policy.MAX_PROCESSES, "a limit for all users together"
    assert scan(2) == 0
    now += 1.0
    assert scan(3) == policy.MAX_NEW_PROCESSES_PER_SECOND


def test_the_daemons_shown_have_a_limit_per_user_and_one_in_total() -> None:
    budget = UserBudget()
    shown = Counter[Hashable]()
    most = policy.MAX_DAEMONS_PER_USER

    def admitted(user: int, number: int) -> int:
        one = DaemonFacts("/x", "", owner_uid=user, limited=user not in (0, OWN))
        return sum(budget.admit_daemon(one, shown) for _ in range(number))

    assert (admitted(0, 100), admitted(OWN, 100), admitted(ALICE, 100)) == (100, 100, most)
    assert sum(admitted(3000 + user, 1) for user in range(100)) == policy.MAX_DAEMONS - most
    assert (admitted(BOB, 1), admitted(0, 1)) == (0, 1)


def test_a_token_bucket_survives_a_clock_that_is_set_back() -> None:
    buckets = UserTokenBuckets(2.0, 0.5)
    buckets.consume(ALICE, 3.0, 1000.0)
    assert buckets.available(ALICE, 1000.0) == -1.0
    assert buckets.available(ALICE, 10.0) == -1.0
    buckets.consume(BOB, 1.0, 10.0)
    assert buckets.available(ALICE, 12.0) == 0.0
    assert buckets.available(ALICE, 3600.0) == 2.0
    buckets.consume(BOB, 1.0, 3600.0)
    assert set(buckets._used) == {BOB}  # a full bucket is not kept
