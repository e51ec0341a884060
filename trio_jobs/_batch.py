"""Writes that go to the store together, and how each gets its own outcome.

Nothing here knows a thread or Trio: `commit` is called where blocking is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Literal, TypeAlias

import outcome

from ._errors import StoreBusy, StoreError
from ._model import Change, Claimed, Refused, Row
from ._store import Store

# More answers in one tick make the last of them late: 1000 tasks woken at once, 13 ms.
MAX_BATCH: Final = 250

Verb: TypeAlias = Literal["apply", "add", "renew", "claim", "look"]
Done: TypeAlias = Callable[[outcome.Outcome[Any]], None]


class Write:
    """What one caller wants written, and then what became of it.

    `done` is called on the Trio thread when `result` holds the outcome. `items` may be a
    function: then it is called when the batch is formed, so that what it says is fresh.
    Where one of several changes fails, the result has its error in the place of an answer.

    A claim with `unless` is a look: its result is None, and nothing was claimed, if that is
    still the store's version. Then `version` is what it is now.
    """

    __slots__ = ("done", "is_taken", "items", "result", "unless", "verb", "version")

    def __init__(self, verb: Verb, items: Any, done: Done | None = None) -> None:
        self.verb: Verb = verb
        self.items = items
        self.done = done
        self.is_taken = False
        self.result: outcome.Outcome[Any] | None = None
        self.unless: Hashable = None
        self.version: Hashable = None


def commit(
    store: Store, take: Callable[[], Sequence[Write]], waited: Callable[[], Sequence[Write]]
) -> Sequence[Write]:
    """Write what `take` gives, and return it, each with its result; never raises.

    It is taken when the lock is held, for what was taken cannot be withdrawn any more, and more
    gathers meanwhile. Where the lock was not got, those have failed that `waited` gives.
    """
    batch: Sequence[Write] = ()
    try:
        with store.transaction():
            batch = take()
            for write in batch:
                if callable(write.items):
                    write.items = write.items()
            results = _perform(store, batch)
        for write, result in zip(batch, results, strict=True):
            write.result = outcome.Value(result)
    except BaseException as error:  # noqa: ASYNC103 - an application's clock raises anything
        batch = batch or waited()
        hopeless = isinstance(error, StoreBusy) or (
            isinstance(error, StoreError) and (error.is_permanent or error.is_outcome_unknown)
        )
        for write in batch:
            if not hopeless and len(batch) > 1:
                _commit_alone(store, write)
            elif not hopeless and write.verb == "apply" and len(write.items) > 1:
                write.result = outcome.Value(_one_by_one(store, write.items))
            else:
                write.result = outcome.Error(copy_of(error))  # noqa: ASYNC104
    return batch


def _commit_alone(store: Store, write: Write) -> None:
    commit(store, lambda: [write], lambda: [write])


def _one_by_one(store: Store, changes: Sequence[Change]) -> list[Refused | BaseException | None]:
    answers: list[Refused | BaseException | None] = []
    for change in changes:
        alone = Write("apply", [change])
        _commit_alone(store, alone)
        if isinstance(alone.result, outcome.Error):
            answers.append(alone.result.error)
        else:
            assert isinstance(alone.result, outcome.Value)
            answers += alone.result.value
    return answers


def _perform(store: Store, batch: Sequence[Write]) -> list[Any]:
    """One statement's worth for all who ask the same; ends first, so that a claim sees them."""
    results: dict[int, Any] = {}
    changes = [write for write in batch if write.verb == "apply"]
    if changes:
        refusals = iter(store.apply([change for write in changes for change in write.items]))
        for write in changes:
            results[id(write)] = [next(refusals) for _ in write.items]
    adds = [write for write in batch if write.verb == "add"]
    if adds:
        added = iter(store.add([job for write in adds for job in write.items]))
        for write in adds:
            results[id(write)] = [next(added) for _ in write.items]
    for write in batch:
        if write.verb == "renew":
            results[id(write)] = store.renew(*write.items)
    for write in batch:
        if write.verb == "claim":
            results[id(write)] = _claim(store, write)
    for write in batch:
        if write.verb == "look":
            results[id(write)] = store.version(write.items)
    return [results[id(write)] for write in batch]


def _claim(store: Store, write: Write) -> Claimed | None:
    if write.unless is not None:
        write.version = store.version(write.items.lease_now)
        if write.version == write.unless:
            return None
    return store.claim(write.items)


def committed_rows(verb: Verb, items: Any, result: Any) -> list[Row]:
    if verb == "add":
        return [row for row, is_new in result if is_new]
    if verb == "apply":
        pairs = zip(items, result, strict=True)
        return [change.after for change, refused in pairs if refused is None]
    if verb == "claim":
        claimed: Claimed | None = result
        return [] if claimed is None else [change.after for change in claimed.settled]
    return []


def copy_of(error: BaseException) -> BaseException:
    # Each caller raises its own: one object raised in many tasks mixes their tracebacks.
    try:
        copy = type(error)(*error.args)
    except Exception:
        return error
    copy.__cause__ = error
    if isinstance(error, StoreError) and isinstance(copy, StoreError):
        copy.is_permanent = error.is_permanent
        copy.is_outcome_unknown = error.is_outcome_unknown
    return copy
