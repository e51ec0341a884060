"""What the library raises; every error of its own derives from `TrioJobsError`.

No message holds a payload value: kinds, ids, field paths and type names only.
"""

from __future__ import annotations


class TrioJobsError(Exception):
    """The base of the library's errors, for a caller that wants to catch them all."""


class JobNotFound(TrioJobsError):
    """There is no job with this id, or it is of another kind than the one asked for."""


class JobFailed(TrioJobsError):
    """`Job.unwrap` of a job that ended without a result; the message is the stored one."""


class StateError(TrioJobsError):
    """The job's state does not allow this: a retry of a live job, a result before the end."""


class LeaseLost(TrioJobsError):
    """This attempt is over: its lease ended or somebody else has the job. Nothing was written."""


class PayloadError(TrioJobsError, ValueError):
    """A payload, result or published value does not fit its type, or is too large.

    The message names the path of the field, never its value.
    """


class StoreError(TrioJobsError):
    """The database refused: full disk, I/O error, corrupt file, and so on.

    Nothing was written, unless the message says that the outcome is unknown.
    """

    is_permanent: bool = False
    """Waiting cannot mend it (corrupt, not a database, read-only, a newer schema)."""

    is_outcome_unknown: bool = False
    """A commit failed, and so did finding out whether it took place."""


class StoreBusy(StoreError):
    """The database stayed locked by others for longer than `busy_timeout`; nothing was written."""
