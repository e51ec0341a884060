"""Pools: who claims what, when, and in which order (what their workers do is in test_workers)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from stories import (
    Script,
    Trouble,
    abandon,
    at,
    finished,
    forever,
    make_store,
    now,
    outcomes,
    row_of,
    serving,
    sleeps,
    writer,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Failure,
    Handler,
    Jobs,
    Kind,
    Retry,
    SqliteStore,
    State,
    constant,
)
from trio_jobs._agenda import Agenda
from trio_jobs._batch import Write
from trio_jobs._model import Claim, Claimed, NewJob
from trio_jobs._pool import Pool
from trio_jobs.testing import EPOCH, settled

plain = Kind("plain", None)
other = Kind("other", None)
number = Kind("number", int, int)


class Claims(Trouble):
    """Counts the claims, and how many rows were running after each."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.claims = 0
        self.most_running = 0

    def claim(self, claim: Claim) -> Claimed:
        claimed: Claimed = super().claim(claim)
        [(running,)] = writer(self).execute("SELECT count(*) FROM trio_jobs_job WHERE state = 2")
        self.claims += 1
        self.most_running = max(self.most_running, running)
        return claimed


# Order.


async def test_jobs_run_by_priority_then_by_due_time_then_by_id(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    ordinary = Kind("ordinary", str)
    urgent = Kind("urgent", str, priority=5)
    order: list[str] = []

    async def handle(attempt: Attempt[str, None]) -> None:
        order.append(attempt.payload)

    await jobs.enqueue(ordinary, "due third", delay=3)
    await jobs.enqueue(ordinary, "due first", delay=1)
    await jobs.enqueue(ordinary, "due at once")
    await jobs.enqueue(urgent, "urgent")
    await jobs.enqueue(ordinary, "most urgent", priority=9, delay=4)
    await jobs.enqueue(urgent, "not urgent today", priority=-1)
    await jobs.enqueue(ordinary, "due at once, later id")
    await trio.sleep(5)
    enqueued = await jobs.find()
    async with serving(jobs, ordinary.handled_by(handle), urgent.handled_by(handle), workers=1):
        await finished(jobs, *enqueued)

    assert order == [
        "most urgent",
        "urgent",
        "due at once",
        "due at once, later id",
        "due first",
        "due third",
        "not urgent today",
    ]


async def test_a_retry_takes_its_place_by_the_instant_it_is_due(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    flaky = Kind("flaky", None, retry=Retry(backoff=constant(10)))
    slow = Script(sleeps(15))
    handle = Script(ValueError(), None)
    async with serving(jobs, flaky.handled_by(handle), plain.handled_by(slow), workers=1):
        first = await jobs.enqueue(flaky, None)
        await trio.sleep(0.5)
        await jobs.enqueue(plain, None)  # busy till 15.5
        late = await jobs.enqueue(plain, None, delay=12)  # due at 12.5, after the retry
        await finished(jobs, first, late)

    assert handle.starts == [0, 15.5]
    assert slow.starts == [0.5, 15.5]


# When.


async def test_a_job_starts_at_once_when_this_process_enqueues_it(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    async with serving(jobs, plain.handled_by(handle)):
        for _ in range(3):
            await trio.sleep(100)
            await jobs.enqueue(plain, None)
            await trio.sleep(0.001)
        await jobs.enqueue_many(plain, [None] * 2)
        await trio.sleep(0.001)

    assert handle.starts == [100, 200.001, 300.002, 300.003, 300.003]


@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_a_job_starts_at_once_when_another_Jobs_of_this_process_enqueues_it(
    where: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    mine, others = (make_store(where, tmp_path, SqliteStore) for _ in range(2))
    async with (
        trio_jobs.open_jobs(mine) as jobs,
        trio_jobs.open_jobs(others) as another,
        serving(jobs, plain.handled_by(handle)),
    ):
        await trio.sleep(100)
        await finished(another, await another.enqueue(plain, None))
        await another.enqueue(plain, None, delay=50)
        await trio.sleep(100)

    assert handle.starts == [100, 150]


async def test_a_job_enqueued_before_the_runner_starts_runs_when_it_does(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    await jobs.enqueue(plain, None)
    await jobs.enqueue(plain, None, delay=150)
    await trio.sleep(100)
    async with serving(jobs, plain.handled_by(handle)):
        await trio.sleep(100)

    assert handle.starts == [100, 150]


async def test_under_the_real_clock_a_job_of_another_process_is_found_within_a_poll(
    tmp_path: Path,
) -> None:
    """What stands for the other process is a Jobs that nobody in this one hears of."""

    class Elsewhere(SqliteStore):
        @property
        def identity(self) -> object:
            return object

    done = trio.Event()

    async def handle(attempt: Attempt[None, None]) -> None:
        done.set()

    path = tmp_path / "jobs.db"
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
        serving(jobs, plain.handled_by(handle), poll=0.2),
    ):
        await settled()
        job = await outside.enqueue(plain, None)
        with trio.fail_after(15):  # a lease is renewed after 20
            await done.wait()
        [ended] = await finished(outside, job, within=20)

    assert ended.state is State.SUCCEEDED


async def test_the_store_is_not_asked_while_there_is_nothing_to_do(
    autojump_clock: MockClock,
) -> None:
    """Under a virtual clock no timer is a safety net."""
    store = Claims(":memory:")
    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, plain.handled_by(Script(None))):
        await jobs.enqueue(plain, None, delay=10_000_000)
        await trio.sleep_until(9_999_999)
        before = store.claims
        await trio.sleep(2)

    assert before <= 3
    assert store.claims <= before + 3


async def test_while_no_worker_is_free_the_virtual_clock_does_not_spin(
    autojump_clock: MockClock,
) -> None:
    """A due time that nobody can serve is no reason to wake."""
    store = Claims(":memory:")
    handle = Script(sleeps(1000))
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(handle), workers=2),
    ):
        enqueued = await jobs.enqueue_many(plain, [None] * 3)
        enqueued.append(await jobs.enqueue(plain, None, delay=10))
        await trio.sleep(999)
        before = store.claims
        await finished(jobs, *enqueued)

    assert handle.starts == [0, 0, 1000, 1000]
    assert before <= 5


@pytest.mark.parametrize("due", [5.0, 10.0])
async def test_a_job_that_was_heard_of_while_no_worker_was_free_starts_when_it_is_due(
    due: float, jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(5))
    async with serving(jobs, plain.handled_by(handle), workers=1):
        await jobs.enqueue(plain, None)
        await trio.sleep(1)
        late = await jobs.enqueue(plain, None, delay=due - 1)
        await finished(jobs, late, within=1000)

    assert handle.starts == [0, due]


async def test_a_retry_that_is_due_while_its_own_worker_was_the_only_one_starts_on_time(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle, long = Script(sleeps(3)), Script(ValueError(), None)
    flaky = Kind("flaky", None, retry=Retry(backoff=constant(10)))
    async with serving(jobs, plain.handled_by(handle), flaky.handled_by(long), workers=1):
        job = await jobs.enqueue(flaky, None)
        await trio.sleep(0.5)
        await jobs.enqueue(plain, None)
        await finished(jobs, job, within=1000)

    assert long.starts == [0, 10]


@pytest.mark.parametrize("what", ["due at once", "due later", "a deadline"])
async def test_what_is_heard_while_a_claim_is_answered_is_not_forgotten(
    what: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another Jobs commits a row after a claim was made, before its answer is here."""
    store = Trouble(tmp_path / "jobs.db")
    is_made, may_go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def hold_the_answer(step: str) -> None:
        seen.append(step)
        if step == "committed" and "claim" in seen and not is_made.is_set():
            is_made.set()
            may_go_on.wait(10)

    async with trio_jobs.open_jobs(store) as jobs, trio_jobs.open_jobs(tmp_path / "jobs.db") as two:
        await two.enqueue(plain, None)
        store.rule = hold_the_answer
        async with serving(jobs, plain.handled_by(Script(None))):
            while not is_made.is_set():
                await trio.lowlevel.checkpoint()
            if what == "a deadline":
                job = await two.enqueue(other, None, deadline=at(10))
            else:
                job = await two.enqueue(plain, None, delay=10 if what == "due later" else 0)
            may_go_on.set()
            [ended] = await finished(jobs, job, within=1000)

    assert ended.state is (State.FAILED if what == "a deadline" else State.SUCCEEDED)
    assert now() == (0 if what == "due at once" else 10)


async def test_a_look_that_finds_nothing_new_forgets_nothing(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Others have not committed; but more jobs wait here, and no timer would find them."""
    enqueued = await jobs.enqueue_many(plain, [None] * 3)
    async with serving(jobs, plain.handled_by(Script(sleeps(5))), workers=1):
        for _ in range(3):
            await trio.sleep(1)
            await jobs._look()
        await finished(jobs, *enqueued)

    assert now() == 15


async def test_a_wake_up_while_a_look_is_being_formed_makes_it_a_claim(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread clears the hunger, at no moment of the Trio thread."""
    store = Claims(":memory:")
    forget = Agenda.claim_was_formed
    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, plain.handled_by(Script(None))):
        await settled()
        before = store.claims
        [engine] = jobs._watchers

        def wake_and_forget(agenda: Agenda) -> None:
            monkeypatch.setattr(Agenda, "claim_was_formed", forget)
            engine._pools[0].wake()  # type: ignore[attr-defined]
            forget(agenda)

        monkeypatch.setattr(Agenda, "claim_was_formed", wake_and_forget)
        await jobs._look()
        await settled()

    assert store.claims > before


async def test_a_read_that_takes_long_keeps_nobody_from_starting(tmp_path: Path) -> None:
    may_end = threading.Event()

    class SlowToFind(SqliteStore):
        def find(self, **what: Any) -> Any:
            may_end.wait(60)
            return []

    started = trio.Event()

    async def start(attempt: Attempt[None, None]) -> None:
        started.set()

    store = SlowToFind(tmp_path / "jobs.db")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(start)),
        trio.open_nursery() as nursery,
    ):
        await jobs.enqueue(plain, None, delay=0.2)
        nursery.start_soon(partial(jobs.find, limit=10**9))
        with trio.move_on_after(20) as in_time:
            await started.wait()
        may_end.set()

    assert not in_time.cancelled_caught


# How many.


async def test_Q1_a_runner_never_owns_more_rows_than_it_has_workers(
    autojump_clock: MockClock,
) -> None:
    store = Claims(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        enqueued = await jobs.enqueue_many(plain, [None] * 20)
        steps = [sleeps(seconds) for seconds in (5, 1, 0, 3, 0, 0, 2, 0, 5)]
        async with serving(jobs, plain.handled_by(Script(*steps)), workers=2):
            enqueued += [await jobs.enqueue(plain, None, delay=delay) for delay in (0, 1, 7)]
            await finished(jobs, *enqueued)

    assert store.most_running == 2


async def test_Q1_a_second_runner_gets_its_share_at_once(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    first, second = Script(sleeps(5)), Script(sleeps(5))
    enqueued = await jobs.enqueue_many(plain, [None] * 20)
    async with serving(jobs, plain.handled_by(first), workers=2):
        await trio.sleep(1)
        async with serving(jobs, plain.handled_by(second), workers=2):
            await finished(jobs, *enqueued)

    assert first.starts == [0, 0, 5, 5, 10, 10, 15, 15, 20, 20]
    assert second.starts == [1, 1, 6, 6, 11, 11, 16, 16, 21, 21]


async def test_a_slow_job_never_waits_behind_another_while_a_runner_could_have_it(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Not even when the first jobs were so quick that the rest looked quick, too."""
    quick, slow = Script(None), Script(sleeps(100))
    async with (
        serving(jobs, plain.handled_by(quick), other.handled_by(slow), workers=2),
        serving(jobs, plain.handled_by(quick), other.handled_by(slow), workers=2),
    ):
        await finished(jobs, *await jobs.enqueue_many(plain, [None] * 50))
        enqueued = await jobs.enqueue_many(other, [None] * 4)
        await finished(jobs, *enqueued)

    assert slow.starts == [0, 0, 0, 0]


async def test_all_workers_are_used_and_no_more(jobs: Jobs, autojump_clock: MockClock) -> None:
    handle = Script(sleeps(10))
    enqueued = await jobs.enqueue_many(plain, [None] * 12)
    async with serving(jobs, plain.handled_by(handle), workers=5) as runner:
        await trio.sleep(5)
        running = runner.statistics().running
        await finished(jobs, *enqueued)

    assert running == 5
    assert handle.starts == [0] * 5 + [10] * 5 + [20] * 2


# Kinds nobody gave a handler for.


async def test_P2_a_kind_that_is_unknown_here_is_left_and_named_and_runs_elsewhere(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    before = await jobs.enqueue(other, None)
    async with serving(jobs, plain.handled_by(handle)) as runner:
        known = await jobs.enqueue(plain, None)
        await finished(jobs, known)
        await settled()
        seen = [runner.statistics().unhandled]
        await jobs.enqueue(Kind("third", None), None, delay=50)
        await trio.sleep(100)
        seen.append(runner.statistics().unhandled)
        waiting = await jobs.get(before)
        async with serving(jobs, other.handled_by(Script(None))):
            [ended] = await finished(jobs, before)

    assert seen == [{"other"}, {"other", "third"}]
    assert (waiting.state, waiting.attempt) == (State.QUEUED, 0)
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)


@pytest.mark.parametrize("first", [True, False], ids=["waiting", "coming"])
async def test_unhandled_fail_fails_the_jobs_of_unknown_kinds_for_good(
    first: bool, jobs: Jobs, autojump_clock: MockClock
) -> None:
    if first:
        job = await jobs.enqueue(other, None)
    async with serving(jobs, plain.handled_by(Script(None)), unhandled="fail") as runner:
        if not first:
            await trio.sleep(10)
            job = await jobs.enqueue(other, None)
        [ended, good] = await finished(jobs, job, await jobs.enqueue(plain, None))
        statistics = runner.statistics()

    assert ended.state is State.FAILED
    assert ended.failure == Failure("no handler for job kind other")
    assert good.state is State.SUCCEEDED
    assert statistics.unhandled == {"other"}


async def test_very_many_unknown_kinds_are_taken_up_at_once(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copied the table of all before it: 10,000 took a minute on the Trio thread."""
    adopted: list[int] = []
    adopt = Pool.adopt

    def counted(pool: Pool, handlers: Sequence[Handler]) -> None:
        adopted.append(len(handlers))
        adopt(pool, handlers)

    monkeypatch.setattr(Pool, "adopt", counted)
    async with trio_jobs.open_jobs(":memory:") as jobs:
        made = [await jobs.enqueue(Kind(f"kind {n}", None), None) for n in range(300)]
        async with serving(jobs, plain.handled_by(Script(None)), unhandled="fail"):
            ended = await finished(jobs, *made)

    assert adopted == [300]
    assert {job.state for job in ended} == {State.FAILED}


async def test_an_unhandled_function_takes_any_kind_raw(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    taken: list[tuple[str, bytes]] = []

    async def take(name: str, payload: bytes) -> None:
        taken.append((name, payload))
        if name == "bad" and len(taken) < 4:
            raise ValueError

    async with serving(jobs, plain.handled_by(Script(None)), unhandled=take):
        good = await jobs.enqueue(Kind("good", dict[str, int], int), {"a": 1})
        raw = await jobs.enqueue(Kind("raw", bytes), b"\x00\xff")
        bad = await jobs.enqueue(Kind("bad", None), None)
        ended = await finished(jobs, good, raw, bad)

    assert sorted(taken) == [
        ("bad", b"null"),
        ("bad", b"null"),
        ("good", b'{"a":1}'),
        ("raw", b"\x00\xff"),
    ]
    assert [(job.state, job.attempt) for job in ended] == [
        (State.SUCCEEDED, 1),
        (State.SUCCEEDED, 1),
        (State.SUCCEEDED, 2),
    ]
    assert now() == 5


@pytest.mark.parametrize("name", ["a\0b", "", "x" * 100_000, "\x1b[31m", "ünïcödé"])
async def test_P2_a_kind_with_an_odd_name_that_somebody_stored_does_not_stop_the_runner(
    name: str, autojump_clock: MockClock
) -> None:
    store = SqliteStore(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(None)), unhandled="fail"),
    ):
        odd = await jobs.enqueue(other, None, delay=5)
        writer(store).execute("UPDATE trio_jobs_job SET kind = ? WHERE id = ?", (name, odd.id))
        await jobs.enqueue(other, None, delay=6)  # so that it looks
        await trio.sleep(10)
        async with serving(jobs, plain.handled_by(Script(None)), unhandled="fail"):
            [ended] = await finished(jobs, await jobs.enqueue(plain, None), within=10)

    assert ended.state is State.SUCCEEDED


# Queues.

mail = Kind("mail", None, queue="network")
crawl = Kind("crawl", None, queue="network")
resize = Kind("resize", None, queue="cpu")


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        (None, {"mail", "crawl", "resize", "plain"}),
        (["network"], {"mail", "crawl"}),
        ({"cpu", "default"}, {"resize", "plain"}),
        ({"network": 2, "cpu": 1}, {"mail", "crawl", "resize"}),
    ],
    ids=["all", "a list", "a set", "a mapping"],
)
async def test_queues_choose_among_the_handlers(
    queues: Any, expected: set[str], jobs: Jobs, autojump_clock: MockClock
) -> None:
    ran: set[str] = set()

    async def handle(attempt: Attempt[None, None]) -> None:
        ran.add(attempt.kind)

    kinds = [mail, crawl, resize, plain]
    handlers = [kind.handled_by(handle) for kind in kinds]
    async with serving(jobs, *handlers, queues=queues, unhandled="fail") as runner:
        for kind in kinds:
            await jobs.enqueue(kind, None)
        await trio.sleep(10)
        statistics = runner.statistics()
        states = await jobs.counts()

    assert ran == expected
    # A kind of a queue that is not served here has a handler all the same.
    assert statistics.unhandled == set()
    assert states[State.QUEUED] == 4 - len(expected)


async def test_each_queue_of_a_mapping_has_its_own_workers(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    network, cpu = Script(sleeps(10)), Script(sleeps(10))
    handlers = [mail.handled_by(network), crawl.handled_by(network), resize.handled_by(cpu)]
    async with serving(jobs, *handlers, queues={"network": 3, "cpu": 1}, workers=1):
        enqueued = await jobs.enqueue_many(mail, [None] * 2)
        enqueued += await jobs.enqueue_many(crawl, [None] * 2)
        enqueued += await jobs.enqueue_many(resize, [None] * 2)
        await finished(jobs, *enqueued)

    assert network.starts == [0, 0, 0, 10]
    assert cpu.starts == [0, 10]


async def test_a_kind_that_moved_to_another_queue_moves_its_waiting_jobs_too(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Rows carry their kind only."""
    job = await jobs.enqueue(mail, None)
    moved = Kind("mail", None, queue="slow")
    async with serving(jobs, moved.handled_by(Script(None)), queues=["slow"]):
        [ended] = await finished(jobs, job)

    assert ended.state is State.SUCCEEDED


# Deadlines of jobs that wait.


async def test_K7_a_deadline_in_the_past_is_accepted_and_the_job_never_starts(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    await trio.sleep(100)
    async with serving(jobs, plain.handled_by(handle)):
        past = await jobs.enqueue(plain, None, deadline=at(50))
        before_due = await jobs.enqueue(plain, None, delay=100, deadline=at(150))
        exactly_now = await jobs.enqueue(plain, None, deadline=at(100))
        at_once = await finished(jobs, past, exactly_now, within=1)
        [later] = await finished(jobs, before_due)

    assert handle.starts == []
    assert {job.state for job in [*at_once, later]} == {State.FAILED}
    assert {job.failure for job in [*at_once, later]} == {Failure("deadline")}
    assert now() == 150


@pytest.mark.parametrize(
    ("due", "deadline", "starts"), [(50.0, 50.0, []), (49.999, 50.0, [49.999])]
)
async def test_K7_a_start_at_the_deadline_is_refused_and_one_before_it_is_not(
    due: float, deadline: float, starts: list[float], jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    async with serving(jobs, plain.handled_by(handle)):
        job = await jobs.enqueue(plain, None, delay=due, deadline=at(deadline))
        await finished(jobs, job)

    assert handle.starts == starts


async def test_K7_a_deadline_passes_while_the_job_waits_for_its_retry(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(ValueError())
    async with serving(jobs, plain.handled_by(handle)):
        job = await jobs.enqueue(plain, None, deadline=at(20))
        [ended] = await finished(jobs, job)

    assert handle.starts == [0, 5]
    assert (ended.state, ended.failure, now()) == (State.FAILED, Failure("deadline"), 20)
    assert await outcomes(jobs, job) == ["failed", "failed"]


async def test_K7_a_deadline_passes_while_no_worker_is_free(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(100))
    async with serving(jobs, plain.handled_by(handle), workers=1) as runner:
        await jobs.enqueue(plain, None)
        behind = [await jobs.enqueue(plain, None, deadline=at(second)) for second in (20, 10, 30)]
        ends = {}
        for job in behind:
            [ended] = await finished(jobs, job)
            ends[job.id] = (ended.state, ended.finished_at)
        statistics = runner.statistics()

    assert list(ends.values()) == [(State.FAILED, at(second)) for second in (20, 10, 30)]
    assert (handle.starts, statistics.failed) == ([0], 3)


async def test_K7_any_runner_ends_what_has_passed_its_deadline_whatever_it_serves(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    queued = await jobs.enqueue(other, None, deadline=at(10))
    scheduled = await jobs.enqueue(other, None, delay=1000, deadline=at(20))
    lost = await jobs.enqueue(number, 1, deadline=at(30))
    await abandon(jobs, number, lease=40)
    handlers = [mail.handled_by(Script(None)), resize.handled_by(Script(forever))]
    async with serving(jobs, *handlers, queues={"network": 1, "cpu": 1}, grace=0):
        await jobs.enqueue(resize, None)
        ended = await finished(jobs, queued, scheduled, lost)

    assert [job.finished_at for job in ended] == [at(10), at(20), at(40)]
    assert {(job.state, job.failure) for job in ended} == {(State.FAILED, Failure("deadline"))}


async def test_K7_a_deadline_that_many_jobs_share_ends_them_all(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """One claim ends only so many at a time."""
    await jobs.enqueue_many(plain, [None] * 1200, deadline=at(10), delay=50)
    handle = Script(None)
    async with serving(jobs, other.handled_by(handle)):
        await jobs.enqueue(other, None, delay=11)
        await trio.sleep(10.5)
        counts = await jobs.counts()
        await trio.sleep(1)

    assert counts[State.FAILED] == 1200
    assert handle.starts == [11]


# What fails or closes.


@pytest.mark.parametrize("read", [1, 2, 3, 4])
async def test_a_clock_that_fails_for_a_moment_leaves_no_pool_with_a_claim_that_was_never_made(
    read: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pool had made its claim when the second could not."""
    here, there = Kind("here", None, queue="here"), Kind("there", None, queue="there")
    reads_left = 0

    def clock() -> float:
        nonlocal reads_left
        reads_left -= 1
        if reads_left == 0:
            raise OSError("the time server hiccuped")
        return EPOCH.timestamp() + trio.current_time()

    claims_for = Jobs._claims_for

    def with_failing_clock(jobs: Jobs, new: Sequence[NewJob]) -> list[Write]:
        nonlocal reads_left
        reads_left = read
        try:
            return claims_for(jobs, new)
        finally:
            reads_left = 0

    async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs:
        handlers = [kind.handled_by(Script(None)) for kind in (here, there)]
        async with serving(jobs, *handlers, queues={"here": 1, "there": 1}, poll=1):
            await trio.sleep(4.5)  # between two polls
            with monkeypatch.context() as patched, contextlib.suppress(OSError):
                patched.setattr(Jobs, "_claims_for", with_failing_clock)
                await jobs.enqueue(here, None)
            both = [await jobs.enqueue(here, None), await jobs.enqueue(there, None)]
            ended = await finished(jobs, *both, within=10)

    assert [job.state for job in ended] == [State.SUCCEEDED] * 2


@pytest.mark.parametrize("error", [LookupError, RuntimeError, KeyboardInterrupt])
async def test_an_error_in_the_runners_own_loops_stops_it_in_order(
    error: type[BaseException], autojump_clock: MockClock
) -> None:
    is_broken = False

    def clock() -> float:
        if is_broken:
            raise error("of the application's clock")
        return EPOCH.timestamp() + trio.current_time()

    async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs:
        with pytest.RaisesGroup(error):
            async with trio.open_nursery() as nursery:
                handlers = [number.handled_by(sleep_payload)]
                await nursery.start(partial(trio_jobs.serve, jobs, handlers, grace=10))
                short, long = await jobs.enqueue_many(number, [5, 60])
                await trio.sleep(2.5)
                is_broken = True
                await trio.sleep(1)
                is_broken = False
                await trio.sleep_forever()

        assert now() == 13  # a poll met it after 3 s
        assert (await jobs.get(short)).state is State.SUCCEEDED
        assert (await jobs.get(long)).state is State.QUEUED


async def sleep_payload(attempt: Attempt[int, int]) -> int:
    await trio.sleep(attempt.payload)
    return attempt.payload


async def test_when_all_of_a_runner_is_cancelled_what_is_ready_is_not_started(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """A bug of its own, or the end of the block of open_jobs around it."""
    starts = 0

    async def start(attempt: Attempt[None, None]) -> None:
        nonlocal starts
        starts += 1
        await trio.sleep(0.001)
        if starts == 40:  # short, so that more are claimed than there are workers
            raise_in_a_loop.set()

    raise_in_a_loop = trio.Event()
    made = await jobs.enqueue_many(plain, [None] * 200)
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with serving(jobs, plain.handled_by(start), workers=2) as runner:
            await raise_in_a_loop.wait()
            runner._engine.nursery.start_soon(divide)
            await trio.sleep(1)

    assert starts <= 42
    assert len(made) == 200


async def divide() -> None:
    1 / 0  # noqa: B018


@pytest.mark.parametrize("where", ["_pool.Pool._take", "_ends.Ends._settle"])
async def test_an_error_of_the_runner_itself_in_an_answer_ends_serve_and_not_the_program(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Trio itself calls it, so what was raised ended all, as "an internal error in Trio"."""

    def fail(*args: object) -> None:
        raise ZeroDivisionError("ours")

    async with trio_jobs.open_jobs(":memory:") as jobs:
        job = await jobs.enqueue(plain, None)
        with monkeypatch.context() as patched:
            patched.setattr(f"trio_jobs.{where}", fail)
            with pytest.raises(ZeroDivisionError, match="ours"):
                await trio_jobs.serve(jobs, [plain.handled_by(Script(None))], lease=9)
        async with serving(jobs, plain.handled_by(Script(None))):
            [ended] = await finished(jobs, job, within=60)

    assert ended.state is State.SUCCEEDED


async def test_a_closing_Jobs_whose_claim_is_just_being_answered_asks_for_no_further_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """What was heard meanwhile is a reason to, and there is nobody left to ask."""
    store = Trouble(tmp_path / "jobs.db")
    is_made, may_go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def hold_the_answer(step: str) -> None:
        seen.append(step)
        if step == "committed" and "claim" in seen and not is_made.is_set():
            is_made.set()
            may_go_on.wait(10)

    store.rule = hold_the_answer
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with (
            trio.open_nursery() as nursery,
            trio_jobs.open_jobs(tmp_path / "jobs.db") as two,
            trio_jobs.open_jobs(store) as jobs,
        ):
            await nursery.start(trio_jobs.serve, jobs, [plain.handled_by(Script(None))])
            while not is_made.is_set():
                await trio.lowlevel.checkpoint()
            await two.enqueue(plain, None)
            threading.Timer(0.05, may_go_on.set).start()


async def test_what_is_heard_while_a_jobs_closes_raises_nothing(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """It is called by Trio itself, which would not survive that."""
    job = await jobs.enqueue(plain, None, delay=100)
    row = await row_of(jobs, job)
    async with serving(jobs, plain.handled_by(Script(None))):
        await settled()
        jobs._bridge.is_closed = True
        jobs._heard([msgspec.structs.replace(row, run_at=row.enqueued_at)])
        jobs._written_elsewhere()
        jobs._bridge.is_closed = False
