"""The workers of a pool: long-lived tasks that run one claimed job after another.

A job costs no task, nursery, channel or scope. What is ready waits here for a worker; that
may be more than workers are free, where handlers are known to be short.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from ._attempt import Execution, leaves_of
from ._hub import call_safely
from ._kinds import Handler
from ._lifecycle import End
from ._model import Instant
from ._pace import PATIENCE, Ahead, Pace, ahead

if TYPE_CHECKING:
    from ._engine import Engine

_log = logging.getLogger("trio_jobs")


class Workers:
    """So many workers, and the executions that are ready for them.

    `ended` is told how each came to its end, when its worker goes on.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        handlers: Mapping[str, Handler],
        ended: Callable[[Execution, End], None],
    ) -> None:
        self.number = number
        self.owed = 0
        """Ends that the store refused: each counts as a worker's until it is written."""
        self._engine = engine
        self._ended = ended
        self._ready: deque[Execution] = deque()
        self._idle: list[trio.lowlevel.Task] = []
        self._busy = 0
        self._paces: dict[str, Pace] = {}
        self._long: set[Execution] = set()
        """Those under way that are not known to be short."""
        self._context = contextvars.copy_context()
        self.adopt(handlers.values())

    def adopt(self, handlers: Iterable[Handler]) -> None:
        """Serve more kinds."""
        # What must not be repeated is not claimed ahead: it would fail if this process died,
        # without a start. (Anew, not in place, as in the pool.)
        self._paces = self._paces | {
            one.kind.name: Pace() for one in handlers if one.kind.on_interrupt == "retry"
        }

    @property
    def room(self) -> int:
        """Workers for whom nothing is ready; below zero if something is claimed ahead."""
        return self.number - self._busy - self.owed - len(self._ready)

    @property
    def ready(self) -> int:
        return len(self._ready)

    def ahead(self) -> Ahead:
        """What may be ready beyond the free workers."""
        return ahead(self._paces.items(), self.number - len(self._long))

    def give(self, executions: Sequence[Execution]) -> None:
        self._ready.extend(executions)

    def start(self) -> None:
        """Wake as many as there is something ready for."""
        # One that comes from a job takes the next by itself; then one of these finds none.
        for _ in range(min(len(self._ready), len(self._idle))):
            trio.lowlevel.reschedule(self._idle.pop())

    def take_back(self) -> list[Execution]:
        """All that no worker has taken yet, the last first."""
        waiting = list(reversed(self._ready))
        self._ready.clear()
        return waiting

    def end_of_patience(self) -> Instant | None:
        """When the first of those that are ready has waited for as long as it may."""
        # With room for all, those that are ready are on their way to a worker.
        is_any_ahead = self.room < 0 and self._ready
        return self._ready[0].came_at + PATIENCE if is_any_ahead else None

    def are_long(self) -> None:
        """What was taken for short was not: those under way keep others waiting."""
        for execution in self._engine.handling():
            kind = execution.row.kind
            if kind in self._paces:
                self._paces[kind].took(PATIENCE)
                self._long.add(execution)

    @trio.lowlevel.enable_ki_protection
    async def work(self) -> None:
        """Run one claimed job after another."""
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()
            is_leaving = False
            latest: tuple[int, Handler | None] = (0, None)
            nurseries = len(trio.lowlevel.current_task().child_nurseries)
            try:
                # One scope for many jobs, because a new one would be a third of what Trio does
                # for a job. It is left when it was cancelled, or when a handler did not close
                # a scope or nursery of its own: nobody else's job must run in that.
                with trio.CancelScope() as scope:
                    status = _cancel_status()
                    while not scope.cancel_called and _is_innermost(scope, nurseries, status):
                        latest = await self._work_once(scope)
                    is_leaving = True
            except RuntimeError as error:  # "Cancel scope stack corrupted"; scopes are mended now
                if not is_leaving:
                    raise
                _log.error(
                    "job %d: %r left a cancel scope or nursery open", *latest, exc_info=error
                )
                task = trio.lowlevel.current_task()
                if len(task.child_nurseries) > nurseries:
                    for nursery in task.child_nurseries[nurseries:]:
                        self._engine.start(_watch_left_open, nursery, *latest)
                    self._engine.start(self.work)
                    self._engine.retired.append(task)
                    await _sleep_whatever_comes()

    async def _work_once(self, scope: trio.CancelScope) -> tuple[int, Handler]:
        execution = await self._next()
        pace = self._paces.get(execution.row.kind)
        if pace is None or not pace.is_short:
            self._long.add(execution)
        try:
            end = await execution.run(scope, self._engine.begins)
        except BaseException as error:  # noqa: ASYNC103 - an application's clock raises anything
            self._engine.fail(error)  # noqa: ASYNC104
            end = execution.not_started()  # what comes after the start is an end
        self._long.discard(execution)
        self._engine.progress()
        if execution.keyboard_interrupt is not None:
            self._engine.fail(execution.keyboard_interrupt)
        self._busy -= 1
        self._ended(execution, end)
        took = execution.took()
        if pace is not None and took is not None:
            pace.took(took)
        return execution.row.id, execution.handler

    async def _next(self) -> Execution:
        # Each job sees a context of its own; a task takes a new one up when it is resumed.
        task = trio.lowlevel.current_task()
        task.context = self._context.copy()
        if self._ready:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not self._ready:
            self._idle.append(task)

            def abort(_: Any) -> trio.lowlevel.Abort:
                self._idle.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        self._busy += 1
        return self._ready.popleft()


async def _sleep_whatever_comes() -> None:
    """For a task in which a nursery was left open: whoever closes that makes Trio resume this
    task, whatever it does by then. So it must do nobody's job any more."""
    while True:
        await trio.lowlevel.checkpoint_if_cancelled()
        with contextlib.suppress(RuntimeError):  # "Should never have been rescheduled!"
            await trio.sleep_forever()


async def wait_left_behind(task: trio.lowlevel.Task) -> None:
    """Cancel what runs in the nurseries that were left open in a task, and wait for its end.

    Not called in that task: if somebody closes such a nursery, Trio resumes it meanwhile.
    """
    for nursery in task.child_nurseries:
        nursery.cancel_scope.cancel()
        await _wait_empty(nursery)


async def _watch_left_open(nursery: trio.Nursery, job_id: int, handler: Handler | None) -> None:
    """Log what its tasks raise: nobody leaves it, so that nobody else gets to know."""
    try:
        await _wait_empty(nursery)
    finally:
        # Private to Trio. Should it go away, they are lost again.
        for error in getattr(nursery, "_pending_excs", ()):
            call_safely(_log_unless_cancelled, error, job_id, handler)


def _log_unless_cancelled(error: BaseException, job_id: int, handler: Handler | None) -> None:
    if not all(isinstance(leaf, trio.Cancelled) for leaf in leaves_of(error)):
        _log.error(
            "job %d: a task in the nursery that %r left open raised",
            job_id,
            handler,
            exc_info=error,
        )


async def _wait_empty(nursery: trio.Nursery) -> None:
    while nursery.child_tasks:
        lot = trio.lowlevel.ParkingLot()
        trio.lowlevel.add_parking_lot_breaker(next(iter(nursery.child_tasks)), lot)
        with contextlib.suppress(trio.BrokenResourceError):  # that one has ended
            await lot.park()


def without_left_open(
    errors: ExceptionGroup[RuntimeError], tasks: Sequence[trio.lowlevel.Task]
) -> ExceptionGroup[RuntimeError] | None:
    """All but Trio's words on these, which have ended with a nursery open.

    A task that does so ends with an error whatever it catches, and only who opened a nursery can
    close it. By then nothing is in it, and the log has said whose handler it was.
    """

    def is_left_open(error: Exception) -> bool:
        return isinstance(error, RuntimeError) and any(repr(task) in str(error) for task in tasks)

    return errors.split(is_left_open)[1]


def _is_innermost(scope: trio.CancelScope, nurseries: int, status: object) -> bool:
    if status is not None:
        return _cancel_status() is status
    return (
        trio.current_effective_deadline() == scope.deadline
        and len(trio.lowlevel.current_task().child_nurseries) == nurseries
    )


def _cancel_status() -> object:
    # Private to Trio, and the only thing that tells of every scope and nursery. Should it go
    # away, those that have a deadline or are nurseries are still told.
    return getattr(trio.lowlevel.current_task(), "_cancel_status", None)
