"""Background jobs that survive a crash, for Trio applications, on one SQLite file."""

# General layout:
#
# What an application writes down (inert): _kinds, with _codec for typed values <-> bytes, and
# what its handlers see, _handler.
# Every decision, pure: _lifecycle, on the values of _model, which _instants makes of times.
# Where rows are kept: the seam _store, and sqlite behind it, with _schema, _rows, _writes,
# _claims, _owners for the SQL, _connections and _checkpoints for the file, _drivers for the two
# drivers, _identity for who is dead.
# Off the Trio thread and back, time, and who is woken: _bridge (of each _batch), _clock; _hub in
# this process, _lookout (by _inotify) when another one has written.
# What callers use: _jobs, and see: _job; _waiters for those who wait for ends. What runs
# handlers: _runner, in front of _engine. A job's way is _pool (it is claimed, as _agenda says),
# _workers (it waits for one, as _pace says), _attempt (one start), _ends (its end is written);
# beside it _keeper (leases and limits), _probation (lost jobs), _unhandled (kinds that nobody
# here handles) and _repeats (what the store refused), and _statistics counts.
# The command: __main__, with _work, _display and the example, _demo.
# Settings: _checks, _retry.

from ._errors import (
    JobFailed as JobFailed,
    JobNotFound as JobNotFound,
    LeaseLost as LeaseLost,
    PayloadError as PayloadError,
    StateError as StateError,
    StoreBusy as StoreBusy,
    StoreError as StoreError,
    TrioJobsError as TrioJobsError,
)
from ._handler import Attempt as Attempt, Fail as Fail, RetryLater as RetryLater
from ._job import Job as Job, PastAttempt as PastAttempt
from ._jobs import Jobs as Jobs, open_jobs as open_jobs
from ._kinds import (
    Handler as Handler,
    Kind as Kind,
)
from ._model import Failure as Failure, State as State
from ._retry import (
    Retry as Retry,
    constant as constant,
    exponential as exponential,
    quadratic as quadratic,
)
from ._runner import Runner as Runner, run_once as run_once, serve as serve
from ._statistics import Statistics as Statistics
from .sqlite import SqliteStore as SqliteStore


def _say_where_errors_live(names: dict[str, object]) -> None:
    # Users import from here, so tracebacks say so. Not of other classes: the annotations of a
    # class are looked up in its module.
    for value in names.values():
        if isinstance(value, type) and issubclass(value, Exception):
            value.__module__ = __name__


_say_where_errors_live(globals())
