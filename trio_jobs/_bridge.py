"""Where the store's blocking calls leave the Trio thread, and where writes gather.

One thread writes. While it is in a commit, or waits for the lock, the writes of all tasks
gather; they go together in the next transaction, so that one fsync serves them all. Nothing
ever waits on a timer for company. A write that makes its batch fail is found by repeating them one
by one. Reads go to another connection in another thread.

Housekeeping that need not hold up a commit has a thread of its own while there is some.

An inline store has no threads: its batches are committed on the Trio thread, in the next
tick, by the same code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import outcome
import trio

from ._batch import MAX_BATCH, Done, Verb, Write, commit, committed_rows
from ._clock import Clock
from ._errors import StoreError
from ._hub import call_safely
from ._model import Change, Fence, Instant, NewJob, Refused, Row
from ._store import Store

T = TypeVar("T")

_log = logging.getLogger("trio_jobs")


class Bridge:
    """Carries calls from Trio tasks to one store.

    `tell` hears of every committed row, `tell_unsure` of a commit of unknown outcome.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tell: Callable[[Sequence[Row]], None],
        tell_unsure: Callable[[], None] = lambda: None,
    ) -> None:
        self.clock = clock
        self._store = store
        self._tell = tell
        self._tell_unsure = tell_unsure
        self._token = trio.lowlevel.current_trio_token()
        self._readers = trio.CapacityLimiter(1)
        # Not a list: thousands may be withdrawn at once, each from anywhere.
        self._pending: dict[Write, None] = {}
        self._gathered = threading.Condition()
        self._thread: threading.Thread | None = None
        self._checkpointer: threading.Thread | None = None
        self._flush_is_due = False
        self.is_closed = False
        self.is_inherited = False
        """We are in a process that was forked since: no thread works for us here."""
        self._begun = self._told = 0
        """Batches."""
        self._telling: trio.Event | None = None
        self._in_flight = 0
        self._quiet: trio.Event | None = None
        _open_bridges.add(self)

    async def open(self) -> None:
        """Open the store and start the writing thread. Raises what `Store.open` raises.

        Cancelled while others keep the store locked, it waits no longer, and leaves it closed.
        One that is open already, or about to be, is refused and not touched.
        """
        if self._store.inline:
            await trio.lowlevel.checkpoint()
            self._store.open()
            return
        await trio.lowlevel.checkpoint_if_cancelled()
        # Refused before there is a thread: what that does is taken back unseen.
        with _reserved(self._store):
            self._begin()
            try:
                await _in_thread(self._store.open, self._readers, abandon_on_cancel=True)
            except (trio.Cancelled, KeyboardInterrupt):
                with trio.CancelScope(shield=True):
                    await self._take_back_open()
                raise
            else:
                await self._start_writing()
            finally:
                self._end(1)

    async def _start_writing(self) -> None:
        try:
            self._thread = _started(self._work, "trio_jobs writer")
        except StoreError:
            with trio.CancelScope(shield=True):
                await self._take_back_open()
            raise

    async def _take_back_open(self) -> None:
        # The thread keeps its place in `_readers` until it is over. A close that comes before it
        # has begun goes unheard, and one that comes while it works waits for it.
        await _closed(self._store.close, lambda: not self._readers.borrowed_tokens)

    @trio.lowlevel.enable_ki_protection
    async def close(self) -> None:
        """Finish the commit that is under way; what still waits gets ClosedResourceError."""
        if self.is_inherited:
            return  # the store is the parent's
        with self._gathered:
            self.is_closed = True
            waiting, self._pending = list(self._pending), {}
            self._begun += 1
            for write in waiting:
                write.is_taken = True  # nobody can withdraw it any more
            self._gathered.notify()
        for write in waiting:
            write.result = outcome.capture(self.raise_if_closed)
        self._deliver(waiting)
        with trio.CancelScope(shield=True):
            if self._store.inline:
                self._store.close()
                await trio.lowlevel.checkpoint()
            else:
                self._begin()
                try:
                    await _closed(self._shut)
                finally:
                    self._end(1)
        _open_bridges.discard(self)

    # Writing. The verbs of the store that wait for a commit, or for the lock.

    async def add(
        self,
        jobs: Sequence[NewJob],
        claims_for: Callable[[Sequence[NewJob]], Sequence[Write]] | None = None,
    ) -> list[tuple[Row, bool]]:
        """What `claims_for` makes goes into the same transaction, and so takes these jobs
        without another one. It is only called when nothing stands in the way any more."""
        result: list[tuple[Row, bool]] = await self._write("add", jobs, claims_for=claims_for)
        return result

    async def apply(
        self, change: Change, written: Callable[[], None] = lambda: None
    ) -> Refused | None:
        """`written` is called in the order of the commits, before anybody is woken."""

        def done(result: outcome.Outcome[Any]) -> None:
            if isinstance(result, outcome.Value) and result.value == [None]:
                written()

        refused: list[Refused | None] = await self._write("apply", [change], done)
        return refused[0]

    async def renew(self, fences: Sequence[Fence], until: Instant) -> dict[Fence, bool]:
        # A cancelled renewal may go on, so it does not hold up a stop: nobody needs its answer.
        write = Write("renew", (fences, until))
        self.submit(write)
        result: dict[Fence, bool] = await self.outcome_of(write)
        return result

    async def version(self) -> Hashable:
        """What it is after every commit that was under way."""
        result: Hashable = await self._write("look", self.clock.now())
        return result

    @trio.lowlevel.enable_ki_protection
    def submit(self, *writes: Write) -> None:
        """Write them as soon as may be, together if they fit; for callers that do not wait."""
        self.raise_if_closed()
        with self._gathered:
            if not self._pending:  # else it knows
                self._gathered.notify()
            self._pending.update(dict.fromkeys(writes))
        self._begin(len(writes))
        if self._thread is None and not self._flush_is_due:
            self._flush_is_due = True
            self._token.run_sync_soon(self._flush)

    async def outcome_of(self, write: Write) -> Any:
        """Wait for what was submitted. A cancelled wait gives up; the write goes on."""
        if write.result is not None:
            await trio.lowlevel.checkpoint()
            return write.result.unwrap()

        done = write.done

        def abort(_: Any) -> trio.lowlevel.Abort:
            write.done = done
            return trio.lowlevel.Abort.SUCCEEDED

        return await _parked(write, abort)

    def raise_if_elsewhere(self) -> None:
        """Raise `RuntimeError` in another `trio.run` than the one that opened it."""
        if trio.lowlevel.current_trio_token() is not self._token:
            raise RuntimeError("this Jobs belongs to another trio.run; open one here")

    def raise_if_closed(self) -> None:
        """Raise `trio.ClosedResourceError` once `close` has begun, `StoreError` after a fork."""
        if self.is_inherited:
            raise StoreError("this Jobs was opened in another process, before a fork")
        if self.is_closed:
            raise trio.ClosedResourceError("this Jobs was closed when its block ended")

    @trio.lowlevel.enable_ki_protection
    async def _write(
        self,
        verb: Verb,
        items: Any,
        done: Done | None = None,
        claims_for: Callable[[Any], Sequence[Write]] | None = None,
    ) -> Any:
        self.raise_if_closed()
        self.raise_if_elsewhere()
        await trio.lowlevel.checkpoint_if_cancelled()
        write = Write(verb, items, done)
        claims = () if claims_for is None else claims_for(items)
        self.submit(write, *claims)

        def abort(_: Any) -> trio.lowlevel.Abort:
            # Taken into a transaction it will have an outcome, and the caller gets to know it.
            withdrawn = self.withdraw(write)
            return trio.lowlevel.Abort.SUCCEEDED if withdrawn else trio.lowlevel.Abort.FAILED

        return await _parked(write, abort)

    def withdraw(self, write: Write) -> bool:
        """Take it back; False if it is in a transaction already."""
        with self._gathered:
            if write not in self._pending:
                return False
            del self._pending[write]
        self._end(1)
        return True

    # Reading.

    @trio.lowlevel.enable_ki_protection
    async def read(self, call: Callable[[Store], T]) -> T:
        """Call one of the store's reading verbs. Cancelled, it goes on alone, until `close`."""
        self.raise_if_closed()
        self.raise_if_elsewhere()
        if self._store.inline:
            await trio.lowlevel.checkpoint()
            self.raise_if_closed()
            return call(self._store)
        self._begin()
        try:
            return await _in_thread(
                functools.partial(call, self._store), self._readers, abandon_on_cancel=True
            )
        except StoreError:
            self.raise_if_closed()  # closed while it waited for its turn
            raise
        finally:
            self._end(1)

    async def wait_told(self) -> None:
        """Wait until all is told that a read may have seen: the reading thread may be faster than
        the news of a commit, and whoever acts on what it read must not be ahead of a runner."""
        begun = self._begun
        while self._told < begun:
            if self._telling is None:
                self._telling = trio.Event()
            await self._telling.wait()

    async def wait_quiet(self) -> bool:
        """Wait until no call is under way. True if there was one."""
        if not self._in_flight:
            return False
        if self._quiet is None:
            self._quiet = trio.Event()
        await self._quiet.wait()
        return True

    # The Trio thread's side of a batch.

    def _begin(self, calls: int = 1) -> None:
        if self._in_flight == 0 and not self._store.inline:
            self.clock.hold()
        self._in_flight += calls

    def _end(self, calls: int) -> None:
        self._in_flight -= calls
        if self._in_flight == 0:
            if not self._store.inline:
                self.clock.release()
            if self._quiet is not None:
                self._quiet.set()
                self._quiet = None

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._pending:
            self._deliver(self._commit())
            self._tidy()
        if self._pending and not self._flush_is_due:
            self._flush_is_due = True
            self._token.run_sync_soon(self._flush)

    def _deliver(self, batch: Sequence[Write]) -> None:
        rows: list[Row] = []
        is_unsure = False
        for write in batch:
            assert write.result is not None
            if isinstance(write.result, outcome.Value):
                rows += committed_rows(write.verb, write.items, write.result.value)
            is_unsure = is_unsure or write.is_unsure
            if write.done is not None:
                call_safely(write.done, write.result)
        if rows:
            call_safely(self._tell, rows)
        if is_unsure:
            call_safely(self._tell_unsure)
        if batch:
            self._end(len(batch))
        self._told += 1
        if self._telling is not None:
            self._telling.set()
            self._telling = None

    # The writing thread.

    def _work(self) -> None:
        while True:
            with self._gathered:
                while not self._pending and not self.is_closed:
                    self._gathered.wait()
                if not self._pending:
                    return
            batch = self._commit()
            try:
                self._token.run_sync_soon(self._deliver, batch)
            except trio.RunFinishedError:
                return  # the loop ended without closing us: nobody is left to be told
            del batch  # until the next one there may be a day, and payloads may be large
            self._tidy()

    def _commit(self) -> Sequence[Write]:
        with self._gathered:
            self._begun += 1
            waiting = [*itertools.islice(self._pending, MAX_BATCH)]
        # Who comes while these wait for the lock has not waited for as long as it may.
        return commit(self._store, self._take, lambda: self._take(waiting))

    def _take(self, among: Iterable[Write] | None = None) -> list[Write]:
        """Nobody can withdraw them any more."""
        with self._gathered:
            gathered = self._pending if among is None else filter(self._pending.__contains__, among)
            batch = [*itertools.islice(gathered, MAX_BATCH)]
            for write in batch:
                del self._pending[write]
                write.is_taken = True
        return batch

    def _tidy(self) -> None:
        if self.is_closed:
            return
        try:
            is_more = self._store.tidy(self.clock.now())
            if is_more and self._store.inline:
                self._store.checkpoint()
            elif is_more and (self._checkpointer is None or not self._checkpointer.is_alive()):
                try:
                    self._checkpointer = _started(self._checkpoint, "trio_jobs checkpointer")
                except StoreError:
                    self._store.checkpoint()  # here it holds up those who write
        except BaseException:  # noqa: ASYNC103 - an application's clock raises anything
            # Housekeeping that fails costs space; without the writing thread nothing works.
            if not self.is_closed:
                _log.exception("the store could not be tidied up")  # noqa: ASYNC104

    def _checkpoint(self) -> None:
        try:
            self._store.checkpoint()
        except Exception:
            if not self.is_closed:
                _log.exception("the store could not be tidied up")

    def _shut(self) -> None:
        self._store.close()
        if self._thread is not None:
            self._thread.join()
        if self._checkpointer is not None:
            self._checkpointer.join()


@contextlib.contextmanager
def _reserved(store: Store) -> Iterator[None]:
    """`StoreError` if it is open in this process, or somebody else is opening it meanwhile."""
    mine = object()
    try:
        if _opening.setdefault(store, mine) is not mine or store.is_open:
            raise StoreError("this store is open already; every open_jobs needs one of its own")
        yield
    finally:
        if _opening.get(store) is mine:
            del _opening[store]


_opening: dict[Store, object] = {}


async def _in_thread(
    call: Callable[[], T],
    limiter: trio.CapacityLimiter,
    *,
    abandon_on_cancel: bool = False,
    or_here: bool = False,
) -> T:
    """Call it in one of Trio's threads. Where none can be had it raises `StoreError`, or calls it
    `or_here`: what has to be closed is closed, though Trio waits for it."""
    has_begun = False

    def begin() -> T:
        nonlocal has_begun
        has_begun = True
        return call()

    try:
        return await trio.to_thread.run_sync(
            begin, abandon_on_cancel=abandon_on_cancel, limiter=limiter
        )
    except RuntimeError as error:
        if has_begun:
            raise
        if or_here:
            return call()
        raise _no_thread(error) from error


async def _closed(close: Callable[[], None], is_last: Callable[[], bool] = lambda: True) -> None:
    """Call it in a thread, again and again until one call was the last, as asked before it. Only
    then raise a `KeyboardInterrupt`, however many come."""
    interrupt: KeyboardInterrupt | None = None
    is_over = False
    while not is_over:
        is_over = is_last()
        try:
            await _in_thread(close, trio.CapacityLimiter(1), or_here=True)
        except KeyboardInterrupt as error:  # that came before: the thread was not even begun
            interrupt, is_over = error, False
    if interrupt is not None:
        raise interrupt


def _started(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise _no_thread(error) from error
    return thread


def _no_thread(error: RuntimeError) -> StoreError:
    return StoreError(f"a thread is needed to reach the file: {error}")


async def _parked(write: Write, abort: Callable[[Any], trio.lowlevel.Abort]) -> Any:
    task = trio.lowlevel.current_task()
    first = write.done

    def done(result: outcome.Outcome[Any]) -> None:
        try:
            if first is not None:
                first(result)
        finally:
            trio.lowlevel.reschedule(task, result)

    write.done = done
    return await trio.lowlevel.wait_task_rescheduled(abort)


def bridges_here() -> list[Bridge]:
    """The open bridges of this Trio run."""
    token = trio.lowlevel.current_trio_token()
    return [bridge for bridge in _open_bridges if bridge._token is token]


_open_bridges: weakref.WeakSet[Bridge] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for bridge in _open_bridges:
        bridge.is_inherited = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
