"""What becomes of writes that share a transaction when that fails (the rest is in test_bridge)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import outcome
import pytest
from stories import new_job

from trio_jobs import StoreBusy, StoreError
from trio_jobs._batch import Write, commit
from trio_jobs._store import Store


class Fragile:
    """A store that takes anything. `begin` and `write` are called at the beginning of every
    transaction and with what is written in it; what they raise is raised."""

    def __init__(
        self,
        begin: Callable[[int], None] = lambda number: None,
        write: Callable[[Sequence[Any]], None] = lambda items: None,
    ) -> None:
        self.transactions = 0
        self._begin = begin
        self._write = write

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.transactions += 1
        self._begin(self.transactions)
        yield

    def add(self, jobs: Sequence[Any]) -> list[str]:
        self._write(jobs)
        return ["added" for _ in jobs]

    def apply(self, changes: Sequence[Any]) -> list[None]:
        self._write(changes)
        return [None for _ in changes]

    def claim(self, claim: object) -> object:
        self._write([claim])
        return claim


def committed(store: Fragile, *writes: Write) -> list[outcome.Outcome[Any]]:
    done = commit(cast(Store, store), lambda: writes, lambda: writes)
    assert done == writes
    return [cast("outcome.Outcome[Any]", write.result) for write in writes]


def fail_together(items: Sequence[Any]) -> None:
    if len(items) > 1:
        raise StoreError("database or disk is full")


def permanent() -> StoreError:
    error = StoreError("file is not a database")
    error.is_permanent = True
    return error


def unknown() -> StoreError:
    error = StoreError("the outcome is unknown")
    error.is_outcome_unknown = True
    return error


@pytest.mark.parametrize("refusal", [StoreBusy("database is locked"), permanent()], ids=repr)
@pytest.mark.parametrize("verb", ["add", "apply"])
def test_what_is_repeated_one_by_one_waits_for_the_lock_only_once(
    verb: Any, refusal: StoreError
) -> None:
    """Eight would wait eight times, and nobody hears of anything meanwhile."""

    def begin(number: int) -> None:
        if number >= 3:
            raise refusal

    store = Fragile(begin, fail_together)
    results = committed(store, *(Write(verb, [new_job()]) for _ in range(8)))

    assert store.transactions == 3
    assert [type(result) for result in results] == [outcome.Value, *[outcome.Error] * 7]
    errors = [result.error for result in results if isinstance(result, outcome.Error)]
    assert {type(error) for error in errors} == {type(refusal)}
    assert len({id(error) for error in errors}) == 7


def test_a_lock_met_by_one_change_is_the_answer_to_those_after_it() -> None:
    def begin(number: int) -> None:
        if number >= 4:
            raise StoreBusy("database is locked")

    store = Fragile(begin, fail_together)
    [one, other] = committed(store, Write("apply", [1, 2, 3, 4]), Write("add", [5]))

    assert store.transactions == 4
    assert isinstance(one, outcome.Value)
    assert [type(answer) for answer in one.value] == [type(None), *[StoreBusy] * 3]
    assert isinstance(other, outcome.Error)
    assert isinstance(other.error, StoreBusy)


def test_that_an_outcome_is_unknown_is_said_of_the_write_and_of_no_other() -> None:
    def write(items: Sequence[Any]) -> None:
        if len(items) > 1:
            raise StoreError("database or disk is full")
        if items == ["first"]:
            raise unknown()

    writes = [Write("apply", ["first", "second"]), Write("apply", ["third"])]
    results = committed(Fragile(write=write), *writes)

    [first, second] = results[0].unwrap()
    assert first.is_outcome_unknown
    assert second is None
    assert results[1].unwrap() == [None]
    assert [write.is_unsure for write in writes] == [True, False]


def test_a_claim_that_is_repeated_is_formed_anew() -> None:
    """Its instants are those of its transaction, and the leases count from them."""
    instants = iter([1, 2, 3])

    def write(items: Sequence[Any]) -> None:
        if items == [1]:
            raise StoreError("disk I/O error")

    claim = Write("claim", lambda: next(instants))
    [_, result] = committed(Fragile(write=write), Write("add", ["a"]), claim)

    assert result.unwrap() == claim.items == 2
