"""What becomes of the rows of a dead process before their leases end, with simulated processes.

An instant is a microsecond, so a claim half a second later is at `now + 500_000`. Leases are of
a minute unless a test says otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stories import new_job as new, writer
from test_sqlite import Lock, Spies, add, fails_at

import trio_jobs
from trio_jobs import StoreError, _lifecycle
from trio_jobs._drivers import Driver
from trio_jobs._identity import Process
from trio_jobs._lifecycle import WORKER_LOST, Returned
from trio_jobs._model import Claim, Claimed, ClaimedJob, Policy, Row, State
from trio_jobs._owners import LOOK_EVERY, Owners
from trio_jobs.sqlite import SqliteStore

POLICY = Policy(attempts=3, on_interrupt="retry", wait=lambda id, attempt: 10)
LEASE = 60_000_000


class World:
    """Processes on one file, which die when they are told to."""

    def __init__(self, path: Path, driver: Driver) -> None:
        self.path = path
        self.driver = driver
        self.dead: set[int] = set()
        self.questions: list[int] = []
        self.stores: list[SqliteStore] = []
        self._pids = itertools.count(1000)

    def process(self, *, pid: int | None = None, place: str = "here") -> SqliteStore:
        """A store that a process has open; a new process unless a pid is given."""
        store = SqliteStore(self.path, driver=self.driver, synchronous="normal")
        me = Process(place, next(self._pids) if pid is None else pid, started=7)
        store.this_process = lambda: me
        store.is_dead = self.is_dead
        store.open()
        self.stores.append(store)
        return store

    def is_dead(self, process: Process, here: Process) -> bool:
        self.questions.append(process.pid)
        return process.place == here.place and process.pid in self.dead

    def kill(self, store: SqliteStore) -> None:
        """Nothing more is heard of it."""
        me = store.this_process()
        assert me is not None
        self.dead.add(me.pid)
        store.this_process = lambda: None
        store._owners = Owners(None, self.is_dead)  # nobody takes its row away
        store.close()

    def owners(self) -> list[int]:
        return self.ask("SELECT id FROM trio_jobs_owner ORDER BY id")

    def ask(self, sql: str) -> list[Any]:
        with contextlib.closing(self.connect()) as connection:
            return [value for (value,) in connection.execute(sql)]

    def connect(self) -> Any:
        if self.driver == "apsw":
            import apsw

            return apsw.Connection(str(self.path))
        import sqlite3

        return sqlite3.connect(self.path, isolation_level=None)


@pytest.fixture(params=["sqlite3", "apsw"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "app.db", request.param)
    yield world
    for store in world.stores:
        store.close()


def a_claim(now: int = 100, **fields: Any) -> Claim:
    defaults: dict[str, Any] = {
        "policies": {"mail": POLICY},
        "limit": 100,
        "lost_limit": 100,
        "lease_now": now,
        "lease_until": now + LEASE,
    }
    return Claim(now=now, **{**defaults, **fields})


def claim(store: SqliteStore, now: int = 100, **fields: Any) -> Claimed:
    with store.transaction():
        return store.claim(a_claim(now, **fields))


def end(store: SqliteStore, *rows: Row) -> None:
    with store.transaction():
        changes = [_lifecycle.ended(row, Returned(b"1"), POLICY, 100) for row in rows]
        assert store.apply(changes) == [None] * len(changes)


def ids(claimed: Claimed) -> list[int]:
    return [job.row.id for job in claimed.jobs]


# What is lost.


def test_what_a_dead_process_had_in_hand_starts_again_before_its_lease_ends(world: World) -> None:
    a, b = world.process(), world.process()
    add(b, new())
    [job] = claim(a).jobs
    world.kill(a)

    [again] = claim(b, now=200).jobs

    assert again.taken_up
    assert (again.row.id, again.row.attempt, again.row.claims) == (job.row.id, 2, 2)
    assert (again.was.failure, again.row.lease_until) == (WORKER_LOST, 200 + LEASE)
    history = b.history(job.row.id)
    assert history is not None
    assert [(past.outcome, past.ended_at) for past in history] == [("lost", 200)]


def test_what_a_living_process_has_in_hand_is_left_until_its_lease_ends(world: World) -> None:
    a, b = world.process(), world.process()
    add(b, new())
    [job] = claim(a).jobs

    early, late = claim(b, now=LEASE), claim(b, now=100 + LEASE)

    assert (early.jobs, early.settled, early.next_due) == ([], [], 100 + LEASE)
    assert ids(late) == [job.row.id]


def test_of_a_process_in_another_place_only_the_lease_counts(world: World) -> None:
    a, b = world.process(place="there"), world.process()
    add(b, new())
    claim(a)
    world.kill(a)

    assert claim(b, now=LEASE).jobs == []
    assert len(claim(b, now=100 + LEASE).jobs) == 1


@pytest.mark.parametrize("who", ["the one that died", "the one that looks"])
def test_where_processes_cannot_be_told_apart_only_the_lease_counts(world: World, who: str) -> None:
    a, b = world.process(), world.process()
    unknown = a if who == "the one that died" else b
    unknown.close()
    unknown.this_process = lambda: None
    unknown.open()
    add(b, new())
    claim(a)
    world.dead.add(1000)

    assert claim(b, now=LEASE).jobs == []
    assert len(claim(b, now=100 + LEASE).jobs) == 1
    assert (world.questions == []) or who == "the one that died"


def test_two_stores_of_one_process_leave_each_other_alone(world: World) -> None:
    first, second = world.process(pid=1), world.process(pid=1)
    add(first, new(), new())

    one, other = claim(first, limit=1), claim(second, limit=1)
    again = claim(first, now=1_000_000), claim(second, now=1_000_000)

    assert (ids(one), ids(other)) == ([1], [2])
    assert [claimed.jobs for claimed in again] == [[], []]
    assert world.owners() == [1, 2]
    assert world.questions == []
    world.kill(first)
    world.kill(second)
    assert ids(claim(world.process())) == [1, 2]


@pytest.mark.parametrize("limit", [0, 5])
def test_losses_that_end_a_job_end_it_at_once(world: World, limit: int) -> None:
    a, b = world.process(), world.process()
    policies = {
        "fail": Policy(attempts=3, on_interrupt="fail", wait=POLICY.wait),
        "dead": Policy(attempts=1, on_interrupt="retry", wait=POLICY.wait),
    }
    add(b, new("fail"), new("dead"), new("mail"))
    claim(a, policies=policies)
    world.kill(a)

    claimed = claim(b, now=200, policies=policies, limit=limit, lost_limit=0)

    assert claimed.jobs == []
    assert {change.after.kind: change.after.state for change in claimed.settled} == {
        "fail": State.FAILED,
        "dead": State.DEAD,
    }


def test_any_runner_ends_what_its_deadline_or_cancel_ends(world: World) -> None:
    a, b = world.process(), world.process()
    add(b, new(deadline=1000), new(deadline=2000), new(), new())
    rows = [job.row for job in claim(a).jobs]
    cancelled = _lifecycle.cancelled(rows[2], 200)
    assert cancelled is not None
    with b.transaction():
        b.apply([cancelled])
    world.kill(a)

    first = claim(b, now=1000, policies={"sms": POLICY})
    second = claim(b, now=2000, policies={"sms": POLICY})

    assert {change.after.id: change.after.state for change in first.settled} == {
        rows[0].id: State.FAILED,
        rows[2].id: State.CANCELLED,
    }
    assert (first.next_due, first.lost_waiting) == (2000, False)
    assert [change.after.id for change in second.settled] == [rows[1].id]
    assert second.next_due is None
    assert b.get(rows[3].id) == rows[3]


def test_a_running_row_whose_process_is_gone_is_told_from_others_by_its_fence(
    world: World,
) -> None:
    a, b = world.process(), world.process()
    add(b, *[new() for _ in range(4)])
    [lost, again, ended] = [job.row for job in claim(a, limit=3).jobs]
    end(a, ended)
    [own] = [job.row for job in claim(b, limit=1).jobs]
    living = b.is_owner_dead(lost.fence)
    world.kill(a)
    world.questions.clear()

    assert not living
    assert [b.is_owner_dead(row.fence) for row in (lost, again, ended, own)] == [
        True, True, False, False
    ]  # fmt: skip
    assert world.questions == [1000, 1000]
    assert not b.is_owner_dead((lost.id, lost.claims + 1))
    assert not b.is_owner_dead((99, 1))


def test_a_process_elsewhere_or_unknown_is_never_known_to_be_gone(world: World) -> None:
    unknown, elsewhere, b = world.process(), world.process(place="there"), world.process()
    unknown._owners = Owners(None, world.is_dead)
    add(b, new(), new("sms"))
    rows = [*claim(unknown).jobs, *claim(elsewhere, policies={"sms": POLICY}).jobs]
    world.kill(unknown)
    world.kill(elsewhere)

    assert [b.is_owner_dead(one.row.fence) for one in rows] == [False, False]


async def test_cancel_ends_a_job_at_once_whose_runner_is_known_to_be_gone(world: World) -> None:
    a = world.process()
    add(a, new(), new("sms"), new("sms"))
    [lost] = claim(a).jobs
    [asked, living] = claim(world.process(), policies={"sms": POLICY}).jobs
    world.kill(a)
    store = SqliteStore(world.path, driver=world.driver)
    store.this_process = lambda: Process("here", 1, 7)
    store.is_dead = world.is_dead
    async with trio_jobs.open_jobs(store, clock=lambda: 0.0002) as jobs:
        answers = [await jobs.cancel(one.row.id) for one in (lost, lost, asked, living)]
        states = [(await jobs.get(one.row.id)).state for one in (lost, asked, living)]
        world.dead.add(1001)
        second = await jobs.cancel(asked.row.id)
        history = await jobs.history(lost.row.id)
        last = (await jobs.get(asked.row.id)).state

    assert answers == [True, False, True, True]
    assert states == [State.CANCELLED, State.RUNNING, State.RUNNING]
    assert (second, last) == (True, State.CANCELLED)
    assert [past.outcome for past in history] == ["cancelled"]


async def test_a_job_that_was_taken_up_while_its_cancel_was_decided_ends_with_its_attempt(
    world: World,
) -> None:
    a, b = world.process(), world.process()
    add(a, new())
    [lost] = claim(a).jobs
    world.kill(a)
    store = SqliteStore(world.path, driver=world.driver)
    store.this_process = lambda: Process("here", 1, 7)

    def is_dead(process: Process, here: Process) -> bool:
        if process.pid == 1000 and not again:
            again.extend(claim(b, now=150).jobs)
            return True
        return False

    again: list[ClaimedJob] = []
    store.is_dead = is_dead
    async with trio_jobs.open_jobs(store, clock=lambda: 0.0002) as jobs:
        answer = await jobs.cancel(lost.row.id)
        job = await jobs.get(lost.row.id)

    assert (answer, job.state, job.attempt) == (True, State.RUNNING, 2)
    row = b.get(lost.row.id)
    assert row is not None
    assert row.cancel_requested


def test_they_are_taken_up_as_gently_as_those_whose_lease_has_ended(world: World) -> None:
    a, b = world.process(), world.process()
    add(b, *[new(priority=-n) for n in range(4)])
    rows = [job.row for job in claim(a).jobs]
    world.kill(a)

    first = claim(b, now=200, lost_limit=1)
    second = claim(b, now=300, lost_limit=2, held=frozenset(ids(first)))

    assert (ids(first), ids(second)) == ([rows[0].id], [rows[1].id, rows[2].id])
    assert [first.lost_waiting, second.lost_waiting] == [True, True]
    assert (first.more, first.next_due) == (False, None)  # what waits is `lost_waiting`
    assert b.get(rows[3].id) == rows[3]


def test_one_that_was_lost_twice_is_still_taken_alone(world: World) -> None:
    a, b, c = world.process(), world.process(), world.process()
    add(c, new())
    claim(a)
    world.kill(a)
    claim(b)
    add(c, new())
    claim(b)
    world.kill(b)

    without = claim(c, takes_suspect=False)
    alone = claim(c, held=frozenset([2]))

    assert (ids(without), without.lost_waiting) == ([2], True)
    assert (ids(alone), alone.jobs[0].is_suspect) == ([1], True)


def test_what_this_runner_has_in_hand_is_never_lost_to_it(world: World) -> None:
    store = world.process(pid=5)
    add(store, new())
    held = frozenset(ids(claim(store)))
    world.dead.add(5)

    assert claim(store, now=1_000_000, held=held).jobs == []


def test_what_this_runner_must_not_start_again_is_left_to_others(world: World) -> None:
    a, b = world.process(), world.process()
    add(b, new(), new())
    claim(a)
    world.kill(a)

    assert ids(claim(b, held=frozenset([1]))) == [2]
    assert ids(claim(b, below=1)) == []


def test_a_row_belongs_to_who_claimed_it_last(world: World) -> None:
    a, b, c = world.process(), world.process(), world.process()
    add(c, new())
    [job] = claim(a).jobs
    with a.transaction():
        a.apply([_lifecycle.ended(job.row, _lifecycle.InterruptedByShutdown(), POLICY, 100)])
    claim(b)
    world.kill(a)

    assert claim(c).jobs == []
    world.kill(b)
    assert len(claim(c, now=1_000_000).jobs) == 1


# When it looks.


def test_others_are_looked_at_first_and_then_now_and_then(world: World) -> None:
    a, b = world.process(), world.process()
    add(a, new())
    claim(a)
    instants = [5_000_000, 5_000_001, 5_499_999, 5_500_000, 5_999_999, 6_000_000, 4_000_000]

    looks = []
    for now in instants:
        world.questions.clear()
        claim(b, now=now)
        looks.append(len(world.questions))

    assert looks == [1, 0, 0, 1, 0, 1, 1]  # a clock that was set back is no reason to wait
    b.close()
    b.open()
    world.questions.clear()
    claim(b, now=4_000_001)
    assert len(world.questions) == 1


def test_that_a_process_died_is_news_though_nobody_has_committed(world: World) -> None:
    def version(now: int) -> object:
        with b.transaction():
            return b.version(now)

    a, b = world.process(), world.process()
    add(b, new())
    claim(a)
    before = version(100)
    world.kill(a)
    just_now = version(101)
    later = version(100 + LOOK_EVERY)

    assert before == just_now
    assert later != before
    assert ids(claim(b, now=101 + LOOK_EVERY)) == [1]


def test_who_died_is_dead_in_every_claim_until_the_last_of_its_rows_is_gone(world: World) -> None:
    a, b = world.process(), world.process()
    add(b, *[new() for _ in range(5)])
    claim(a)
    world.kill(a)

    taken = [ids(claim(b, now=now, lost_limit=1)) for now in range(5)]

    assert taken == [[1], [2], [3], [4], [5]]
    assert len(world.questions) == 1


def test_between_looks_a_claim_costs_no_statement_more(tmp_path: Path) -> None:
    counts = {}
    for where in (":memory:", tmp_path / "app.db"):
        store = SqliteStore(where)
        spies = Spies(store)
        store.open()
        add(store, *[new() for _ in range(30)])
        claim(store, now=100, limit=1)
        spies.log.clear()
        for now in range(101, 111):
            claim(store, now=now, limit=2)
        counts[where] = len(spies.log)
        store.close()

    assert len(set(counts.values())) == 1, counts


def test_beside_the_dead_whose_rows_nobody_here_serves_a_claim_costs_one_statement_more(
    world: World,
) -> None:
    a = world.process()
    b = SqliteStore(world.path, driver=world.driver)
    spies = Spies(b)
    b.this_process = lambda: Process("here", 1, 1)
    b.is_dead = world.is_dead
    b.open()
    world.stores.append(b)
    add(b, new("sms"))
    claim(b)
    spies.log.clear()
    claim(b)
    before = len(spies.log)
    claim(a, policies={"sms": POLICY})
    world.kill(a)
    claim(b, now=1_000_000)
    spies.log.clear()

    claim(b, now=1_000_001)

    assert len(spies.log) == before + 1


@pytest.mark.parametrize("rows", [0, 300])
def test_beside_the_dead_no_statement_walks_over_the_table(world: World, rows: int) -> None:
    a = world.process()
    b = SqliteStore(world.path, driver=world.driver)
    spies = Spies(b)
    b.this_process = lambda: Process("here", 1, 1)
    b.is_dead = world.is_dead
    b.open()
    world.stores.append(b)
    add(b, *[new("sms", run_at=100 + n) for n in range(rows)], new())
    writer(b).execute("ANALYZE")
    claim(a)
    world.kill(a)
    spies.log.clear()

    assert len(claim(b).jobs) == 1
    claim(b, now=1_000_000)
    b.close()

    with contextlib.closing(world.connect()) as connection:
        for _, sql, values in spies.log:
            if not sql.startswith(("BEGIN", "COMMIT", "ROLLBACK")):
                for step in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values):
                    walks = "SCAN trio_jobs_job" in step[3] or "SCAN job" in step[3]
                    short = "trio_jobs_lease" in step[3] or "trio_jobs_cancel" in step[3]
                    assert not walks or short, (sql, step)
    asked = "\n".join(sql for _, sql, _ in spies.log)
    assert "owner IN (" in asked
    assert "DELETE FROM trio_jobs_owner" in asked


# The rows of owners.


def test_who_takes_nothing_leaves_no_row_and_who_takes_leaves_one_until_it_closes(
    world: World,
) -> None:
    a, b = world.process(), world.process()
    claim(a)
    add(b, new(), new(run_at=200))
    nothing = world.owners()
    first = claim(a).jobs
    second = claim(a, now=200).jobs
    while_open = world.owners()
    end(a, first[0].row, second[0].row)
    a.close()

    assert (nothing, while_open, world.owners()) == ([], [1], [])


def test_an_owner_whose_rows_still_run_stays_when_it_closes_and_is_dead_when_its_process_is(
    world: World,
) -> None:
    a, b = world.process(pid=1), world.process()
    add(b, new())
    claim(a)
    a.close()

    living = claim(b)
    world.dead.add(1)
    dead = claim(b, now=1_000_000)

    assert (living.jobs, ids(dead)) == ([], [1])
    end(b, dead.jobs[0].row)
    claim(b, now=2_000_000)
    assert world.owners() == [2]


def test_closing_takes_those_along_whose_last_rows_were_taken_up(world: World) -> None:
    a, b, unknown = world.process(), world.process(), world.process()
    unknown._owners = Owners(None, world.is_dead)
    add(b, new(), new("sms"))
    claim(unknown, policies={"sms": POLICY})  # a row that runs and names nobody
    claim(a)
    world.kill(a)
    end(b, *[job.row for job in claim(b).jobs])
    before = world.owners()

    b.close()

    assert (before, world.owners()) == ([1, 2], [])


def test_a_hundred_starts_and_kills_leave_no_more_rows_than_one(world: World) -> None:
    add(world.process(), *[new() for _ in range(10)])
    most = 0
    policy = Policy(attempts=1000, on_interrupt="retry", wait=POLICY.wait)

    for n in range(100):
        store = world.process()
        claim(store, limit=2, policies={"mail": policy})
        if n % 3 == 0:
            claim(store, now=n * 1_000_000, limit=2, policies={"mail": policy})
        most = max(most, len(world.owners()))
        world.kill(store)
    last = world.process()
    for n in range(20):
        end(last, *[job.row for job in claim(last, now=n * 1_000_000).jobs])
    last.close()

    assert most <= 10  # that is how many rows may run
    assert world.owners() == []


def test_idle_owners_of_other_places_go_and_those_that_live_come_back(world: World) -> None:
    gone = world.process(place="an earlier boot")
    add(gone, new())
    end(gone, claim(gone).jobs[0].row)
    world.kill(gone)
    first = world.owners()
    there = world.process(place="there")
    beside = world.process(place="there")
    add(there, new())
    end(there, claim(there).jobs[0].row)
    second = world.owners()
    add(there, new())

    here = world.process()
    claim(here, limit=0)

    third = world.owners()
    end(there, claim(there, now=1_000_000).jobs[0].row)
    claim(here, now=1_000_000, limit=0)  # it does not drive them out again and again
    assert (first, second, third, world.owners()) == ([1], [2], [], [2])
    add(there, new())
    claim(there, now=2_000_000)
    world.kill(there)
    assert len(claim(beside, now=3_000_000).jobs) == 1


def test_an_id_is_never_used_twice(world: World) -> None:
    store = world.process()
    seen = []
    for _ in range(5):
        add(store, new())
        claimed = claim(store)
        seen += world.owners()
        end(store, *[job.row for job in claimed.jobs])
        store.close()
        store.open()

    assert seen == [1, 2, 3, 4, 5]
    assert world.owners() == []


def test_a_transaction_that_was_not_committed_has_entered_nobody(world: World) -> None:
    store, other = world.process(), world.process()
    add(store, new())
    with contextlib.suppress(ZeroDivisionError), store.transaction():
        store.claim(a_claim())
        raise ZeroDivisionError
    nobody = world.owners()

    claim(store)
    claim(store)

    assert (nobody, world.owners()) == ([], [1])
    world.kill(store)
    assert len(claim(other).jobs) == 1


@pytest.mark.parametrize("is_committed", [True, False])
def test_after_a_commit_of_unknown_outcome_the_next_claim_has_an_owner(
    world: World, is_committed: bool
) -> None:
    store, other = SqliteStore(world.path, driver=world.driver), world.process()
    spies = Spies(store)
    store.this_process = lambda: Process("here", 1, 1)
    store.is_dead = world.is_dead
    store.open()
    world.stores.append(store)
    add(store, new(), new())
    is_broken = False

    def breaks(sql: str) -> None:
        nonlocal is_broken
        is_broken = is_broken or sql == "COMMIT"
        if is_broken:
            raise StoreError("disk I/O error")

    def still_breaks(sql: str) -> None:
        if is_broken:
            raise StoreError("disk I/O error")

    if is_committed:
        spies.before, spies.after = still_breaks, breaks
    else:
        spies.before = breaks
    with pytest.raises(StoreError, match="the outcome is unknown"):
        claim(store, limit=1)
    spies.before = spies.after = lambda sql: None
    claim(store, limit=1)
    world.kill(store)

    taken = {job.row.id: job.taken_up for job in claim(other).jobs}
    assert taken == {1: True, 2: is_committed}
    claim(other, now=1_000_000)
    assert len(world.owners()) == 1


@pytest.mark.parametrize("trouble", ["locked", "broken", "deleted"])
def test_closing_gives_up_its_row_only_if_that_takes_no_time(tmp_path: Path, trouble: str) -> None:
    world = World(tmp_path / "app.db", "sqlite3")
    store = SqliteStore(world.path, busy_timeout=1e6)
    spies = Spies(store)
    naps: list[float] = []
    store.sleep = naps.append
    store.open()
    add(store, new())
    end(store, *[job.row for job in claim(store).jobs])
    lock = Lock(world.path)
    if trouble != "locked":
        lock.release()
    if trouble == "broken":
        spies.before = fails_at("DELETE FROM trio_jobs_owner")
    if trouble == "deleted":
        world.path.unlink()

    store.close()
    lock.release()

    assert sum(naps) < 0.01
    if trouble != "deleted":
        assert world.owners() == [1]
    # The process lives, so the row stays; the store itself is as good as new.
    store.open()
    store.close()


def test_closing_may_be_lucky_with_a_lock(tmp_path: Path) -> None:
    world = World(tmp_path / "app.db", "sqlite3")
    store = world.process()
    add(store, new())
    end(store, *[job.row for job in claim(store).jobs])
    lock = Lock(world.path)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            lock.release()

    store.sleep = sleep
    store.close()

    assert (len(naps), world.owners()) == (3, [])


def test_memory_has_no_owner() -> None:
    store = SqliteStore(":memory:")
    asked: list[None] = []

    def this_process() -> Process | None:
        asked.append(None)
        return None

    store.this_process = this_process
    store.open()
    add(store, new())
    claim(store)

    assert writer(store).execute("SELECT owner FROM trio_jobs_job") == [(None,)]
    assert writer(store).execute("SELECT count(*) FROM trio_jobs_owner") == [(0,)]
    assert asked == []
    store.close()


def test_the_real_process_owns_what_it_claims(tmp_path: Path) -> None:
    world = World(tmp_path / "app.db", "sqlite3")
    store = SqliteStore(world.path)
    store.open()
    me = store.this_process()
    add(store, new())
    claim(store)

    if me is None:
        assert world.owners() == []
    else:
        assert world.ask("SELECT owner FROM trio_jobs_job") == [1]
        assert world.ask("SELECT pid FROM trio_jobs_owner") == [me.pid]
        assert world.ask("SELECT started FROM trio_jobs_owner") == [me.started]
        assert world.ask("SELECT place FROM trio_jobs_owner") == [me.place]
    store.close()


# All of it, by chance.


@pytest.mark.parametrize("seed", range(20))
def test_whoever_dies_whatever_happens_rows_of_the_living_stay_theirs(
    tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    world = World(tmp_path / "app.db", dice.choice(["sqlite3", "apsw"]))
    policy = Policy(attempts=10**6, on_interrupt="retry", wait=POLICY.wait)
    holders: dict[int, tuple[SqliteStore, Row]] = {}
    living: list[SqliteStore] = []
    now, ended, wanted = 1_000_000, 0, 0

    def settle() -> None:
        nonlocal ended
        for id, (holder, row) in list(holders.items()):
            if holder in living and dice.random() < 0.4:
                end(holder, row)
                del holders[id]
                ended += 1

    def take(store: SqliteStore, **fields: Any) -> Claimed:
        held = frozenset(id for id, (holder, _) in holders.items() if holder is store)
        claimed = claim(store, now=now, policies={"mail": policy}, held=held, **fields)
        for job in claimed.jobs:
            before = holders.get(job.row.id)
            assert job.taken_up == (before is not None)
            assert before is None or before[0] not in living
            holders[job.row.id] = (store, job.row)
        return claimed

    for _ in range(60):
        now += dice.choice([1, 1000, LOOK_EVERY])
        if len(living) < 3:
            place = dice.choice(["here", "here", "there"])
            pid = 5 if place == "here" and dice.random() < 0.2 and 5 not in world.dead else None
            living.append(world.process(place=place, pid=pid))
        store = dice.choice(living)
        match dice.randrange(5):
            case 0:
                wanted += len(add(store, *[new() for _ in range(dice.randrange(4))]))
            case 1 | 2:
                take(store, limit=dice.randrange(1, 4), lost_limit=dice.randrange(3))
            case 3:
                settle()
            case 4 if dice.random() < 0.5:
                me = store.this_process()
                for victim in [one for one in living if one.this_process() == me]:
                    living.remove(victim)
                    world.kill(victim)
            case _:
                pass
    for _ in range(100):
        now += LOOK_EVERY
        for store in living:
            take(store)
        settle()
    now += LEASE
    last = world.process()
    living.append(last)
    while claim_is_left(world):
        take(last)
        settle()
        now += LOOK_EVERY

    assert ended == wanted
    assert sum(last.counts(None).values()) == last.counts(None).get(State.SUCCEEDED, 0) == wanted
    for store in living:
        store.close()
    assert set(world.ask("SELECT place FROM trio_jobs_owner")) <= {"there"}


def claim_is_left(world: World) -> bool:
    return bool(world.ask("SELECT id FROM trio_jobs_job WHERE state < 3 LIMIT 1"))


def test_what_a_process_could_not_take_away_at_a_close_goes_at_its_next_open(world: World) -> None:
    for _ in range(5):
        store = world.process(pid=1)
        add(store, new())
        [job] = claim(store).jobs
        with store.transaction():
            store.apply([_lifecycle.ended(job.row, Returned(b"1"), POLICY, 100)])
        store._owners = Owners(None, world.is_dead)  # the file is locked all the time
        store.close()

    claim(world.process(pid=1))

    assert len(world.owners()) <= 1
