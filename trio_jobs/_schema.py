"""The tables in a SQLite file, as the steps that make them, and what their numbers mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ._model import State

# What the `state` column holds. A queued row is READY if it was due when it was enqueued, or
# when a claim found it due; else SCHEDULED. So a claim never walks over rows of the future.
READY: Final = 0
SCHEDULED: Final = 1
CODES: Final = {
    State.QUEUED: SCHEDULED,
    State.RUNNING: 2,
    State.SUCCEEDED: 3,
    State.FAILED: 4,
    State.DEAD: 5,
    State.CANCELLED: 6,
}
STATES: Final = {READY: State.QUEUED} | {code: state for state, code in CODES.items()}

# A file's version is how many of these steps it has seen; a released step is never edited.
# Every index is partial, so that finished rows cost nothing; `payload` comes last, so that
# reading the rest does not touch its pages. Ids come from `next_id`: never used twice.
# `writer` and `batch` name the last transaction, which tells after a failed commit whether
# it took place. `owner` is who claimed the row last; it means something while that runs, and
# owners' ids are never used twice either.
MIGRATIONS: Final[Sequence[Sequence[str]]] = [
    [
        """
        CREATE TABLE trio_jobs_meta (
            one INTEGER PRIMARY KEY CHECK (one = 1),
            version INTEGER NOT NULL,
            next_id INTEGER NOT NULL,
            next_owner INTEGER NOT NULL,
            writer TEXT NOT NULL,
            batch INTEGER NOT NULL
        )
        """,
        """
        INSERT INTO trio_jobs_meta (one, version, next_id, next_owner, writer, batch)
        VALUES (1, 0, 1, 1, '', 0)
        """,
        """
        CREATE TABLE trio_jobs_job (
            id INTEGER PRIMARY KEY,
            kind TEXT NOT NULL DEFAULT '',
            state INTEGER NOT NULL DEFAULT 0,
            attempt INTEGER NOT NULL DEFAULT 0,
            claims INTEGER NOT NULL DEFAULT 0,
            interruptions INTEGER NOT NULL DEFAULT 0,
            cancel_requested INTEGER NOT NULL DEFAULT 0,
            priority INTEGER NOT NULL DEFAULT 0,
            key TEXT,
            enqueued_at INTEGER NOT NULL DEFAULT 0,
            run_at INTEGER NOT NULL DEFAULT 0,
            deadline INTEGER,
            lease_until INTEGER,
            started_at INTEGER,
            finished_at INTEGER,
            result TEXT,
            failure TEXT,
            failure_type TEXT,
            owner INTEGER,
            payload BLOB NOT NULL DEFAULT ''
        )
        """,
        """
        CREATE INDEX trio_jobs_ready ON trio_jobs_job (kind, priority DESC, run_at)
        WHERE state = 0
        """,
        """
        CREATE INDEX trio_jobs_scheduled ON trio_jobs_job (kind, run_at)
        WHERE state = 1
        """,
        """
        CREATE INDEX trio_jobs_lease ON trio_jobs_job
            (lease_until, kind, cancel_requested, deadline, state, owner)
        WHERE state = 2
        """,
        """
        CREATE INDEX trio_jobs_cancel ON trio_jobs_job (claims)
        WHERE state = 2 AND cancel_requested = 1
        """,
        """
        CREATE INDEX trio_jobs_deadline ON trio_jobs_job (deadline)
        WHERE deadline IS NOT NULL AND state < 2
        """,
        """
        CREATE UNIQUE INDEX trio_jobs_key ON trio_jobs_job (kind, key)
        WHERE key IS NOT NULL AND state < 3
        """,
        """
        CREATE TABLE trio_jobs_owner (
            id INTEGER PRIMARY KEY,
            place TEXT NOT NULL,
            pid INTEGER NOT NULL,
            started INTEGER NOT NULL
        )
        """,
        """
        CREATE TABLE trio_jobs_past (
            job INTEGER NOT NULL,
            claim INTEGER NOT NULL,
            number INTEGER NOT NULL,
            started_at INTEGER NOT NULL,
            ended_at INTEGER NOT NULL,
            outcome TEXT NOT NULL,
            failure TEXT,
            failure_type TEXT,
            PRIMARY KEY (job, claim)
        ) WITHOUT ROWID
        """,
    ],
]
