"""The store of a simulated process: the real one, with its seams in the world's hands, and a
count of the rare ways that it went."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Hashable, Sequence

from trio_jobs import SqliteStore, StoreError
from trio_jobs._model import Change, Claim, Claimed, Fence, Refused

from .world import Process


class Patience(random.Random):
    """Waits for a lock in a few long steps: in virtual time they cost the same as short ones."""

    def uniform(self, a: float, b: float) -> float:
        return 100 * super().uniform(a, b)


class SimulatedStore(SqliteStore):
    def __init__(self, process: Process) -> None:
        super().__init__(
            process.world.path, driver="apsw", busy_timeout=process.settings.busy_timeout
        )
        self.inline = True
        self.connect = process.connect
        self.sleep = process.world.sleep
        self.random = Patience(f"{process.world.plan.seed}/store/{process.name}")
        self.this_process = process.os_identity
        self.is_dead = process.world.is_dead
        self._process_here = process
        self._counts = process.world.coverage

    @property
    def identity(self) -> Hashable:
        """Processes do not hear each other."""
        return self._process_here.name

    def _open(self) -> None:
        super()._open()
        self._name = self._process_here.name  # with nothing of this machine in it

    def _commit(self) -> None:
        reported = len(self._process_here.world.history.faults)
        try:
            super()._commit()
        except StoreError as error:
            name = "commit unknown" if error.is_outcome_unknown else "commit failed"
            self._counts[name] += 1
            raise
        faults = self._process_here.world.history.faults[reported:]
        if any(fault.what == "commit reports an error" for fault in faults):
            self._counts["commit unknown and found"] += 1

    def tidy(self, now: int) -> bool:
        """Where the plan says so, checkpoint far more often than the real one would."""
        if self._process_here.settings.tidies and self.random.random() < 0.2:
            self._counts["checkpoint"] += 1
            with contextlib.suppress(StoreError):
                if self.random.random() < 0.5:
                    self.checkpoint()
                else:
                    self._checkpoints.under_lock(self.random.choice([0, 10**8]))
        return False  # no threads

    def apply(self, changes: Sequence[Change]) -> list[Refused | None]:
        answers = super().apply(changes)
        for change, refused in zip(changes, answers, strict=True):
            if refused is not None:
                ends = change.after.state is not change.before.state
                self._counts["end refused" if ends else "publication or cancel refused"] += 1
        return answers

    def renew(self, fences: Sequence[Fence], until: int) -> dict[Fence, bool]:
        renewed = super().renew(fences, until)
        self._counts["renewed"] += len(renewed)
        self._counts["renewal refused"] += len(fences) - len(renewed)
        return renewed

    def claim(self, claim: Claim) -> Claimed:
        claimed = super().claim(claim)
        self._counts["suspect taken alone"] += sum(job.is_suspect for job in claimed.jobs)
        self._counts["lost rows held back"] += claimed.lost_waiting
        self._counts["more than could be taken"] += claimed.more
        return claimed
