"""A `Jobs` at the far end of virtual time, and in the hands of another loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from stories import Script, finished, serving
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Jobs, Kind, State

plain = Kind("plain", None)


async def test_time_goes_on_after_a_thousand_years(jobs: Jobs, autojump_clock: MockClock) -> None:
    async with serving(jobs, plain.handled_by(Script(None))):
        job = await jobs.enqueue(plain, None, delay=1000 * 365 * 86_400)
        [ended] = await finished(jobs, job, within=2000 * 365 * 86_400)

    assert ended.state is State.SUCCEEDED


async def test_a_jobs_of_another_loop_is_refused_at_once(tmp_path: Path) -> None:
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match=r"belongs to another trio\.run"):
                trio.run(jobs.enqueue, plain, None)
            with pytest.raises(RuntimeError, match=r"belongs to another trio\.run"):
                trio.run(jobs.get, 1)

        await trio.to_thread.run_sync(elsewhere)
        counts = await jobs.counts()

    assert counts[State.QUEUED] == 0
