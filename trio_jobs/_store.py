"""What a store must do: some blocking verbs, each docstring a promise.

Plain Python: no event loop, no clock, every instant a parameter. A verb knows nothing of
handlers; nothing above this seam knows SQL. The tests of these promises run over every
implementation (tests/test_store.py).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ._model import (
    Change,
    Claim,
    Claimed,
    Fence,
    Instant,
    NewJob,
    PastStart,
    Refused,
    Row,
    State,
)


class Store(Protocol):
    """Keeps rows and applies changes.

    Writing verbs (`add`, `apply`, `renew`, `claim`) and `version` are called inside
    `transaction()` and from one thread at a time; reading verbs may be called from one other
    thread meanwhile and see only what is committed, `checkpoint` from a third. Every verb
    raises `StoreBusy` when the store stayed locked for the whole patience it was given, and
    `StoreError` when it failed otherwise; then nothing of the transaction is kept. In a
    process forked after `open` every verb raises `StoreError` and touches nothing.
    """

    @property
    def inline(self) -> bool:
        """Calls are so short that they may be made on the Trio thread (memory)."""
        ...

    @property
    def identity(self) -> Hashable:
        """Equal for two open stores exactly when they keep the same rows."""
        ...

    @property
    def log(self) -> str | None:
        """The path of a file that every commit appends to, whoever makes it, if there is one."""
        ...

    @property
    def is_open(self) -> bool:
        """From the beginning of `open` to the end of `close`, in the process that called it."""
        ...

    def open(self) -> None:
        """Make it usable, creating or migrating the schema in one transaction.

        Any number of processes may do so at once. Raises `StoreError` for a newer schema,
        a file that is not a database, cannot be read or cannot be written, and if it is open.
        """
        ...

    def close(self) -> None:
        """Give everything back. A wait for a lock that is under way ends as `StoreBusy`.

        Called from any thread, also while `open` is under way, and any number of times.
        """
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Everything inside happens, durably, or nothing of it does.

        The write lock is taken at the start. Where a commit fails, the store finds out
        whether it took place; if even that fails, the `StoreError` says that the outcome
        is unknown.
        """
        ...

    def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
        """Insert queued rows, with ids that rise in the given order and are never used again.

        A key that a queued or running row of the same kind has (also one just inserted)
        gives that row instead, and False: at most one live row has a (kind, key).
        """
        ...

    def add_on(self, connection: object, job: NewJob) -> tuple[Row, bool]:
        """The same for one job on the application's own connection, in its transaction.

        Called outside `transaction()`, from any thread. Raises `ValueError` when the
        connection is not one to the same rows, `TypeError` when it is none at all.
        """
        ...

    def apply(self, changes: Sequence[Change]) -> list[Refused | None]:
        """Make each change whose row still has the id, state, claims and cancel request of
        `before`, and the lease that was over, if that is said; write its record of a past start,
        keeping the newest 100 a job.

        What a decision leaves alone is left alone: `result` is written only if `before` and
        `after` differ in it, and the lease of a row that stays running never is (a renewal
        or a published result may have come since `before` was read). The other changes are
        refused, with the row as it is now, and do not hinder the rest. A change that would
        give a second live row the same (kind, key) is refused likewise.
        """
        ...

    def renew(self, fences: Sequence[Fence], until: Instant) -> dict[Fence, bool]:
        """Extend the leases of those that are still running under that fence, and only those.

        Returns them, each with whether its cancellation was requested.
        """
        ...

    def claim(self, claim: Claim) -> Claimed:
        """End what deadlines and losses end, then take due rows, all by the pure table.

        A running row is lost when its lease is over at `lease_now`, and also before if the
        store knows for certain that the process that claimed it is gone; it need not look
        more often than every half a second of `lease_now`.

        Queued rows of any kind at their deadline fail. Lost rows of any kind whose
        cancellation was requested or whose deadline passed end. Other lost rows of the
        served kinds go through `_lifecycle.lost`: those it ends are ended; those it
        queues again compete with the due rows and are moved only if they are taken: the
        first of them if it is a suspect and `takes_suspect`, else at most `lost_limit` that
        are none, else a suspect. A row is due at its
        `run_at`, and a row that was due when it was enqueued stays due if the clock is set
        back. Rows are taken by highest priority, then oldest `run_at`, then lowest id. Work
        that a deadline brings is bounded; what is left shows as a `next_deadline` in the past.
        """
        ...

    def version(self, now: Instant) -> Hashable:
        """Inside a transaction: not what it was before, if anybody else has committed since, or
        if a process that claimed is found to be gone (looked for as in `claim`, at `now`)."""
        ...

    def get(self, id: int) -> Row | None:
        """The row as committed last."""
        ...

    def is_owner_dead(self, fence: Fence) -> bool:
        """Whether it is known for certain that the process which holds this running row is gone;
        asked anew each time. False if the fence is over."""
        ...

    def finished(self, ids: Collection[int]) -> dict[int, Row | None]:
        """Those of them that have ended, and None for those that are not there."""
        ...

    def find(
        self, *, states: Collection[State], kind: str | None, after: int, limit: int
    ) -> list[Row]:
        """Rows with a larger id than `after` in any of `states` (none given: all), by id."""
        ...

    def history(self, id: int) -> list[PastStart] | None:
        """The past starts of a job by claim; None if there is no such job."""
        ...

    def counts(self, kind: str | None) -> dict[State, int]:
        """How many rows are in each state that has any."""
        ...

    def next_id(self) -> int:
        """The id that the next inserted job will get."""
        ...

    def queued_kinds(self) -> set[str]:
        """The names of all kinds of queued rows; costs the number of kinds, not of rows."""
        ...

    def is_unlocked(self) -> bool:
        """Whether nobody but this store holds the write lock right now; hardly waits."""
        ...

    def tidy(self, now: Instant) -> bool:
        """Housekeeping after commits (checkpoints): called by the writing thread, often;
        cheap when there is nothing to do; never raises for a lock it did not get.

        True: there is more to do, which need not hold up a commit: call `checkpoint`.
        """
        ...

    def checkpoint(self) -> None:
        """The rest of `tidy`: called in one other thread at a time, beside all other verbs."""
        ...
