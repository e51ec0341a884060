"""The SQL of adding rows, of applying changes to them and of renewing their leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from ._drivers import Connection, Value
from ._model import Change, Fence, Instant, NewJob, PastStart, Refused, Row, State
from ._rows import GET, ROW, array, as_json, chunks, code_of, many, mend, row_of, text_of
from ._schema import CODES

Name: TypeAlias = tuple[str, str | None]
"""(kind, key)"""

_MAX_PAST: Final = 100
"""How many past starts of a job are kept."""

_INSERT: Final = """
INSERT INTO trio_jobs_job
    (id, kind, state, priority, key, enqueued_at, run_at, deadline, payload)
{rows}
"""

_LIVE: Final = f"""
WITH wanted(wanted_kind, wanted_key) AS ({{rows}})
SELECT {ROW}
FROM wanted CROSS JOIN trio_jobs_job INDEXED BY trio_jobs_key
WHERE kind = wanted_kind AND key = wanted_key AND key IS NOT NULL AND state < 3
"""


def add(
    connection: Connection, jobs: Sequence[NewJob], reserve: Callable[[int], int]
) -> list[tuple[Row, bool]]:
    """`reserve` gives the first of so many new ids; called if there is anything to insert."""
    keyed = [job for job in jobs if job.key is not None]
    if not keyed:
        return [(row, True) for row in _insert(connection, jobs, reserve)]
    holders = live_of(connection, keyed)
    names = set(holders)
    is_new: list[bool] = []
    for job in jobs:
        is_new.append(job.key is None or name_of(job) not in names)
        names.add(name_of(job))
    inserted = iter(
        _insert(connection, [job for job, new in zip(jobs, is_new, strict=True) if new], reserve)
    )
    added: list[tuple[Row, bool]] = []
    for job, new in zip(jobs, is_new, strict=True):
        if new:
            holders[name_of(job)] = next(inserted)
        added.append((holders[name_of(job)], new))
    return added


def name_of(job: NewJob) -> Name:
    return (job.kind, job.key)


def live_of(connection: Connection, jobs: Sequence[NewJob]) -> dict[Name, Row]:
    """The queued and running rows that have the key of one of these."""
    names = list(dict.fromkeys(name_of(job) for job in jobs if job.key is not None))
    rows = [
        row_of(record)
        for chunk in chunks(names)
        for record in connection.execute(*many(_LIVE, chunk))
    ]
    for row in rows:
        if row.state.is_final:  # as it is read; it was edited by hand
            mend(connection, row.id)
    return {(row.kind, row.key): row for row in rows if not row.state.is_final}


def _insert(
    connection: Connection, jobs: Sequence[NewJob], reserve: Callable[[int], int]
) -> list[Row]:
    if not jobs:
        return []
    rows = [_new_row(id, job) for id, job in enumerate(jobs, reserve(len(jobs)))]
    values = [_new_values(row, job) for row, job in zip(rows, jobs, strict=True)]
    for chunk in chunks(values):
        connection.execute(*many(_INSERT, chunk))
    return rows


def _new_row(id: int, job: NewJob) -> Row:
    return Row(
        id=id,
        kind=job.kind,
        state=State.QUEUED,
        attempt=0,
        claims=0,
        interruptions=0,
        cancel_requested=False,
        priority=job.priority,
        key=job.key,
        enqueued_at=job.enqueued_at,
        run_at=job.run_at,
        deadline=job.deadline,
        lease_until=None,
        started_at=None,
        finished_at=None,
        result=None,
        failure=None,
    )


def _new_values(row: Row, job: NewJob) -> tuple[Value, ...]:
    return (
        row.id,
        row.kind,
        code_of(row),
        row.priority,
        row.key,
        row.enqueued_at,
        row.run_at,
        row.deadline,
        job.payload if job.raw else job.payload.decode(),
    )


# Applying.

# Those whose row is no longer what the decision was made on.
_STALE: Final = """
SELECT json_group_array(id) FROM (
    SELECT
        json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS state,
        json_extract(value, '$[2]') AS claims, json_extract(value, '$[3]') AS cancel_requested,
        json_extract(value, '$[4]') AS lease_over
    FROM json_each(?)
) AS before
WHERE (before.state, before.claims, before.cancel_requested, before.lease_over) IS NOT (
    SELECT max(job.state, 1), job.claims, job.cancel_requested,
        iif(before.lease_over IS NULL, NULL, job.lease_until)
    FROM trio_jobs_job AS job WHERE job.id = before.id
)
"""

# The same for rows that should be running, as {id: claims}: JSON in JSON takes four times as long.
_NOT_HELD: Final = """
SELECT json_group_array(CAST(held.key AS INTEGER)) FROM json_each(?) AS held
WHERE (2, held.value, 0) IS NOT (
    SELECT job.state, job.claims, job.cancel_requested
    FROM trio_jobs_job AS job WHERE job.id = CAST(held.key AS INTEGER)
)
"""

# What most ends are, as one parameter: with a busy loop, binding thirteen for each row takes
# longer than all that SQLite does for them.
_SUCCEED: Final = """
INSERT INTO trio_jobs_job (id, finished_at, result)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')
FROM json_each(?) WHERE true
ON CONFLICT (id) DO UPDATE SET
    state = 3,
    finished_at = excluded.finished_at,
    lease_until = NULL,
    result = excluded.result,
    failure = NULL,
    failure_type = NULL
"""

_UPDATE: Final = """
WITH new(
    id, state, attempt, claims, interruptions, cancel_requested, run_at, lease_until, started_at,
    finished_at, result, failure, failure_type
) AS ({rows})
INSERT INTO trio_jobs_job AS job (
    id, state, attempt, claims, interruptions, cancel_requested, run_at, lease_until, started_at,
    finished_at, result, failure, failure_type
)
SELECT * FROM new WHERE true
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state,
    attempt = excluded.attempt,
    claims = excluded.claims,
    interruptions = excluded.interruptions,
    cancel_requested = excluded.cancel_requested,
    run_at = excluded.run_at,
    lease_until = CASE WHEN job.state = 2 AND excluded.state = 2 THEN job.lease_until
        ELSE excluded.lease_until END,
    started_at = excluded.started_at,
    finished_at = excluded.finished_at,
    result = ifnull(CAST(excluded.result AS TEXT), job.result),
    failure = excluded.failure,
    failure_type = excluded.failure_type
"""

_INSERT_PAST: Final = """
INSERT OR REPLACE INTO trio_jobs_past
    (job, claim, number, started_at, ended_at, outcome, failure, failure_type)
{rows}
"""

_PRUNE: Final = f"""
DELETE FROM trio_jobs_past
WHERE job = :job AND claim <= (
    SELECT claim FROM trio_jobs_past WHERE job = :job
    ORDER BY claim DESC LIMIT 1 OFFSET {_MAX_PAST}
)
"""

_HOLDER: Final = """
SELECT id FROM trio_jobs_job INDEXED BY trio_jobs_key
WHERE key IS NOT NULL AND state < 3
    AND kind = (SELECT kind FROM trio_jobs_job WHERE id = :id)
    AND key = (SELECT key FROM trio_jobs_job WHERE id = :id)
"""


def apply(connection: Connection, changes: Sequence[Change]) -> list[Refused | None]:
    refused: list[Refused | None] = []
    for wave in _waves(changes):
        refused += _apply_wave(connection, wave)
    return refused


def _waves(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Changes that may be made in any order: none is of a job, or takes a key, that another of
    its wave is about."""
    wave: list[Change] = []
    ids: set[int] = set()
    for change in changes:
        if change.before.id in ids or (wave and _takes_key(wave[-1])) or _takes_key(change):
            yield wave
            wave, ids = [], set()
        wave.append(change)
        ids.add(change.before.id)
    yield wave


def _takes_key(change: Change) -> bool:
    if change.before.key is None:
        return False  # asked first: of most jobs, for every end, under the lock
    return change.before.state.is_final and not change.after.state.is_final


def _apply_wave(connection: Connection, wave: Sequence[Change]) -> list[Refused | None]:
    refused: dict[int, Refused] = {}
    stale = _stale(connection, wave)
    if [id for id in stale if mend(connection, id)]:
        stale = _stale(connection, wave)
    for id in stale:
        records = connection.execute(GET, (id,))
        refused[id] = Refused(row_of(records[0]) if records else None)
    for change in wave:
        if _takes_key(change) and connection.execute(_HOLDER, {"id": change.before.id}):
            refused.setdefault(change.before.id, Refused(change.before))
    write(connection, [change for change in wave if change.before.id not in refused])
    return [refused.get(change.before.id) for change in wave]


def _stale(connection: Connection, wave: Sequence[Change]) -> list[int]:
    held: dict[int, int] = {}
    guards: list[tuple[int, int, int, int, Instant | None]] = []
    for change in wave:
        row, over = change.before, change.lease_over
        if row.state is State.RUNNING and not row.cancel_requested and over is None:
            held[row.id] = row.claims
        else:
            guards.append((row.id, CODES[row.state], row.claims, int(row.cancel_requested), over))
    stale: list[int] = array(connection, _NOT_HELD, (as_json(held),)) if held else []
    return stale + array(connection, _STALE, (as_json(guards),)) if guards else stale


def write(connection: Connection, changes: Sequence[Change]) -> None:
    successes: list[tuple[int, Instant | None, str]] = []
    others: list[Change] = []
    for change in changes:
        after = change.after
        if _is_plain_success(change):
            successes.append((after.id, after.finished_at, text_of(after.result or b"")))
        else:
            others.append(change)
    if successes:
        connection.execute(_SUCCEED, (as_json(successes),))
    for chunk in chunks(others):
        connection.execute(*many(_UPDATE, [_changed(change) for change in chunk]))
    pasts = [(change.after.id, change.past) for change in others if change.past is not None]
    for some in chunks(pasts):
        connection.execute(*many(_INSERT_PAST, [_past_values(id, past) for id, past in some]))
    for id, past in pasts:
        if past.claim > _MAX_PAST:
            connection.execute(_PRUNE, {"job": id})


def _is_plain_success(change: Change) -> bool:
    """The table knows one way there, and on it nothing else changes. (One parameter for all
    must not become too large.)"""
    after = change.after
    return (
        after.state is State.SUCCEEDED
        and change.before.state is State.RUNNING
        and after.result is not None
        and len(after.result) <= 10_000
    )


def _changed(change: Change) -> tuple[Value, ...]:
    after = change.after
    return (
        after.id,
        code_of(after),
        after.attempt,
        after.claims,
        after.interruptions,
        after.cancel_requested,
        after.run_at,
        after.lease_until,
        after.started_at,
        after.finished_at,
        None if after.result == change.before.result else after.result,
        None if after.failure is None else after.failure.message,
        None if after.failure is None else after.failure.type,
    )


def _past_values(id: int, past: PastStart) -> tuple[Value, ...]:
    return (
        id,
        past.claim,
        past.number,
        past.started_at,
        past.ended_at,
        past.outcome,
        None if past.failure is None else past.failure.message,
        None if past.failure is None else past.failure.type,
    )


# Renewing.

_RENEWABLE: Final = """
WITH fence(id, claims) AS ({rows}),
renewable(id, claims, cancel_requested) AS (
    SELECT fence.id, fence.claims, (
        SELECT job.cancel_requested <> 0 FROM trio_jobs_job AS job
        WHERE job.id = fence.id AND job.claims = fence.claims AND job.state = 2
    )
    FROM fence
)
SELECT json_group_array(json_array(id, claims, cancel_requested))
FROM renewable WHERE cancel_requested IS NOT NULL
"""

_RENEW: Final = """
INSERT INTO trio_jobs_job (id) SELECT value FROM json_each(:ids) WHERE true
ON CONFLICT (id) DO UPDATE SET lease_until = :until
"""


def renew(connection: Connection, fences: Sequence[Fence], until: Instant) -> dict[Fence, bool]:
    renewed: dict[Fence, bool] = {}
    for chunk in chunks(fences):
        for id, claims, is_requested in array(connection, *many(_RENEWABLE, chunk)):
            renewed[id, claims] = bool(is_requested)
    ids = as_json([id for id, _ in renewed])
    connection.execute(_RENEW, {"ids": ids, "until": until})
    return renewed
