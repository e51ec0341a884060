"""Writes that go to the store together, and how each gets its own outcome.

Nothing here knows a thread or Trio: `commit` is called where blocking is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import outcome

from ._errors import StoreBusy, StoreError
from ._model import Claimed, Row
from ._store import Store

# More answers in one tick make the last of them late: 1000 tasks woken at once, 13 ms.
MAX_BATCH: Final = 250

Verb: TypeAlias = Literal["apply", "add", "renew", "claim", "look"]
Done: TypeAlias = Callable[[outcome.Outcome[Any]], None]


class Write:
    """What one caller wants written, and then what became of it.

    `done` is called on the Trio thread when `result` holds the outcome. Instead of `items` it may
    have a function that gives them whenever a transaction has begun, so that what they say is
    fresh. Where one of several changes fails, the result has its error in the place of an answer;
    `is_unsure` if it is known of one of them that nobody knows its outcome.

    A claim with `unless` is a look: its result is None, and nothing was claimed, if that is
    still the store's version. Then `version` is what it is now.
    """

    __slots__ = (
        "done", "form", "is_taken", "is_unsure", "items", "result", "unless", "verb", "version",
    )  # fmt: skip

    def __init__(self, verb: Verb, items: Any, done: Done | None = None) -> None:
        self.verb: Verb = verb
        self.form: Callable[[], Any] | None = items if callable(items) else None
        self.items: Any = items
        self.done = done
        self.is_taken = False
        self.is_unsure = False
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
                if write.form is not None:
                    write.items = write.form()
            results = _perform(store, batch)
        for write, result in zip(batch, results, strict=True):
            write.result = outcome.Value(result)
    except BaseException as error:  # noqa: ASYNC103 - an application's clock raises anything
        batch = batch or waited()
        if _is_for_all(error) or _is_unsure(error):
            _fail(batch, error)
        else:
            _repeat(store, batch, error)  # noqa: ASYNC104
    return batch


def _repeat(store: Store, batch: Sequence[Write], error: BaseException) -> None:
    """One by one, so that none fails because of another; until all would."""
    for number, write in enumerate(batch):
        if len(batch) > 1:
            _commit_alone(store, write)
        elif write.verb == "apply" and len(write.items) > 1:
            changes = [Write("apply", [change]) for change in write.items]
            _repeat(store, changes, error)
            write.result = outcome.Value([_answer_of(change) for change in changes])
            write.is_unsure = any(change.is_unsure for change in changes)
        else:
            _fail([write], error)
        of_all = next(filter(_is_for_all, _failures_of(write)), None)
        if of_all is not None:
            # Each would wait for the lock for as long once more, and nobody hears meanwhile.
            _fail(batch[number + 1 :], of_all)
            return


def _commit_alone(store: Store, write: Write) -> None:
    commit(store, lambda: [write], lambda: [write])


def _fail(batch: Sequence[Write], error: BaseException) -> None:
    for write in batch:
        write.result = outcome.Error(copy_of(error))
        write.is_unsure = _is_unsure(error)


def _is_for_all(error: BaseException) -> bool:
    """The store refused whatever it would have been asked."""
    return isinstance(error, StoreBusy) or (
        isinstance(error, StoreError) and error.is_permanent and not error.is_outcome_unknown
    )


def _is_unsure(error: BaseException) -> bool:
    return isinstance(error, StoreError) and error.is_outcome_unknown


def _answer_of(write: Write) -> Any:
    """To its one change: None, Refused, or an error."""
    if isinstance(write.result, outcome.Error):
        return write.result.error
    assert isinstance(write.result, outcome.Value)
    [answer] = write.result.value
    return answer


def _failures_of(write: Write) -> Iterable[BaseException]:
    if isinstance(write.result, outcome.Error):
        return [write.result.error]
    if write.verb != "apply" or not isinstance(write.result, outcome.Value):
        return []
    return [answer for answer in write.result.value if isinstance(answer, BaseException)]


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
