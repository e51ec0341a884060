"""What is known of a run when it is judged: what clients and handlers saw, and what the file went
through. It decides nothing, and knows nothing of how the run was made.

There are two witnesses, and neither is the library's word. The `History` is written by clients
and handlers as things happen to them. The audit is written by triggers in the same file and the
same transaction as the change it is about, so it sees every way a row can change, also those
nobody thought of, and it is lost exactly when the change is.

An `at` is in nanoseconds and gives an order: in a simulation no two are equal, between real
processes they are as good as `Evidence.resolution` says. A `wall` is microseconds since 1970
by the clock of the process concerned, as the library stores its instants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Identity: TypeAlias = tuple[str, int, int]
"""(place, pid, started), as in the library's table of owners."""

# The history.

Verb: TypeAlias = Literal[
    "enqueue", "enqueue_many", "enqueue_on", "cancel", "retry", "get", "find", "wait_finished",
    "history", "counts", "prune", "run_once", "drain",
]  # fmt: skip
CallOutcome: TypeAlias = Literal["ok", "fail", "unknown"]


@dataclass(slots=True)
class Call:
    """A client's call. Until it is answered its outcome is unknown, and stays so if the process
    dies in it."""

    verb: Verb
    process: str
    invoked_at: int
    kind: str = ""
    payloads: tuple[str, ...] = ()
    """Of the jobs to be added, as they are stored (JSON text); each is used for one job only."""
    keys: tuple[str | None, ...] = ()
    """One for each payload; none given means no keys."""
    job: int | None = None
    """What is asked about, for `cancel`, `retry`, `get`, `wait_finished` and `history`."""
    outcome: CallOutcome = "unknown"
    answered_at: int | None = None
    ids: tuple[int, ...] = ()
    """The jobs that were returned."""
    states: tuple[str, ...] = ()
    """Their states, for `get`, `find` and `wait_finished`."""
    answer: bool | None = None
    """What `cancel` returned."""
    past: tuple[tuple[int, str], ...] | None = None
    """The claims and outcomes that `history` returned."""
    counts: Mapping[str, int] | None = None
    """What `counts` returned, by the names of the states."""
    error: str | None = None
    """The name of the exception, if it failed."""

    def ok(self, at: int, **returned: Any) -> None:
        self.outcome, self.answered_at = "ok", at
        for name, value in returned.items():
            setattr(self, name, value)

    def failed(self, at: int, error: BaseException | str) -> None:
        """It was refused: nothing of it has happened."""
        self.outcome, self.answered_at = "fail", at
        self.error = error if isinstance(error, str) else type(error).__name__

    def unclear(self, at: int) -> None:
        """It was answered by an error that says that the outcome is unknown."""
        self.answered_at = at


@dataclass(slots=True)
class Publication:
    value: str
    """JSON text."""
    begun_at: int
    outcome: CallOutcome = "unknown"
    answered_at: int | None = None


@dataclass(slots=True)
class Start:
    """One start of a handler. It has no end if its process died."""

    process: str
    job: int
    token: int
    attempt: int
    at: int
    wall: int | None = None
    """None where it was not this clock that decided (`run_once(now=...)`)."""
    published: list[Publication] = field(default_factory=list)
    ended_at: int | None = None
    ending: str | None = None
    """"returned", or the name of the exception that left it."""
    returned: str | None = None
    """JSON text."""
    is_stubborn: bool = False
    """It cannot be cancelled, or not soon."""
    is_refusal: bool | None = None
    """What it comes to ends the job for good; None where that is not known."""


@dataclass(slots=True)
class Life:
    """A process from its start to its end. A process that is started again is another life, and
    has another name, whatever pid it has."""

    process: str
    started_at: int
    identity: Identity | None = None
    killed_at: int | None = None
    ended_at: int | None = None
    """The orderly end."""
    runners: int | None = None
    """How many there were in it; None where that is not known."""
    news_takes: int = 0
    """For so many nanoseconds it may not know of what it has itself committed."""


@dataclass(slots=True)
class Stop:
    """All runners of a process were told to stop, and ended in order."""

    process: str
    begun_at: int
    ended_at: int | None = None
    is_hurried: bool = False
    """Cancelled, not only drained."""


@dataclass(slots=True)
class Fault:
    """Something that was made to go wrong. `process` is None for what hits all of them."""

    what: str
    at: int
    process: str | None = None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    level: int
    text: str
    """With its traceback, if it has one."""


@dataclass(slots=True)
class History:
    """What clients, handlers and the world's own operator saw."""

    calls: list[Call] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)

    def call(self, verb: Verb, process: str, at: int, **asked: Any) -> Call:
        call = Call(verb, process, at, **asked)
        self.calls.append(call)
        return call

    def start(
        self, process: str, job: int, token: int, attempt: int, at: int, wall: int | None = None
    ) -> Start:
        start = Start(process, job, token, attempt, at, wall)
        self.starts.append(start)
        return start

    def life(self, process: str, at: int, identity: Identity | None = None) -> Life:
        life = Life(process, at, identity)
        self.lives.append(life)
        return life


# The audit.

STATES: Final = {
    0: "queued", 1: "queued", 2: "running", 3: "succeeded", 4: "failed", 5: "dead", 6: "cancelled",
}  # fmt: skip
FINAL: Final = frozenset({"succeeded", "failed", "dead", "cancelled"})


def name_of(state: object) -> str:
    """As users know it. One that there is none of is for the judges to find."""
    return STATES[state] if isinstance(state, int) and state in STATES else f"state {state}"


_COLUMNS: Final = (
    "state", "kind", "key", "attempt", "claims", "interruptions", "cancel_requested", "priority",
    "enqueued_at", "run_at", "deadline", "lease_until", "started_at", "finished_at", "result",
    "failure", "failure_type", "owner",
)  # fmt: skip

REAL_TIME: Final = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000"
"""The only clock a plain connection has; its unit is the millisecond."""


def audit_schema(*, at: str = REAL_TIME, who: str = "NULL", wall: str = "NULL") -> list[str]:
    """The statements that put the audit into a file which has the library's tables already.

    `at`, `who` (the name of the process that makes the change) and `wall` are SQL expressions.
    A connection that lacks a function they name cannot change a job any more.
    """
    columns = ", ".join(_COLUMNS)

    def trigger(event: str, row: str, payload: str) -> str:
        values = ", ".join(f"{row}.{column}" for column in _COLUMNS)
        return f"""
            CREATE TRIGGER audit_{event} AFTER {event} ON trio_jobs_job BEGIN
                INSERT INTO audit_job (at, who, wall, event, job, payload, {columns})
                VALUES ({at}, {who}, {wall}, '{event}', {row}.id, {payload}, {values});
            END
        """

    return [
        f"""
        CREATE TABLE audit_job (
            seq INTEGER PRIMARY KEY, at INTEGER, who TEXT, wall INTEGER, event TEXT, job INTEGER,
            payload, {columns}
        )
        """,
        trigger("insert", "new", "CAST(new.payload AS TEXT)"),
        trigger("update", "new", "NULL"),
        trigger("delete", "old", "NULL"),
        """
        CREATE TABLE audit_past (
            seq INTEGER PRIMARY KEY, job, claim, outcome, failure, failure_type
        )
        """,
        """
        CREATE TRIGGER audit_past_insert AFTER INSERT ON trio_jobs_past BEGIN
            INSERT INTO audit_past (job, claim, outcome, failure, failure_type)
            VALUES (new.job, new.claim, new.outcome, new.failure, new.failure_type);
        END
        """,
        "CREATE TABLE audit_owner (owner INTEGER, place TEXT, pid INTEGER, started INTEGER)",
        """
        CREATE TRIGGER audit_owner_insert AFTER INSERT ON trio_jobs_owner BEGIN
            INSERT INTO audit_owner VALUES (new.id, new.place, new.pid, new.started);
        END
        """,
    ]


@dataclass(frozen=True, slots=True)
class Image:
    """A row of the table of jobs at some moment."""

    state: str
    kind: str
    key: str | None = None
    attempt: int = 0
    claims: int = 0
    interruptions: int = 0
    cancel_requested: int = 0
    priority: int = 0
    enqueued_at: int = 0
    run_at: int = 0
    deadline: int | None = None
    lease_until: int | None = None
    started_at: int | None = None
    finished_at: int | None = None
    result: str | None = None
    failure: str | None = None
    failure_type: str | None = None
    owner: int | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one row: `before` is None where it was inserted, `after` where deleted."""

    seq: int
    at: int
    who: str | None
    wall: int | None
    job: int
    before: Image | None
    after: Image | None
    payload: str | None = None
    """Of an inserted row, as text."""
    outcome: str | None = None
    """Of a step that ends a claim: what the record of that start says. None: there is none."""
    past_failure: str = ""
    """All that the same record says of why."""

    @property
    def is_claim(self) -> bool:
        return (
            self.after is not None
            and self.after.state == "running"
            and (self.before is None or self.before.state != "running")
        )

    @property
    def ends_claim(self) -> bool:
        return (
            self.before is not None
            and self.before.state == "running"
            and (self.after is None or self.after.state != "running")
        )


@dataclass(frozen=True, slots=True)
class Audit:
    steps: Sequence[Step] = ()
    owners: Mapping[int, Identity] = field(default_factory=dict)


def read_audit(path: str) -> Audit:
    """Read the audit with the standard library's driver.

    Only where no connection of another driver has the file open in this process; else
    `audit_of` with rows that were read through that driver.
    """
    import contextlib
    import sqlite3

    with contextlib.closing(sqlite3.connect(path)) as connection:
        return audit_of(*(connection.execute(query).fetchall() for query in AUDIT_QUERIES))


AUDIT_QUERIES: Final = (
    f"SELECT seq, at, who, wall, event, job, payload, {', '.join(_COLUMNS)} FROM audit_job"
    " ORDER BY seq",
    "SELECT job, claim, outcome, failure, failure_type FROM audit_past ORDER BY seq",
    "SELECT owner, place, pid, started FROM audit_owner",
)
"""What `audit_of` is made from."""


def audit_of(
    jobs: Iterable[Sequence[Any]], past: Iterable[Sequence[Any]], owners: Iterable[Sequence[Any]]
) -> Audit:
    pasts = {(job, claim): (outcome, f"{why} {type}") for job, claim, outcome, why, type in past}
    images: dict[int, Image] = {}
    steps = []
    for seq, at, who, wall, event, job, payload, state, *columns in jobs:
        before = images.pop(job, None)
        after = None if event == "delete" else Image(name_of(state), *columns)
        step = Step(seq, at, who, wall, job, before, after, payload)
        if after is not None:
            images[job] = after
        if before is not None and step.ends_claim:
            outcome, why = pasts.get((job, before.claims), (None, ""))
            step = dataclasses.replace(step, outcome=outcome, past_failure=why)
        steps.append(step)
    return Audit(steps, {owner: (place, pid, since) for owner, place, pid, since in owners})


# Together.


@dataclass(frozen=True, slots=True)
class Rules:
    """What a kind promises."""

    attempts: int
    on_interrupt: Literal["retry", "fail"] = "retry"
    timeout: float | None = None
    """Seconds; None where there is none, or where it is not asked for."""
    backoff: float | None = None
    """Seconds, the same after each attempt."""


@dataclass(frozen=True, slots=True)
class Rest:
    """How everything was found when all should have been done."""

    at: int
    can_write: bool = True
    """Another connection got the write lock at once."""
    integrity: str = "ok"
    log_bytes: int = 0
    running: int = 0
    """Handlers under way, by the runners' own statistics."""
    trouble: str | None = None
    states: Mapping[int, str] = field(default_factory=dict)
    """Of all jobs, as read from their table."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a judge is given. `rest` is None if nothing was healed and waited for."""

    history: History
    audit: Audit
    rules: Mapping[str, Rules]
    canary: str = ""
    """A word that is in every payload; "" where there is none."""
    raised: str = ""
    """A word that is in the text of every exception: it may be logged, and not be stored."""
    rest: Rest | None = None
    settle_by: int | None = None
    """By when everything had to have ended."""
    calm_since: int | None = None
    """From when on nothing goes wrong, all clocks are right, and a worker is free for any job."""
    prompt: int = 0
    """Nanoseconds within which what is asked for then has to begin."""
    resolution: int = 0
    """Nanoseconds by which two `at` of different processes may be wrong."""
    max_log: int = 32_000_000
    """Bytes the write-ahead log may have at rest."""
    endless: str = ""
    """What was done over and over when the run was broken off; "" if it came to an end."""
    starts_are_complete: bool = True
    """Every start of a handler is in the history (a process may die before it has written it)."""
