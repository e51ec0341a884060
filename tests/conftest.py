"""Fixtures shared by the tests: an open `Jobs` on every kind of store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis
import pytest
from stories import TIMES

import trio_jobs
from trio_jobs import Jobs, SqliteStore

# No deadline: how long one example takes is up to the machine.
hypothesis.settings.register_profile("stories", max_examples=40 * TIMES, deadline=None)
hypothesis.settings.load_profile("stories")

# What is said of both drivers is said in test_store.py; above the store they are the same.
STORES = ["memory", "file"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SqliteStore:
    """A store of each kind, not yet open."""
    if request.param == "memory":
        return SqliteStore(":memory:")
    return SqliteStore(tmp_path / "jobs.db")


@pytest.fixture
async def jobs(store: SqliteStore) -> AsyncIterator[Jobs]:
    """An open `Jobs` on each kind of store (under the clock the test asks for)."""
    async with trio_jobs.open_jobs(store) as opened:
        yield opened
