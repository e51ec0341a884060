"""`serve` and `run_once` from outside: settings, statistics, one pass, and how they raise."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from stories import (
    STORES,
    Script,
    Trouble,
    abandon,
    assert_no_transaction_is_open,
    at,
    finished,
    forever,
    make_store,
    now,
    outcomes,
    row_of,
    second,
    serving,
    sleeps,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Failure,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    SqliteStore,
    State,
    Statistics,
    StoreBusy,
    constant,
    run_once,
    serve,
)
from trio_jobs._model import Claim, Claimed
from trio_jobs.testing import settled

plain = Kind("plain", None)
number = Kind("number", int, int)
other = Kind("other", None)


async def double(attempt: Attempt[int, int]) -> int:
    return 2 * attempt.payload


# Settings.


async def test_a_handler_that_is_in_no_list_is_refused(autojump_clock: MockClock) -> None:
    handler: Any = number.handled_by(double)
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises(TypeError, match="handlers must be a list of Handlers, not <Handler of"):
            await trio_jobs.serve(jobs, handler)


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"workers": 0}, ValueError, "workers.*0"),
        ({"workers": -1}, ValueError, "workers.*-1"),
        ({"workers": 1.5}, ValueError, "workers.*1.5"),
        ({"workers": True}, ValueError, "workers.*True"),
        ({"queues": {"default": 0}}, ValueError, "workers of queue 'default'.*0"),
        ({"queues": ["unheard of"]}, ValueError, "unheard of'; they are for 'default'"),
        ({"queues": 5}, TypeError, "queues must be a list of names, or a mapping .*, not 5"),
        ({"queues": []}, ValueError, "queue"),
        ({"queues": "default"}, TypeError, "default"),
        ({"lease": 0}, ValueError, "lease.*0"),
        ({"lease": -1.0}, ValueError, "lease.*-1"),
        ({"lease": 0.01}, ValueError, "lease.*0.01"),
        ({"lease": math.nan}, ValueError, "lease.*nan"),
        ({"lease": math.inf}, ValueError, "lease.*inf"),
        ({"poll": 0}, ValueError, "poll.*0"),
        ({"poll": -1}, ValueError, "poll.*-1"),
        ({"poll": math.nan}, ValueError, "poll.*nan"),
        ({"poll": math.inf}, ValueError, "poll.*inf"),
        ({"grace": -1}, ValueError, "grace.*-1"),
        ({"grace": math.nan}, ValueError, "grace.*nan"),
        ({"unhandled": "maybe"}, ValueError, "unhandled.*maybe"),
        ({"unhandled": print}, ValueError, "unhandled.*print"),
    ],
    ids=str,
)
async def test_E6_settings_that_cannot_work_are_refused_at_once(
    settings: dict[str, Any],
    error: type[Exception],
    named: str,
    autojump_clock: MockClock,
) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises(error, match=named), trio.fail_after(1):
            await serve(jobs, [plain.handled_by(Script(None))], **settings)


async def test_a_kind_has_one_handler(autojump_clock: MockClock) -> None:
    twice = [plain.handled_by(Script(None)), Kind("plain", int).handled_by(Script(None))]
    async with trio_jobs.open_jobs(":memory:") as jobs:
        for call in (serve, run_once):
            with pytest.raises(ValueError, match="two Kinds are named 'plain'"):
                await call(jobs, twice)
            with pytest.raises(TypeError, match="handled_by"):
                await call(jobs, [double])  # type: ignore[list-item]


async def test_a_Jobs_that_is_closed_serves_nobody(autojump_clock: MockClock) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        pass
    with pytest.raises(trio.ClosedResourceError):
        await serve(jobs, [plain.handled_by(Script(None))])


# Statistics.


async def test_statistics_count_what_the_runner_did(jobs: Jobs, autojump_clock: MockClock) -> None:
    kinds = {
        name: Kind(name, None, retry=Retry(attempts=2, backoff=constant(1)))
        for name in ("good", "flaky", "later", "dead", "refused", "late", "cancelled", "slow")
    }
    steps: dict[str, list[object]] = {
        "good": [None],
        "flaky": [ValueError(), None],
        "later": [RetryLater(1), None],
        "dead": [Fail("no")],
        "refused": [Fail("no", retry=False)],
        "late": [None],
        "cancelled": [forever],
        "slow": [sleeps(1000)],
    }
    handlers = [kind.handled_by(Script(*steps[name])) for name, kind in kinds.items()]
    async with serving(jobs, *handlers, grace=0) as runner:
        at_first = runner.statistics()
        for name, kind in kinds.items():
            deadline = at(0) if name == "late" else None
            job = await jobs.enqueue(kind, None, deadline=deadline)
            if name == "cancelled":
                await trio.sleep(0.1)
                await jobs.cancel(job)
        await jobs.enqueue(other, None)
        await trio.sleep(10)
        statistics = runner.statistics()

        shown = repr(runner)

    assert at_first == Statistics(0, 0, 0, 0, 0, 0, frozenset(), None)
    assert shown == "<Runner: 1 running, 10 started>"
    assert statistics == Statistics(
        running=1,
        started=10,
        succeeded=3,
        failed=3,
        retried=3,
        lost=0,
        unhandled=frozenset({"other"}),
        trouble=None,
    )


async def test_statistics_are_never_behind_what_a_waiter_knows(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, number.handled_by(double)) as runner:
        for count in range(1, 20):
            await jobs.wait_finished(await jobs.enqueue(number, count))
            statistics = runner.statistics()

            assert (statistics.succeeded, statistics.running) == (count, 0)


# Several runners.


async def test_two_runners_on_the_same_Jobs_share_the_work(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(5))
    async with (
        serving(jobs, plain.handled_by(handle), workers=2) as first,
        serving(jobs, plain.handled_by(handle), workers=2) as second_one,
    ):
        enqueued = await jobs.enqueue_many(plain, [None] * 8)
        ended = await finished(jobs, *enqueued)
        started = [first.statistics().started, second_one.statistics().started]

    assert handle.starts == [0] * 4 + [5] * 4
    assert started == [4, 4]
    assert {job.attempt for job in ended} == {1}


async def test_a_runner_that_ends_does_not_disturb_another_on_the_same_Jobs(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(5))
    async with serving(jobs, plain.handled_by(handle)):
        async with serving(jobs, number.handled_by(double)):
            await finished(jobs, await jobs.enqueue(number, 1))
        await finished(jobs, await jobs.enqueue(plain, None))
        waiting = await jobs.enqueue(number, 2)
        await trio.sleep(100)

    assert (await jobs.get(waiting)).state is State.QUEUED


async def test_handlers_may_enqueue_wait_and_cancel(jobs: Jobs, autojump_clock: MockClock) -> None:
    async def parent(attempt: Attempt[None, None]) -> None:
        child = await attempt.jobs.enqueue(number, 21)
        unwanted = await attempt.jobs.enqueue(number, 1, delay=10)
        assert await attempt.jobs.cancel(unwanted)
        results.append((await attempt.jobs.wait_finished(child)).unwrap())

    results: list[int] = []
    async with serving(jobs, plain.handled_by(parent), number.handled_by(double)):
        [ended] = await finished(jobs, await jobs.enqueue(plain, None))

    assert ended.state is State.SUCCEEDED
    assert results == [42]


async def test_a_handler_may_run_a_runner_of_its_own(jobs: Jobs, autojump_clock: MockClock) -> None:
    async def parent(attempt: Attempt[None, None]) -> None:
        async with serving(attempt.jobs, number.handled_by(double)):
            await attempt.jobs.wait_finished(await attempt.jobs.enqueue(number, 1))

    async with serving(jobs, plain.handled_by(parent)):
        [ended] = await finished(jobs, await jobs.enqueue(plain, None))

    assert ended.state is State.SUCCEEDED


async def test_a_wait_that_is_cancelled_does_not_touch_the_job(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, plain.handled_by(Script(sleeps(5)))):
        job = await jobs.enqueue(plain, None)
        with trio.move_on_after(1) as scope:
            await jobs.wait_finished(job)
        [ended] = await finished(jobs, job)

    assert scope.cancelled_caught
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)


# KeyboardInterrupt.


def raises_interrupt() -> None:
    raise KeyboardInterrupt


def presses_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("interrupt", [raises_interrupt, presses_ctrl_c])
async def test_B1_a_keyboard_interrupt_in_a_handler_hands_back_stops_in_order_and_is_raised(
    interrupt: Callable[[], None], jobs: Jobs, autojump_clock: MockClock
) -> None:
    async def handle(attempt: Attempt[None, None]) -> None:
        await trio.sleep(5)
        interrupt()

    neighbour = Script(sleeps(8))
    job = await jobs.enqueue(plain, None)
    beside = await jobs.enqueue_many(other, [None] * 5)
    with pytest.raises(KeyboardInterrupt) as raised:
        await serve(jobs, [plain.handled_by(handle), other.handled_by(neighbour)], workers=4)

    assert type(raised.value) is KeyboardInterrupt
    row = await row_of(jobs, job)
    assert (row.state, row.attempt, row.interruptions) == (State.QUEUED, 0, 1)
    assert await outcomes(jobs, job) == ["interrupted"]
    # Those under way had their grace, the others were not started any more.
    states = [(await jobs.get(one)).state for one in beside]
    assert states == [State.SUCCEEDED] * 3 + [State.QUEUED] * 2
    assert now() == 8


@pytest.mark.parametrize("depth", [1, 3])
async def test_B1_a_keyboard_interrupt_among_other_errors_is_raised_alone(
    depth: int, jobs: Jobs, autojump_clock: MockClock
) -> None:
    error: BaseException = BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()])
    for _ in range(depth - 1):
        error = BaseExceptionGroup("", [OSError(), error])
    job = await jobs.enqueue(plain, None)
    with pytest.raises(KeyboardInterrupt):
        await serve(jobs, [plain.handled_by(Script(error))])

    assert (await jobs.get(job)).state is State.QUEUED


async def test_B1_a_keyboard_interrupt_during_the_grace_is_raised_too(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async def handle(attempt: Attempt[None, None]) -> None:
        await trio.sleep(5)
        raise KeyboardInterrupt

    job = await jobs.enqueue(plain, None)
    with pytest.raises(KeyboardInterrupt), trio.move_on_after(3):
        await serve(jobs, [plain.handled_by(handle)])

    assert ((await jobs.get(job)).state, now()) == (State.QUEUED, 5)


async def test_B1_a_job_that_was_interrupted_by_a_key_runs_again_later(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(KeyboardInterrupt(), None)
    job = await jobs.enqueue(plain, None)
    with pytest.raises(KeyboardInterrupt):
        await serve(jobs, [plain.handled_by(handle)])
    async with serving(jobs, plain.handled_by(handle)):
        [ended] = await finished(jobs, job)

    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)


async def test_B1_whatever_is_raised_the_neighbours_are_not_disturbed(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kinds = [Kind(name, None, retry=Retry(attempts=1)) for name in "abc"]
    errors = [SystemExit(1), BaseException("bare"), GeneratorExit()]
    handlers = [kind.handled_by(Script(error)) for kind, error in zip(kinds, errors, strict=True)]
    async with serving(jobs, *handlers, number.handled_by(double), workers=3) as runner:
        bad = [await jobs.enqueue(kind, None) for kind in kinds]
        normal = await jobs.enqueue_many(number, range(5))
        ended = await finished(jobs, *bad)
        others = await finished(jobs, *normal)
        statistics = runner.statistics()

    assert [job.state for job in ended] == [State.DEAD] * 3
    assert [job.unwrap() for job in others] == [0, 2, 4, 6, 8]
    assert (statistics.running, statistics.failed, statistics.succeeded) == (0, 3, 5)


# run_once.


async def test_run_once_runs_each_due_job_once_in_claim_order_and_says_how_many(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    order: list[int] = []

    async def handle(attempt: Attempt[int, int]) -> int:
        order.append(attempt.payload)
        await trio.sleep(1)
        if attempt.payload == 3:
            raise ValueError
        return 0

    eager = Kind("eager", int, int, retry=Retry(backoff=constant(0)))
    for payload, priority in [(1, 0), (2, 5), (3, 1), (4, 0)]:
        await jobs.enqueue(eager, payload, priority=priority)
    await jobs.enqueue(eager, 5, delay=2)
    handlers = [eager.handled_by(handle)]
    counts = [await run_once(jobs, handlers) for _ in range(3)]

    assert order == [2, 3, 1, 4, 3, 5, 3]
    assert counts == [4, 2, 1]


async def test_what_is_enqueued_or_becomes_due_meanwhile_waits_for_the_next_run_once(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(spawn_two, None)

    async with trio.open_nursery() as nursery:
        await jobs.enqueue(plain, None)
        await jobs.enqueue(plain, None, delay=1)
        nursery.start_soon(enqueue_after, jobs, 0.5)
        counts = [await run_once(jobs, [plain.handled_by(handle)])]
        at_first = handle.starts.copy()
        counts.append(await run_once(jobs, [plain.handled_by(handle)]))

    assert (at_first, counts) == ([0], [1, 4])


async def spawn_two(attempt: Attempt[None, None]) -> None:
    await attempt.jobs.enqueue(plain, None)
    await trio.sleep(2)
    await attempt.jobs.enqueue(plain, None)


async def enqueue_after(jobs: Jobs, seconds: float) -> None:
    await trio.sleep(seconds)
    await jobs.enqueue(plain, None)


async def test_run_once_with_nothing_to_do_returns_at_once(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    await jobs.enqueue(plain, None, delay=100)
    await jobs.enqueue(other, None)

    assert await run_once(jobs, [plain.handled_by(Script(None))]) == 0
    assert now() == 0


async def test_run_once_as_of_a_later_now_decides_what_is_due_backoff_and_deadlines(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(ValueError())
    due = await jobs.enqueue(plain, None, delay=1000)
    not_due = await jobs.enqueue(plain, None, delay=1001)
    expired = await jobs.enqueue(plain, None, delay=500, deadline=at(1000))
    count = await run_once(jobs, [plain.handled_by(handle)], now=at(1000))

    tried = await jobs.get(due)
    assert (count, handle.starts) == (1, [0])
    assert (tried.state, second(tried.run_at)) == (State.QUEUED, 1005)
    assert (await jobs.get(not_due)).state is State.QUEUED
    assert (await jobs.get(expired)).failure == Failure("deadline")


async def test_run_once_as_of_an_earlier_now_leaves_what_became_due_since(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    old = await jobs.enqueue(plain, None)
    since = await jobs.enqueue(plain, None, delay=50)
    await trio.sleep(100)
    count = await run_once(jobs, [plain.handled_by(Script(None))], now=at(10))

    assert count == 1
    assert (await jobs.get(old)).state is State.SUCCEEDED
    assert (await jobs.get(since)).state is State.QUEUED


async def test_run_once_as_of_an_earlier_now_leaves_what_was_enqueued_since(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    old = await jobs.enqueue(plain, None)
    await trio.sleep(100)
    since = await jobs.enqueue(plain, None)
    count = await run_once(jobs, [plain.handled_by(Script(None))], now=at(10))

    assert count == 1
    assert (await jobs.get(old)).state is State.SUCCEEDED
    assert (await jobs.get(since)).state is State.QUEUED


@pytest.mark.parametrize("whose", ["a running job's", "a waiting job's", "another kind's"])
async def test_run_once_as_of_an_earlier_now_does_not_spin_at_a_deadline_since(
    whose: str, jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Virtual time would stand still."""
    deadline = at(50)
    kind = other if whose == "another kind's" else plain
    for _ in range(3):
        await jobs.enqueue(plain, None)
    if whose == "a running job's":
        await jobs.enqueue(plain, None, deadline=deadline, priority=1)
    else:
        await jobs.enqueue(kind, None, delay=40, deadline=deadline)
    await trio.sleep(100)
    handle = Script(sleeps(10))
    count = await run_once(jobs, [plain.handled_by(handle)], now=at(10))

    assert count == (4 if whose == "a running job's" else 3)
    assert State.FAILED not in {job.state for job in await jobs.find()}


async def test_the_leases_of_run_once_are_kept_on_the_real_clock(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    lost = await jobs.enqueue(plain, None)
    await abandon(jobs, plain, lease=30)
    handlers = [plain.handled_by(Script(sleeps(300)))]
    while_leased = await run_once(jobs, handlers, now=at(1_000_000))
    await trio.sleep(30)
    async with serving(jobs, *handlers):
        counts = [await run_once(jobs, handlers, now=at(1_000_000))]
        ended = await finished(jobs, lost)

    assert while_leased == 0
    assert counts in ([0], [1])
    assert [(job.state, job.attempt) for job in ended] == [(State.SUCCEEDED, 2)]


async def test_run_once_takes_up_lost_jobs_gently_and_runs_them_all(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    await jobs.enqueue_many(plain, [None] * 10)
    await abandon(jobs, plain)
    handle = Script(sleeps(0.25))
    count = await run_once(jobs, [plain.handled_by(handle)], workers=10)

    assert count == 10
    assert handle.starts.count(0) == 1
    assert (await jobs.counts())[State.SUCCEEDED] == 10


async def test_run_once_with_several_workers_queues_and_an_unhandled_rule(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    quick, slow = Kind("quick", None, queue="quick"), Kind("slow", None, queue="slow")
    await jobs.enqueue_many(quick, [None] * 4)
    await jobs.enqueue_many(slow, [None] * 4)
    unknown = await jobs.enqueue(other, None)
    handle = Script(sleeps(1))
    count = await run_once(
        jobs,
        [quick.handled_by(handle), slow.handled_by(handle)],
        queues={"quick": 4, "slow": 2},
        unhandled="fail",
    )

    assert (count, now()) == (9, 2)
    assert (await jobs.get(unknown)).state is State.FAILED
    assert (await jobs.counts())[State.SUCCEEDED] == 8


async def test_run_once_that_is_cancelled_hands_back_what_it_had_in_hand(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    await jobs.enqueue_many(plain, [None] * 3)
    with trio.move_on_after(5):
        await run_once(jobs, [plain.handled_by(Script(forever))], workers=2)

    assert {(job.state, job.attempt) for job in await jobs.find()} == {(State.QUEUED, 0)}
    assert now() <= 5 + 10 + 1


@pytest.mark.parametrize("moment", [datetime(2020, 1, 1), "now", 5])
async def test_run_once_wants_an_aware_now(moment: Any, autojump_clock: MockClock) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises((TypeError, ValueError), match="now"):
            await run_once(jobs, [plain.handled_by(Script(None))], now=moment)


@pytest.mark.parametrize("step", ["begin", "claim", "queued_kinds"])
async def test_run_once_raises_when_the_store_refuses(step: str, autojump_clock: MockClock) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(plain, None)
        store.rule = lambda at: StoreBusy("locked") if at == step else None
        with pytest.raises(StoreBusy, match="locked"), trio.fail_after(60):
            await run_once(jobs, [plain.handled_by(Script(None))])
        store.rule = lambda at: None

        assert await run_once(jobs, [plain.handled_by(Script(None))]) == 1
        assert (await jobs.get(job)).state is State.SUCCEEDED


# Cancelled at every step.


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope after so many steps of tasks."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.count = 0
        self.scope = trio.CancelScope()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1
        if self.count == self.step:
            self.scope.cancel()


async def checkpoints(attempt: Attempt[Any, Any]) -> int:
    for _ in range(3):
        await trio.lowlevel.checkpoint()
    await attempt.publish(1)
    if attempt.token == 1 and attempt.job_id % 2:
        raise RetryLater(0.5)
    await trio.sleep(1)
    return 2


short = Kind("short", None, int)


async def a_short_script(where: str, folder: Path, step: int) -> int:
    """Serve a few jobs, cancel at that step, and look at what is left. How many steps it took."""
    store = make_store(where, folder, Trouble)
    returned: list[int] = []

    async def handle(attempt: Attempt[Any, Any]) -> int:
        result = await checkpoints(attempt)
        returned.append(attempt.job_id)
        return result

    instrument = CancelAtStep(step)
    async with trio_jobs.open_jobs(store) as jobs:
        trio.lowlevel.add_instrument(instrument)
        with instrument.scope, trio.move_on_after(20):
            async with serving(jobs, short.handled_by(handle), workers=2, grace=0.5):
                await jobs.enqueue_many(short, [None] * 3)
                await jobs.enqueue(short, None, delay=0.25)
                await trio.sleep(5)
        trio.lowlevel.remove_instrument(instrument)
        await settled()
        assert_no_transaction_is_open(store)
        left = await jobs.find()
        assert {job.state for job in left} <= {State.QUEUED, State.SUCCEEDED}, step
        done = {job.id for job in left if job.state is State.SUCCEEDED}
        assert done >= set(returned), step  # each that returned has its end
        async with serving(jobs, short.handled_by(handle)):
            ended = await finished(jobs, *left, within=20)
        assert {(job.state, job.result) for job in ended} <= {(State.SUCCEEDED, 2)}, step
        assert all(job.attempt == 1 for job in ended), step
    return instrument.count


@pytest.mark.parametrize("where", STORES)
def test_M4_a_runner_that_is_cancelled_at_any_step_leaves_nothing_open_and_nothing_stuck(
    where: str, tmp_path: Path
) -> None:
    def run(step: int) -> int:
        folder = tmp_path / str(step)
        folder.mkdir()
        clock = MockClock(autojump_threshold=0)
        return trio.run(partial(a_short_script, where, folder, step), clock=clock)

    steps = run(-1)
    assert steps > 50
    for step in range(1, steps + 1, 1 if where == "memory" else 4):
        run(step)


class Held(SqliteStore):
    """Counts what claims are told to leave alone."""

    held = 0

    def claim(self, claim: Claim) -> Claimed:
        self.held += len(claim.held)
        return super().claim(claim)


async def test_run_once_costs_the_same_for_each_of_many_jobs(autojump_clock: MockClock) -> None:
    """What was started need not be held, unless it became due again."""
    store = Held(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        await jobs.enqueue_many(plain, [None] * 300)
        started = await trio_jobs.run_once(
            jobs, [plain.handled_by(Script(ValueError()))], workers=3
        )

    assert started == 300
    assert store.held <= 4 * 300


async def test_a_runner_of_another_trio_run_is_refused_by_name(jobs: Jobs) -> None:
    def serve_elsewhere() -> None:
        trio.run(trio_jobs.serve, jobs, [])

    with pytest.raises(RuntimeError, match=r"belongs to another trio\.run"):
        await trio.to_thread.run_sync(serve_elsewhere)
