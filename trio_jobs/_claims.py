"""The SQL of a claim, the one place that decides who gets a row.

A claim over many kinds is one seek in an index for each, never a walk over rows of others or
of the future.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from . import _lifecycle
from ._drivers import Connection, Value, Values
from ._errors import StoreError
from ._model import Change, Claim, Claimed, ClaimedJob, Fence, Instant, Row, State
from ._owners import Owners
from ._rows import (
    MAX_INTEGER,
    QUEUED_AS_JSON,
    ROW,
    array,
    as_instant,
    as_json,
    is_sane,
    mend,
    row_of,
)
from ._writes import write

_MAX_EXPIRED: Final = 500
_LOST_KIND: Final = -1  # in the place of its number
_MAX_MENDED: Final = 100
_MAX_PROMOTED: Final = 1000
"""Rows of a kind that one claim may find due: it must be short."""

_EXPIRED: Final = f"""
SELECT {ROW}
FROM trio_jobs_job INDEXED BY trio_jobs_deadline
WHERE deadline IS NOT NULL AND state < 2 AND deadline <= :now
ORDER BY deadline LIMIT {_MAX_EXPIRED}
"""

_LOST_OF: Final = f"""
SELECT {ROW}
FROM trio_jobs_job INDEXED BY trio_jobs_lease
WHERE state = 2 AND {{which}}
    AND (kind IN (SELECT value FROM json_each(:kinds)) OR cancel_requested OR deadline <= :now)
    AND id NOT IN (SELECT value FROM json_each(:held))
"""
_LOST: Final = _LOST_OF.format(which="lease_until <= :lease_now")
# Only asked for when there are dead owners: a walk over the other running rows, in the index.
_LOST_BY_THE_DEAD: Final = _LOST_OF.format(
    which="lease_until > :lease_now AND owner IN (SELECT value FROM json_each(:dead))"
)

_DUE_SCHEDULED: Final = f"""
SELECT '[' || ifnull(group_concat((
    SELECT json_group_array(id) FROM (
        SELECT id FROM trio_jobs_job INDEXED BY trio_jobs_scheduled
        WHERE state = 1 AND kind = served.value AND run_at <= :due_by AND id < :below
        ORDER BY run_at LIMIT {_MAX_PROMOTED}
    )
)), '') || ']'
FROM json_each(:kinds) AS served
"""

_PROMOTE: Final = """
INSERT INTO trio_jobs_job (id) SELECT value FROM json_each(?) WHERE true
ON CONFLICT (id) DO UPDATE SET state = 0
"""

# A sum as limit, because for a parameter alone new versions prepare the statement every time.
# Text, which is above every number, is no instant: it is read as one that has passed.
_DUE_BUT: Final = """
SELECT '[' || ifnull(group_concat((
    SELECT json_group_array(json_array(
            -CAST(priority AS INTEGER), CAST(run_at AS INTEGER), id, served.key,
            CAST(attempt AS INTEGER)
        )) FROM (
        SELECT priority, run_at, id, attempt FROM trio_jobs_job INDEXED BY trio_jobs_ready
        WHERE state = 0 AND kind = served.value AND id < :below
            AND (run_at <= :due_by OR run_at <= enqueued_at AND :stays_due OR run_at >= '')
            AND (deadline IS NULL OR deadline > :now) AND {but}
        ORDER BY priority DESC, run_at, id LIMIT :limit + 0
    )
)), '') || ']'
FROM json_each(:kinds) AS served
"""
_DUE: Final = _DUE_BUT.format(but="true")
_DUE_BUT_HELD: Final = _DUE_BUT.format(but="id NOT IN (SELECT value FROM json_each(:held))")

_DEADLINE: Final = """
SELECT min(deadline) FROM trio_jobs_job INDEXED BY trio_jobs_deadline
WHERE deadline IS NOT NULL AND state < 2
"""

# All that most claims have to know, in one step; see `Look`.
_LOOK: Final = f"""
SELECT
    ({_DEADLINE}),
    (SELECT min(lease_until) FROM trio_jobs_job INDEXED BY trio_jobs_lease WHERE state = 2),
    (
        SELECT min((
            SELECT run_at FROM trio_jobs_job INDEXED BY trio_jobs_scheduled
            WHERE state = 1 AND kind = served.value
            ORDER BY run_at LIMIT 1
        ))
        FROM json_each(:kinds) AS served
    ),
    ({_DUE}),
    (
        SELECT json_group_array(json_array(id, CAST(claims AS INTEGER)))
        FROM trio_jobs_job INDEXED BY trio_jobs_cancel WHERE state = 2 AND cancel_requested = 1
    )
"""

_TAKE: Final = """
INSERT INTO trio_jobs_job (id) SELECT value FROM json_each(:ids) WHERE true
ON CONFLICT (id) DO UPDATE SET
    state = 2, attempt = attempt + 1, claims = claims + 1,
    lease_until = :lease_until, started_at = :now, owner = :owner
"""

# The next row of a served kind that is scheduled; one that is ready and not due, after a clock
# stepped back (few are left when every due row was taken, and only then it is asked); the next
# end of a lease that a claim would look at (that of a dead owner is over). And rows that no claim
# would find, because their instant was edited by hand into text, which is above every number, or
# NULL, which is below (what is ready is found all the same).
_NEXT_OF: Final = """
SELECT
    (
        SELECT min((
            SELECT run_at FROM trio_jobs_job INDEXED BY trio_jobs_scheduled
            WHERE state = 1 AND kind = served.value AND id < :below
                AND id NOT IN (SELECT value FROM json_each(:held))
            ORDER BY run_at LIMIT 1
        ))
        FROM json_each(:kinds) AS served
    ),
    (
        SELECT min((
            SELECT min(run_at) FROM trio_jobs_job INDEXED BY trio_jobs_ready
            WHERE state = 0 AND kind = served.value AND run_at > max(:now, enqueued_at)
                AND id < :below AND id NOT IN (SELECT value FROM json_each(:held))
        ))
        FROM json_each(:kinds) AS served
    ),
    (
        SELECT min(ends_at) FROM (
            SELECT
                CASE WHEN cancel_requested OR kind IN (SELECT value FROM json_each(:kinds))
                THEN {lease_until} ELSE max({lease_until}, deadline) END AS ends_at
            FROM trio_jobs_job INDEXED BY trio_jobs_lease
            WHERE state = 2 AND id NOT IN (SELECT value FROM json_each(:held))
        )
        WHERE ends_at > :lease_now
    ),
    (
        SELECT json_group_array(id) FROM (
            SELECT id FROM (
                SELECT id FROM trio_jobs_job INDEXED BY trio_jobs_lease
                WHERE state = 2 AND lease_until IS NULL
                UNION ALL
                SELECT id FROM trio_jobs_job INDEXED BY trio_jobs_lease
                WHERE state = 2 AND lease_until >= ''
                UNION ALL
                SELECT job.id FROM json_each(:kinds) AS served
                CROSS JOIN trio_jobs_job AS job INDEXED BY trio_jobs_scheduled
                WHERE job.state = 1 AND job.kind = served.value AND job.run_at >= ''
            )
            WHERE id NOT IN (SELECT value FROM json_each(:held)) LIMIT {max_mended}
        )
    )
"""

_NEXT: Final = _NEXT_OF.format(lease_until="lease_until", max_mended=_MAX_MENDED)
_NEXT_BESIDE_THE_DEAD: Final = _NEXT_OF.format(
    lease_until="""CASE WHEN owner IN (SELECT value FROM json_each(:dead))
                THEN min(lease_until, :lease_now) ELSE lease_until END""",
    max_mended=_MAX_MENDED,
)


class Look(NamedTuple):
    """What a claim sees first: mostly that nothing has to be done but to take what is due."""

    deadline: Instant | None
    """The first of any queued row."""
    lease_until: Instant | None
    """The first of any running row."""
    scheduled: Instant | None
    """When the first row of a served kind becomes due that was not when it was enqueued."""
    due: str
    """The places of the first due rows, an array for each kind."""
    cancelled: str


def claim_rows(connection: Connection, claim: Claim, owners: Owners) -> Claimed:
    # What any of the statements asks for; each takes what it names.
    values: dict[str, Value] = {
        "kinds": as_json(list(claim.policies)),
        "now": claim.now,
        "lease_now": claim.lease_now,
        "lease_until": claim.lease_until,
        "due_by": claim.now if claim.due_by is None else claim.due_by,
        "stays_due": claim.stays_due,
        "below": MAX_INTEGER if claim.below is None else claim.below,
        # The one more tells whether there are more.
        "limit": claim.limit + claim.ahead_limit + 1,
        "dead": as_json(owners.dead) if owners.dead else None,
    }
    deadline, lease_until, scheduled, *texts = connection.execute(_LOOK, values)[0]
    look = Look(as_instant(deadline), as_instant(lease_until), as_instant(scheduled), *texts)
    settled: list[Change] = []
    if look.deadline is not None and look.deadline <= claim.now:
        settled += _expired(connection, claim, values)
    ended, retryable = _lost(connection, claim, values, look)
    lost = {change.after.id: change for change in _gently(retryable, claim)}
    due, is_all = _due(connection, claim, values, look)
    due = sorted([*due, *(_place(change.after) for change in lost.values())])
    number = claim.limit + _ahead(due[claim.limit :], claim)
    taken = [id for _, _, id, *_ in due[:number]]
    more = len(due) > number or not is_all
    settled += [*ended, *(lost[id] for id in taken if id in lost)]
    write(connection, settled)
    jobs = _taken(connection, claim, values, taken, lost, owners) if taken else []
    next_due = None
    if not more:
        next_due, out_of_reach = _next(connection, claim, values, taken)
        mended = [mend(connection, id) for id in out_of_reach]
        more = any(mended)
    next_deadline = look.deadline
    if next_deadline is not None:
        [(first,)] = connection.execute(_DEADLINE)
        next_deadline = as_instant(first)
    cancelled: list[Fence] = [(id, claims) for id, claims in msgspec.json.decode(look.cancelled)]
    if settled:
        gone = {change.after.fence for change in settled}
        cancelled = [fence for fence in cancelled if fence not in gone]
    return Claimed(
        jobs=jobs,
        settled=settled,
        lost_waiting=len(retryable) > len(lost),
        more=more,
        next_due=None if more else next_due,
        next_deadline=next_deadline,
        cancelled=cancelled,
    )


def _taken(
    connection: Connection,
    claim: Claim,
    values: dict[str, Value],
    ids: Sequence[int],
    lost: Mapping[int, Change],
    owners: Owners,
) -> list[ClaimedJob]:
    found = _with_payloads(connection, ids)
    owner = owners.own_id(connection)
    connection.execute(_TAKE, values | {"ids": as_json(ids), "owner": owner})
    return [
        ClaimedJob(
            row=_lifecycle.claimed(was, claim.now, claim.lease_until),
            was=was,
            payload=payload,
            taken_up=was.id in lost,
            is_suspect=was.id in lost and _lifecycle.is_suspect(lost[was.id].before),
        )
        for was, payload in (found[id] for id in ids)
    ]


def _expired(connection: Connection, claim: Claim, values: Values) -> list[Change]:
    changes: list[Change] = []
    for record in connection.execute(_EXPIRED, values):
        row = row_of(record)
        change = _lifecycle.expired(row, claim.now)
        if change is not None:
            changes.append(change)
        else:
            mend(connection, row.id)  # or its deadline would bring a claim again and again
    return changes


def _lost(
    connection: Connection, claim: Claim, values: dict[str, Value], look: Look
) -> tuple[list[Change], list[Change]]:
    """The lost rows that end, whatever their kind; and those that may start again, in order."""
    ended: list[Change] = []
    retryable: list[Change] = []
    if look.lease_until is None:
        return ended, retryable
    rows: list[tuple[Row, bool]] = []
    values = values | {"held": as_json(list(claim.held))}
    if look.lease_until <= claim.lease_now:
        rows += [(row_of(one), False) for one in connection.execute(_LOST, values)]
    if values["dead"] is not None:
        rows += [(row_of(one), True) for one in connection.execute(_LOST_BY_THE_DEAD, values)]
    for row, is_dead in rows:
        policy = claim.policies.get(row.kind)
        if policy is None:
            change = _lifecycle.expired(row, claim.now, claim.lease_now, is_owner_dead=is_dead)
        else:
            change = _lifecycle.lost(row, policy, claim.now)
        if change is None:
            continue
        if change.after.state is not State.QUEUED:
            ended.append(change)
        elif claim.below is None or row.id < claim.below:
            retryable.append(change)
    retryable.sort(key=lambda change: _place(change.after))
    return ended, retryable


def _gently(retryable: Sequence[Change], claim: Claim) -> Sequence[Change]:
    """Which lost rows may be taken: a suspect alone, or some that are none."""
    first = [change for change in retryable if not _lifecycle.is_suspect(change.before)]
    if claim.takes_suspect and retryable and (not first or first[0] is not retryable[0]):
        return retryable[: min(1, claim.lost_limit)]
    return first[: max(0, claim.lost_limit)]


def _due(
    connection: Connection, claim: Claim, values: dict[str, Value], look: Look
) -> tuple[list[list[int]], bool]:
    """The places of the first due rows of each kind, and whether all were looked at."""
    seen, is_all = look.due, True
    due_by = claim.now if claim.due_by is None else claim.due_by
    if look.scheduled is not None and look.scheduled <= due_by:
        scheduled = array(connection, _DUE_SCHEDULED, values)
        is_all = all(len(ids) < _MAX_PROMOTED for ids in scheduled)
        connection.execute(_PROMOTE, (as_json([*itertools.chain(*scheduled)]),))
        [(seen,)] = connection.execute(_DUE, values)
    due = [*itertools.chain(*msgspec.json.decode(seen))]
    # What is held may have become due again, before this runner is through with it.
    if any(id in claim.held for _, _, id, *_ in due):
        held = {"held": as_json(list(claim.held))}
        due = [*itertools.chain(*array(connection, _DUE_BUT_HELD, values | held))]
    return due, is_all


def _ahead(due: Sequence[list[int]], claim: Claim) -> int:
    """How many of those that find no free worker are taken ahead: never past one that may not
    be, so that nothing overtakes it. None on its last attempt: if this process died it would
    be dead without a start."""
    kinds = list(claim.policies)
    number = 0
    for *_, kind, attempt in due[: claim.ahead_limit]:
        if kind == _LOST_KIND or kinds[kind] not in claim.ahead_kinds:
            break
        if attempt + 1 >= claim.policies[kinds[kind]].attempts:
            break
        number += 1
    return number


def _next(
    connection: Connection, claim: Claim, values: dict[str, Value], taken: Sequence[int]
) -> tuple[Instant | None, list[int]]:
    """The next instant at which there will be something to take, and rows that have none."""
    sql = _NEXT if values["dead"] is None else _NEXT_BESIDE_THE_DEAD
    held = {"held": as_json([*claim.held, *taken])}
    [(*instants, out_of_reach)] = connection.execute(sql, values | held)
    next_due = min(
        (instant for instant in map(as_instant, instants) if instant is not None), default=None
    )
    return next_due, msgspec.json.decode(out_of_reach)


def _place(row: Row) -> list[int]:
    """Rows are taken in this order."""
    return [-row.priority, row.run_at, row.id, _LOST_KIND, row.attempt]


# Rows and payloads in one step, if they are small: the rows as one JSON array, each with the
# lengths of its result and payload, and those one after the other. With a busy loop 0.3 ms for
# 100 rows, against 3 to 400 ms row by row.
_SMALL: Final = """
    FROM trio_jobs_job
    WHERE id = wanted.value AND length(payload) + ifnull(length(result), 0) <= 10000
"""
_PACKED: Final = f"""
SELECT
    CAST('[' || ifnull(group_concat((
        SELECT json_array(
            {QUEUED_AS_JSON},
            length(CAST(result AS BLOB)), length(CAST(payload AS BLOB))
        ) {_SMALL}
    )), '') || ']' AS BLOB),
    CAST(ifnull(group_concat((
        SELECT ifnull(CAST(result AS BLOB), '') || CAST(payload AS BLOB) {_SMALL}
    ), ''), '') AS BLOB)
FROM json_each(?) AS wanted
"""

_WITH_PAYLOAD: Final = f"SELECT {ROW}, CAST(payload AS BLOB) FROM trio_jobs_job WHERE id = ?"


def _with_payloads(connection: Connection, ids: Sequence[int]) -> dict[int, tuple[Row, bytes]]:
    try:
        [(rows, bodies)] = connection.execute(_PACKED, (as_json(ids),))
        found = {row.id: (row, payload) for row, payload in _unpacked(rows, bodies)}
    except (msgspec.DecodeError, StoreError):  # a row that was edited by hand, and is no JSON
        if not connection.in_transaction:
            raise  # what failed was the disk
        found = {}
    for id in ids:
        if id not in found:
            [record] = connection.execute(_WITH_PAYLOAD, (id,))
            found[id] = (row_of(record), record[-1])
            if not is_sane(record, found[id][0]):
                mend(connection, id)
    return found


def _unpacked(rows: bytes, bodies: bytes) -> Iterator[tuple[Row, bytes]]:
    start = 0
    for row, result_length, payload_length in _ROWS.decode(rows):
        if result_length is not None:
            end = start + result_length
            row, start = msgspec.structs.replace(row, result=bodies[start:end]), end
        end = start + payload_length
        yield row, bodies[start:end]
        start = end


_ROWS: Final = msgspec.json.Decoder(list[tuple[Row, int | None, int]])
