"""What every store promises (trio_jobs/_store.py), on every store there is.

Another store joins with one line in STORES.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from stories import TIMES, new_job as new

from trio_jobs import StoreError, _lifecycle
from trio_jobs._lifecycle import (
    WORKER_LOST,
    End,
    InterruptedByShutdown,
    NeverStarted,
    Raised,
    RefusedForGood,
    RetryAfter,
    Returned,
)
from trio_jobs._model import (
    Change,
    Claim,
    Claimed,
    ClaimedJob,
    Failure,
    NewJob,
    PastStart,
    Policy,
    Refused,
    Row,
    State,
)
from trio_jobs._store import Store
from trio_jobs.sqlite import SqliteStore

STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: SqliteStore(":memory:"),
    "file": lambda folder: SqliteStore(folder / "jobs.db"),
    "apsw": lambda folder: SqliteStore(folder / "jobs.db", driver="apsw"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An open store of every kind."""
    store = STORES[request.param](tmp_path)
    store.open()
    yield store
    store.close()


def policy(attempts: int = 3, on_interrupt: Any = "retry") -> Policy:
    return Policy(attempts=attempts, on_interrupt=on_interrupt, wait=lambda id, attempt: 10)


POLICY = policy()


def add(store: Store, *jobs: NewJob) -> list[Row]:
    with store.transaction():
        return [row for row, _ in store.add(jobs)]


def claim(store: Store, *, now: int = 100, **fields: Any) -> Claimed:
    defaults: dict[str, Any] = {
        "policies": {"mail": POLICY},
        "limit": 100,
        "lost_limit": 100,
        "lease_now": now,
        "lease_until": now + 60,
    }
    with store.transaction():
        return store.claim(Claim(now=now, **{**defaults, **fields}))


def apply(store: Store, *changes: Change) -> list[Refused | None]:
    with store.transaction():
        return store.apply(changes)


def cancel(store: Store, row: Row, now: int = 100) -> None:
    change = _lifecycle.cancelled(row, now)
    assert change is not None
    assert apply(store, change) == [None]


def running(store: Store, **fields: Any) -> Row:
    """A row that has just been claimed, its lease ends at 160."""
    add(store, new(**fields))
    [job] = claim(store).jobs
    return job.row


def now_of(store: Store, row: Row) -> Row:
    found = store.get(row.id)
    assert found is not None
    return found


def ids(claimed: Claimed) -> list[int]:
    return [job.row.id for job in claimed.jobs]


# Transactions.


def test_a_transaction_that_raises_leaves_nothing_behind(store: Store) -> None:
    [row] = add(store, new())

    with contextlib.suppress(ZeroDivisionError), store.transaction():
        store.add([new(), new()])
        store.apply([Change(before=row, after=_lifecycle.claimed(row, 100, 160))])
        raise ZeroDivisionError

    assert store.find(states=[], kind=None, after=0, limit=10) == [row]


def test_a_transaction_after_one_that_raised_works(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.transaction():
        raise ZeroDivisionError

    assert len(add(store, new())) == 1


def test_readers_see_only_what_is_committed(store: Store) -> None:
    seen: list[dict[State, int]] = []
    reader = threading.Thread(target=lambda: seen.append(store.counts(None)))

    with store.transaction():
        store.add([new()])
        reader.start()
        if not store.inline:  # an inline store may make the reader wait
            reader.join()

            assert seen == [{}]
    reader.join()
    assert store.counts(None) == {State.QUEUED: 1}


def test_a_writing_verb_outside_a_transaction_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="transaction"):
        store.add([new()])
    assert store.counts(None) == {}


def test_a_closed_store_refuses_every_verb(store: Store) -> None:
    store.close()

    verbs: list[Callable[[], object]] = [
        lambda: store.transaction().__enter__(),
        lambda: store.get(1),
        lambda: store.find(states=[], kind=None, after=0, limit=1),
        lambda: store.history(1),
        lambda: store.counts(None),
        lambda: store.next_id(),
        lambda: store.queued_kinds(),
        lambda: store.is_unlocked(),
    ]
    for verb in verbs:
        with pytest.raises(StoreError, match="not open"):
            verb()
    store.tidy(100)
    store.close()


def test_stores_are_identical_when_they_keep_the_same_rows(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> None:
    name = request.node.callspec.params["store"]
    (tmp_path / "other").mkdir()
    same, other = STORES[name](tmp_path), STORES[name](tmp_path / "other")
    with contextlib.closing(same), contextlib.closing(other):
        same.open()
        other.open()
        row = add(store, new())[0]

        assert (same.identity == store.identity) == (same.get(row.id) == row)
        assert other.identity != store.identity


# Adding.


def test_a_new_row_is_queued_as_it_was_given(store: Store) -> None:
    job = new("mail", priority=-3, enqueued_at=5, run_at=7, deadline=9, key="k")

    with store.transaction():
        [(row, is_new)] = store.add([job])

    assert is_new
    assert row == Row(
        id=row.id,
        kind="mail",
        state=State.QUEUED,
        attempt=0,
        claims=0,
        interruptions=0,
        cancel_requested=False,
        priority=-3,
        key="k",
        enqueued_at=5,
        run_at=7,
        deadline=9,
        lease_until=None,
        started_at=None,
        finished_at=None,
        result=None,
        failure=None,
    )
    assert store.get(row.id) == row


def test_ids_rise_in_the_given_order_and_go_on_where_they_ended(store: Store) -> None:
    first = [row.id for row in add(store, *[new(priority=-n) for n in range(150)])]
    assert add(store) == []
    second = [row.id for row in add(store, new(), new())]

    assert first + second == list(range(first[0], first[0] + 152))
    assert store.next_id() == first[0] + 152


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    "payload",
    [b"", b"null", '"\u00e9\U0001f600"'.encode(), b"\x00 \x00", b"[" + b"1," * 60_000],
    ids=["empty", "null", "text", "zeros", "large"],
)
def test_a_claim_gives_the_payload_byte_by_byte(store: Store, payload: bytes, raw: bool) -> None:
    add(store, new(payload=payload, raw=raw), new(payload=b"0"), new(payload=payload, raw=not raw))

    claimed = claim(store)

    assert [job.payload for job in claimed.jobs] == [payload, b"0", payload]


def test_a_raw_payload_need_not_be_text(store: Store) -> None:
    add(store, new(payload=b"\x00\xff\xfe\x80 \x00", raw=True))

    assert claim(store).jobs[0].payload == b"\x00\xff\xfe\x80 \x00"


@pytest.mark.parametrize("text", ["", "\u00e9\U0001f600", "a\"b\\c'd", "%s {} ? :x", "x" * 3000])
def test_texts_come_back_as_they_were(store: Store, text: str) -> None:
    [row] = add(store, new(text, key=text))
    failure = Failure(text, text)

    [job] = claim(store, policies={text: POLICY}).jobs
    apply(store, _lifecycle.ended(job.row, Raised(failure), POLICY, 100))

    assert (job.was, job.row.kind, job.row.key) == (row, text, text)
    assert now_of(store, row).failure == failure
    assert store.history(row.id) == [
        PastStart(
            number=1, claim=1, started_at=100, ended_at=100, outcome="failed", failure=failure
        )
    ]
    assert store.find(states=[], kind=text, after=0, limit=9) == [now_of(store, row)]
    assert store.queued_kinds() == {text}


def test_a_key_gives_the_live_row_that_has_it(store: Store) -> None:
    [first] = add(store, new(key="k"))

    with store.transaction():
        added = store.add(
            [new(key="k", priority=9), new(key="other"), new("sms", key="k"), new(key="other")]
        )

    assert [is_new for _, is_new in added] == [False, True, True, False]
    assert added[0][0] == first
    assert added[3][0] == added[1][0]
    assert len(store.find(states=[], kind=None, after=0, limit=10)) == 3


def test_a_running_row_still_has_its_key(store: Store) -> None:
    row = running(store, key="k")

    with store.transaction():
        assert store.add([new(key="k")]) == [(row, False)]


@pytest.mark.parametrize("end", [Returned(b"1"), RefusedForGood(Failure("no"))])
def test_u2_a_key_is_free_again_when_its_job_has_ended(store: Store, end: End) -> None:
    row = running(store, key="k")
    apply(store, _lifecycle.ended(row, end, POLICY, 100))

    [again] = add(store, new(key="k"))

    assert again.id > row.id
    assert now_of(store, row).key == "k"


def test_many_keys_at_once_are_told_apart(store: Store) -> None:
    add(store, *[new(key=str(n)) for n in range(0, 300, 3)])

    with store.transaction():
        added = store.add([new(key=str(n)) for n in range(300)])

    assert [is_new for _, is_new in added] == [n % 3 != 0 for n in range(300)]
    assert [row.key for row, _ in added] == [str(n) for n in range(300)]


def test_an_add_that_inserts_nothing_uses_no_id(store: Store) -> None:
    add(store, new(key="k"))
    before = store.next_id()

    add(store, new(key="k"))

    assert store.next_id() == before


# Applying.


def test_a_change_is_made_if_the_row_is_still_what_it_was(store: Store) -> None:
    row = running(store)
    change = _lifecycle.ended(row, Returned(b'{"a": 1}'), POLICY, 130)

    assert apply(store, change) == [None]

    assert store.get(row.id) == change.after


@pytest.mark.parametrize(
    "wrong",
    [{"state": State.QUEUED}, {"state": State.DEAD}, {"claims": 2}, {"cancel_requested": True}],
    ids=str,
)
def test_a_change_decided_on_another_row_is_refused_and_shows_the_row(
    store: Store, wrong: dict[str, Any]
) -> None:
    row = running(store)
    after = msgspec.structs.replace(row, state=State.SUCCEEDED, result=b"1", finished_at=1)
    change = Change(before=msgspec.structs.replace(row, **wrong), after=after)

    assert apply(store, change) == [Refused(row)]

    assert store.get(row.id) == row


def test_a_change_of_no_row_is_refused(store: Store) -> None:
    row = msgspec.structs.replace(running(store), id=999)

    assert apply(store, _lifecycle.published(row, b"1")) == [Refused(None)]
    assert store.get(999) is None


def test_refused_changes_do_not_hinder_the_good_ones_next_to_them(store: Store) -> None:
    add(store, *[new() for _ in range(200)])
    rows = [job.row for job in claim(store, limit=200).jobs]
    changes = [_lifecycle.ended(row, Returned(b"1"), POLICY, 110) for row in rows]
    apply(store, *changes[::3])

    refused = apply(store, *changes)

    assert refused == [None if n % 3 else Refused(change.after) for n, change in enumerate(changes)]
    assert store.counts(None) == {State.SUCCEEDED: 200}


def test_changes_of_one_row_are_made_in_the_given_order(store: Store) -> None:
    row = running(store)

    refused = apply(
        store,
        _lifecycle.published(row, b"1"),
        _lifecycle.published(row, b"2"),
        _lifecycle.ended(row, Raised(Failure("no")), POLICY, 110),
        _lifecycle.ended(row, Returned(b"3"), POLICY, 110),
    )

    found = now_of(store, row)
    assert refused == [None, None, None, Refused(found)]
    assert (found.state, found.result, found.run_at) == (State.QUEUED, b"2", 120)


def test_a_result_stays_where_the_change_does_not_set_one(store: Store) -> None:
    row = running(store)
    apply(store, _lifecycle.published(row, b"[1]"))
    row = now_of(store, row)
    apply(store, _lifecycle.published(row, b"[2]"))

    apply(store, _lifecycle.ended(row, Raised(Failure("no")), POLICY, 110))

    assert now_of(store, row).result == b"[2]"


def test_publishing_does_not_touch_a_renewed_lease(store: Store) -> None:
    row = running(store)
    with store.transaction():
        store.renew([row.fence], 300)

    assert apply(store, _lifecycle.published(row, b"1")) == [None]

    assert now_of(store, row).lease_until == 300


@pytest.mark.parametrize("is_requested", [False, True])
def test_a_lost_row_whose_lease_was_renewed_meanwhile_is_not_cancelled_at_once(
    store: Store, is_requested: bool
) -> None:
    row = running(store)
    if is_requested:
        cancel(store, row)
        row = now_of(store, row)
    change = _lifecycle.cancelled(row, 160)
    assert change is not None
    with store.transaction():
        store.renew([row.fence], 220)

    [refused] = apply(store, change)

    held = msgspec.structs.replace(row, lease_until=220)
    assert refused == Refused(held)
    assert now_of(store, row) == held


def test_a_lost_row_whose_lease_nobody_renewed_is_cancelled_at_once(store: Store) -> None:
    row = running(store)

    cancel(store, row, now=160)

    assert now_of(store, row).state is State.CANCELLED


def test_a_cancel_request_lets_no_end_decided_before_it_through(store: Store) -> None:
    row = running(store)
    cancel(store, row)

    [refused] = apply(store, _lifecycle.ended(row, Returned(b"1"), POLICY, 110))

    assert refused == Refused(msgspec.structs.replace(row, cancel_requested=True))


def test_reviving_a_job_whose_key_another_live_one_has_is_refused(store: Store) -> None:
    row = running(store, key="k")
    ended = _lifecycle.ended(row, RefusedForGood(Failure("no")), POLICY, 110)
    apply(store, ended)
    [other] = add(store, new(key="k"))
    add(store, new("sms", key="k"))

    refused = apply(store, _lifecycle.retried(ended.after, 120))

    assert refused == [Refused(ended.after)]
    cancel(store, other)
    assert apply(store, _lifecycle.retried(ended.after, 120)) == [None]


def test_of_two_revived_jobs_with_one_key_the_first_gets_it(store: Store) -> None:
    rows = []
    for _ in range(2):
        [row] = add(store, new(key="k"))
        cancel(store, row)
        rows.append(now_of(store, row))
    holder = add(store, new(key="k"))[0]
    cancelled = _lifecycle.cancelled(holder, 110)
    assert cancelled is not None

    refused = apply(store, cancelled, *[_lifecycle.retried(row, 120) for row in rows])

    assert refused == [None, None, Refused(rows[1])]


def test_the_newest_100_past_starts_of_a_job_are_kept(store: Store) -> None:
    add(store, new(), new())
    for n in range(105):
        for job in claim(store, now=100 + n).jobs:
            apply(store, _lifecycle.ended(job.row, RetryAfter(0), POLICY, 100 + n))

    for id in (1, 2):
        history = store.history(id)
        assert history is not None
        assert [past.claim for past in history] == list(range(6, 106))
        assert {past.outcome for past in history} == {"retry later"}


def test_interruptions_are_counted(store: Store) -> None:
    [row] = add(store, new())
    for _ in range(2):
        [job] = claim(store).jobs
        apply(store, _lifecycle.ended(job.row, InterruptedByShutdown(), POLICY, 100))

    assert now_of(store, row).interruptions == 2


# Renewing.


def test_renewing_extends_the_leases_that_are_still_held(store: Store) -> None:
    rows = [running(store) for _ in range(3)]
    apply(store, _lifecycle.ended(rows[0], Returned(b"1"), POLICY, 110))
    cancel(store, rows[1])

    with store.transaction():
        renewed = store.renew([*(row.fence for row in rows), (rows[2].id, 2), (999, 1)], 500)

    assert renewed == {rows[1].fence: True, rows[2].fence: False}
    assert [now_of(store, row).lease_until for row in rows] == [None, 500, 500]


def test_renewing_nothing_is_fine(store: Store) -> None:
    with store.transaction():
        assert store.renew([], 500) == {}


# Claiming.


def test_rows_are_taken_by_priority_then_age_then_id(store: Store) -> None:
    jobs = [
        new(kind, priority=priority, run_at=run_at)
        for kind, priority, run_at in itertools.product(
            ("mail", "sms"), (0, 5, -5), (90, 95, 10, 90)
        )
    ]
    rows = add(store, *jobs)

    claimed = [job.was for _ in range(24) for job in claim(store, policies=TWO_KINDS, limit=1).jobs]

    assert claimed == sorted(rows, key=lambda row: (-row.priority, row.run_at, row.id))


TWO_KINDS = {"mail": POLICY, "sms": POLICY}


def test_a_claimed_row_is_running_under_its_fence(store: Store) -> None:
    [row] = add(store, new())

    [job] = claim(store, now=120).jobs

    assert job == ClaimedJob(
        row=_lifecycle.claimed(row, 120, 180), was=row, payload=b"[1]", taken_up=False
    )
    assert store.get(row.id) == job.row


def test_a_row_is_taken_once(store: Store) -> None:
    add(store, *[new() for _ in range(5)])

    assert ids(claim(store, limit=3)) == [1, 2, 3]
    assert ids(claim(store, limit=3)) == [4, 5]
    assert ids(claim(store, limit=3)) == []


def test_exclusion_two_stores_on_the_same_rows_share_them(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> None:
    other = STORES[request.node.callspec.params["store"]](tmp_path)
    other.open()
    with contextlib.closing(other):
        if other.identity != store.identity:
            pytest.skip("nobody else reaches these rows")
        add(store, *[new() for _ in range(200)])
        taken: dict[Store, list[int]] = {store: [], other: []}

        def take(store: Store) -> None:
            while found := ids(claim(store, limit=3)):
                taken[store] += found

        threads = [threading.Thread(target=take, args=(each,)) for each in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(taken[store] + taken[other]) == list(range(1, 201))


def test_only_served_kinds_are_taken(store: Store) -> None:
    add(store, new("sms"), new("mail"), new("mai"), new("mail "))

    assert ids(claim(store)) == [2]
    assert store.queued_kinds() == {"sms", "mai", "mail "}


def test_hundreds_of_kinds_are_served_at_once(store: Store) -> None:
    kinds = [f"kind {n}" for n in range(700)]
    add(store, *[new(kind) for kind in kinds])

    claimed = claim(store, policies=dict.fromkeys(kinds, POLICY), limit=1000)

    assert [job.row.kind for job in claimed.jobs] == kinds


def test_a_claim_of_no_kinds_and_a_limit_of_0_take_nothing(store: Store) -> None:
    add(store, new(), new(run_at=200))

    assert claim(store, policies={}).jobs == []
    nothing = claim(store, limit=0)
    assert (nothing.jobs, nothing.more) == ([], True)


def test_a_row_is_taken_when_it_is_due_and_not_before(store: Store) -> None:
    add(store, new(run_at=200))

    assert claim(store, now=199).jobs == []
    assert claim(store, now=199).next_due == 200
    assert ids(claim(store, now=200)) == [1]


def test_rows_that_came_due_keep_their_place_among_the_others(store: Store) -> None:
    add(store, new(run_at=300), new(run_at=200, priority=1), new(run_at=250, enqueued_at=250))

    assert ids(claim(store, now=300)) == [2, 3, 1]


def test_after_the_clock_stepped_back_a_row_waits_for_its_time_again(store: Store) -> None:
    add(store, new(run_at=500), new(run_at=600))
    claim(store, now=700, limit=0)

    early = claim(store, now=400)

    assert (early.jobs, early.more, early.next_due) == ([], False, 500)
    assert ids(claim(store, now=599)) == [1]
    assert ids(claim(store, now=600)) == [2]


def test_a_row_that_was_due_when_it_was_enqueued_stays_due(store: Store) -> None:
    add(store, new(run_at=1000, enqueued_at=1000), new(run_at=900, enqueued_at=1000))

    first = claim(store, now=400, limit=1)
    apply(store, _lifecycle.ended(first.jobs[0].row, NeverStarted(first.jobs[0].was), POLICY, 400))
    second = claim(store, now=400)

    assert (ids(first), ids(second), second.next_due) == ([2], [2, 1], None)


def test_more_says_whether_due_rows_are_left(store: Store) -> None:
    add(store, new(), new(), new(run_at=900))

    one = claim(store, limit=1)
    two = claim(store, limit=1)

    assert (one.more, ids(one)) == (True, [1])
    assert (ids(two), claim(store, limit=1).jobs) == ([2], [])


def test_rows_are_taken_ahead_in_order_up_to_the_first_that_may_not_be(store: Store) -> None:
    add(store, *[new(kind) for kind in ("sms", "mail", "sms", "sms", "mail", "sms")])
    ahead: Any = {"policies": TWO_KINDS, "ahead_limit": 9, "ahead_kinds": frozenset(["sms"])}

    none = claim(store, limit=0, ahead_limit=9)
    first = claim(store, limit=0, **ahead)
    barred = claim(store, limit=0, **ahead)
    second = claim(store, limit=1, **ahead)
    rest = claim(store, limit=1, **ahead)

    assert [ids(one) for one in (none, first, barred, second, rest)] == [
        [],
        [1],
        [],
        [2, 3, 4],
        [5, 6],
    ]
    assert [one.more for one in (none, first, barred, second, rest)] == [True] * 4 + [False]


def test_no_more_are_taken_ahead_than_asked_for_and_more_tells_of_the_rest(store: Store) -> None:
    add(store, *[new(priority=number % 2) for number in range(8)], new(run_at=900))
    ahead: Any = {"ahead_limit": 2, "ahead_kinds": frozenset(["mail"])}

    taken = [claim(store, limit=limit, **ahead) for limit in (0, 2, 0, 0)]

    assert [ids(one) for one in taken] == [[2, 4], [6, 8, 1, 3], [5, 7], []]
    assert [one.more for one in taken] == [True, True, False, False]
    assert taken[2].next_due == 160


def test_a_lost_row_is_not_taken_ahead_and_nothing_overtakes_it(store: Store) -> None:
    lost = running(store, priority=1)
    add(store, new(), new(priority=2))
    ahead: Any = {"ahead_limit": 9, "ahead_kinds": frozenset(["mail"]), "now": 200}

    first = claim(store, limit=0, **ahead)
    row = now_of(store, lost)
    second = claim(store, limit=1, **ahead)

    assert (ids(first), first.more, first.settled) == ([3], True, [])
    assert row == lost
    assert [(job.row.id, job.taken_up) for job in second.jobs] == [(1, True), (2, False)]


def test_next_due_is_when_a_served_row_comes_due_or_a_lease_ends(store: Store) -> None:
    add(store, new("sms", run_at=150), new(run_at=300), new(run_at=100), new("sms", run_at=90))
    assert claim(store, policies={"sms": POLICY}, lease_until=120, now=95).next_due == 150

    mine = claim(store, lease_until=200)
    assert mine.next_due == 300
    assert claim(store, held=frozenset(ids(mine))).next_due == 300
    assert claim(store).next_due == 200
    assert claim(store, policies=TWO_KINDS).next_due == 120
    assert claim(store, policies={"other": POLICY}).next_due is None


def test_a_row_in_hand_is_never_claimed_again(store: Store) -> None:
    row = running(store)
    held = frozenset([row.id])
    lost = claim(store, now=500, held=held)
    apply(store, _lifecycle.ended(row, RetryAfter(0), POLICY, 500))
    queued = claim(store, now=500, held=held)

    assert (lost.jobs, lost.settled, lost.next_due) == ([], [], None)
    assert (queued.jobs, queued.more, queued.next_due) == ([], False, None)
    assert ids(claim(store, now=500)) == [row.id]


def test_only_ids_below_the_bound_are_taken(store: Store) -> None:
    add(store, *[new() for _ in range(4)], *[new(run_at=200) for _ in range(4)])

    first = claim(store, now=300, below=3)
    second = claim(store, now=300, below=7, limit=3)

    assert (ids(first), first.more, first.next_due) == ([1, 2], False, None)
    assert ids(second) == [3, 4, 5]


def test_only_rows_due_by_an_earlier_instant_are_taken(store: Store) -> None:
    add(store, new(run_at=150), new(run_at=200), new(run_at=250), new(deadline=220, run_at=150))

    taken = claim(store, now=220, due_by=180)

    assert ids(taken) == [1]
    assert [change.after.id for change in taken.settled] == [4]


def test_lost_rows_at_or_above_the_bound_are_left(store: Store) -> None:
    rows = [running(store), running(store)]

    taken = claim(store, now=200, below=2)

    assert (ids(taken), taken.lost_waiting) == ([1], False)
    assert store.get(rows[1].id) == rows[1]


def test_running_rows_with_a_requested_cancel_are_listed(store: Store) -> None:
    row, other = running(store), running(store)
    cancel(store, other)
    [queued] = add(store, new(run_at=900))
    cancel(store, queued)

    assert claim(store, policies={}).cancelled == [other.fence]
    assert now_of(store, row).cancel_requested is False


# Claiming: deadlines.


def test_a_queued_row_of_any_kind_fails_at_its_deadline(store: Store) -> None:
    rows = add(
        store, new("sms", deadline=150), new(deadline=150, run_at=900), new(deadline=151), new()
    )

    early = claim(store, now=149, policies={})
    late = claim(store, now=150)

    assert (early.settled, early.next_deadline) == ([], 150)
    assert [change.before for change in late.settled] == rows[:2]
    assert [store.get(row.id) for row in rows[:2]] == [change.after for change in late.settled]
    assert {change.after.failure for change in late.settled} == {_lifecycle.DEADLINE}
    assert ids(late) == [3, 4]
    assert late.next_deadline is None


def test_a_limit_of_0_still_ends_what_a_deadline_ends(store: Store) -> None:
    add(store, new(deadline=150))

    assert len(claim(store, now=150, limit=0).settled) == 1


def test_the_work_that_deadlines_bring_is_bounded_and_none_starts_late(store: Store) -> None:
    add(store, *[new(deadline=150) for _ in range(1200)])

    rounds = [claim(store, now=150, limit=10) for _ in range(4)]

    assert [len(round.settled) for round in rounds] == [500, 500, 200, 0]
    assert [round.next_deadline for round in rounds] == [150, 150, None, None]
    assert not any(round.jobs for round in rounds)


# Claiming: lost rows.


def test_a_row_is_lost_when_its_lease_ends_and_starts_again(store: Store) -> None:
    row = running(store)

    assert claim(store, now=159).jobs == []
    taken = claim(store, now=160)

    lost = _lifecycle.lost(row, POLICY, 160)
    assert taken.settled == [lost]
    assert taken.jobs == [
        ClaimedJob(
            row=_lifecycle.claimed(lost.after, 160, 220),
            was=lost.after,
            payload=b"[1]",
            taken_up=True,
        )
    ]
    assert now_of(store, row) == taken.jobs[0].row
    assert store.history(row.id) == [lost.past]


def test_leases_have_a_clock_of_their_own(store: Store) -> None:
    running(store)

    assert claim(store, now=9999, lease_now=159).jobs == []
    assert ids(claim(store, now=50, lease_now=160)) == [1]


def test_no_more_lost_rows_are_moved_than_may_be_started(store: Store) -> None:
    rows = [running(store, priority=n) for n in range(4)]
    add(store, new(priority=9), new(priority=-9))

    taken = claim(store, now=200, lost_limit=2)

    assert ids(taken) == [5, 4, 3, 6]
    assert [change.before for change in taken.settled] == [rows[3], rows[2]]
    assert (taken.lost_waiting, taken.more) == (True, False)
    assert [now_of(store, row) for row in rows[:2]] == rows[:2]
    assert taken.next_due is None  # the two that wait are lost_waiting, not due


def test_a_row_lost_twice_is_taken_alone_and_only_if_that_is_allowed(store: Store) -> None:
    first = running(store)
    claim(store, now=200)
    second = running(store)

    without = claim(store, now=300, takes_suspect=False, lease_until=310)
    assert (ids(without), without.jobs[0].is_suspect, without.lost_waiting) == (
        [second.id],
        False,
        True,
    )
    alone = claim(store, now=310)
    assert (ids(alone), alone.jobs[0].is_suspect, alone.lost_waiting) == ([first.id], True, True)


def test_a_lost_row_that_finds_no_room_is_left_as_it_is(store: Store) -> None:
    row = running(store)
    add(store, new(priority=1))

    taken = claim(store, now=200, limit=1)

    assert (ids(taken), taken.more, taken.lost_waiting) == ([2], True, False)
    assert taken.settled == []
    assert store.get(row.id) == row


@pytest.mark.parametrize("limit", [0, 5])
def test_losses_that_end_a_job_end_it_at_once(store: Store, limit: int) -> None:
    for kind in ("fail", "dead", "cancelled", "deadline"):
        add(store, new(kind, deadline=180 if kind == "deadline" else None))
    policies = {
        "fail": policy(on_interrupt="fail"),
        "dead": policy(attempts=1),
        "cancelled": POLICY,
        "deadline": POLICY,
    }
    rows = [job.row for job in claim(store, policies=policies).jobs]
    cancel(store, rows[2])

    taken = claim(store, now=200, policies=policies, limit=limit, lost_limit=0)

    assert taken.jobs == []
    assert taken.lost_waiting is False
    assert {change.after.kind: change.after.state for change in taken.settled} == {
        "fail": State.FAILED,
        "dead": State.DEAD,
        "cancelled": State.CANCELLED,
        "deadline": State.FAILED,
    }
    for change in taken.settled:
        assert store.get(change.before.id) == change.after
        assert store.history(change.before.id) == [change.past]


def test_lost_rows_of_other_kinds_end_only_by_cancel_or_deadline(store: Store) -> None:
    rows = [running(store), running(store, deadline=180), running(store)]
    cancel(store, rows[2])

    taken = claim(store, now=200, policies={"sms": POLICY}, lost_limit=0)

    assert {change.before.id: change.after.state for change in taken.settled} == {
        rows[1].id: State.FAILED,
        rows[2].id: State.CANCELLED,
    }
    assert store.get(rows[0].id) == rows[0]
    assert (taken.next_due, taken.lost_waiting) == (None, False)


def test_next_due_knows_the_lost_rows_of_other_kinds_that_will_end(store: Store) -> None:
    running(store, deadline=180)
    row = running(store)

    assert claim(store, policies={"sms": POLICY}).next_due == 180
    cancel(store, row)
    assert claim(store, policies={"sms": POLICY}).next_due == 160


def test_the_holder_of_an_ended_lease_may_still_end_its_row(store: Store) -> None:
    row = running(store)

    assert apply(store, _lifecycle.ended(row, Returned(b"1"), POLICY, 500)) == [None]


def test_after_somebody_took_it_up_the_first_holder_is_refused(store: Store) -> None:
    row = running(store)
    [job] = claim(store, now=200).jobs

    with store.transaction():
        refused = store.apply([_lifecycle.ended(row, Returned(b"1"), POLICY, 210)])
        renewed = store.renew([row.fence], 999)

    assert (refused, renewed) == ([Refused(job.row)], {})


def test_handing_back_leaves_no_trace_but_in_claims(store: Store) -> None:
    [row] = add(store, new(run_at=50))
    [job] = claim(store).jobs

    apply(store, _lifecycle.ended(job.row, NeverStarted(job.was), POLICY, 110))

    assert now_of(store, row) == msgspec.structs.replace(row, claims=1)
    assert store.history(row.id) == []
    assert ids(claim(store, now=110)) == [row.id]


def test_every_due_row_is_found_when_very_many_come_due_at_once(store: Store) -> None:
    add(store, *[new(run_at=200) for _ in range(2500)])

    taken: list[int] = []
    while True:
        claimed = claim(store, now=200, limit=700)
        taken += ids(claimed)
        assert claimed.more or claimed.next_due is None or claimed.next_due > 200
        if not claimed.more:
            break

    assert sorted(taken) == list(range(1, 2501))


# Reading.


def test_get_and_history_know_what_is_not_there(store: Store) -> None:
    [row] = add(store, new())

    assert store.history(row.id) == []
    for id in (0, -1, 2, 2**63, -(2**80)):
        assert store.get(id) is None
        assert store.history(id) is None


def test_find_selects_by_state_kind_and_id(store: Store) -> None:
    rows = add(store, *[new(kind) for kind in ("mail", "sms") * 3])
    claimed = claim(store, limit=1).jobs[0].row
    scheduled = add(store, new(run_at=900))[0]
    everything = [claimed, *rows[1:], scheduled]

    def find(*states: State, kind: str | None = None, after: int = 0, limit: int = 99) -> list[Row]:
        return store.find(states=states, kind=kind, after=after, limit=limit)

    assert find() == everything
    assert find(State.QUEUED) == everything[1:]
    assert find(State.RUNNING, State.DEAD) == [claimed]
    assert find(State.DEAD) == []
    assert find(kind="sms") == rows[1::2]
    assert find(State.RUNNING, kind="sms") == []
    assert find(after=2, limit=2) == everything[2:4]
    assert find(after=2**70) == []
    assert find(limit=2**70, after=-(2**70)) == everything
    assert find(limit=0) == []


def test_counts_are_by_state(store: Store) -> None:
    add(store, *[new() for _ in range(5)], new("sms", run_at=900))
    claim(store, limit=2)

    assert store.counts(None) == {State.QUEUED: 4, State.RUNNING: 2}
    assert store.counts("sms") == {State.QUEUED: 1}
    assert store.counts("nothing") == {}


def test_queued_kinds_are_those_with_a_queued_row(store: Store) -> None:
    assert store.queued_kinds() == set()

    add(store, new("b"), new("a"), new("a"), new("c", run_at=900), new("a", run_at=900), new(""))
    claim(store, policies={"b": POLICY})

    assert store.queued_kinds() == {"a", "c", ""}


T = TypeVar("T")


def from_another_thread(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10)


def test_a_lock_of_our_own_is_none_that_others_hold(store: Store) -> None:
    assert store.is_unlocked()
    with store.transaction():
        seen = from_another_thread(store.is_unlocked)
    assert seen
    assert store.is_unlocked()
    assert len(add(store, new())) == 1


def test_those_that_ended_or_are_not_there_are_found_among_any_number_of_ids(store: Store) -> None:
    rows = add(store, *[new() for _ in range(4)])
    jobs = claim(store, limit=2).jobs
    cancel(store, rows[3])
    apply(store, _lifecycle.ended(jobs[1].row, Returned(b"1"), POLICY, 110))

    found = store.finished([*(row.id for row in rows), -1, 10**6, 2**63 - 1])

    assert found == {
        rows[1].id: now_of(store, rows[1]),
        rows[3].id: now_of(store, rows[3]),
        **dict.fromkeys([-1, 10**6, 2**63 - 1]),
    }
    assert store.finished([]) == {}


def version(store: Store) -> object:
    with store.transaction():
        return store.version(100)


def test_what_a_store_does_itself_is_no_news_to_it(store: Store) -> None:
    before = version(store)
    add(store, new())
    claim(store)
    store.get(1)

    assert version(store) == before


def test_tidying_is_fine_at_any_time(store: Store) -> None:
    for _ in range(3):
        add(store, new(payload=b"x" * 100_000))
        store.tidy(100)

    assert store.counts(None) == {State.QUEUED: 3}


# All of it against a model: the rows of the store are those of the pure table.


class Model:
    """The promises of a store, in memory and without any thought of speed."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.past: dict[int, list[PastStart]] = {}

    def live(self, kind: str, key: str | None) -> Row | None:
        return next(
            (
                row
                for row in self.rows.values()
                if not row.state.is_final and key is not None and (row.kind, row.key) == (kind, key)
            ),
            None,
        )

    def put(self, change: Change) -> None:
        self.rows[change.after.id] = change.after
        if change.past is not None:
            self.past[change.after.id].append(change.past)

    def apply(self, change: Change) -> Refused | None:
        before, after = change.before, change.after
        row = self.rows[before.id]
        if (row.state, row.claims, row.cancel_requested) != (
            before.state,
            before.claims,
            before.cancel_requested,
        ):
            return Refused(row)
        if change.lease_over is not None and row.lease_until != change.lease_over:
            return Refused(row)
        if row.state.is_final and not after.state.is_final and self.live(row.kind, row.key):
            return Refused(row)
        kept: dict[str, Any] = {}
        if after.result == before.result:
            kept["result"] = row.result
        if row.state is after.state is State.RUNNING:
            kept["lease_until"] = row.lease_until
        self.put(msgspec.structs.replace(change, after=msgspec.structs.replace(after, **kept)))
        return None

    def claim(self, claim: Claim) -> Claimed:
        now = claim.now
        below = claim.below or 10**9
        due_by = now if claim.due_by is None else claim.due_by
        settled: list[Change] = []
        retryable: list[Change] = []
        for row in list(self.rows.values()):
            if row.state is State.RUNNING and row.id in claim.held:
                continue
            lost = _lifecycle.is_lost(row, claim.lease_now)
            if lost and row.kind in claim.policies:
                change = _lifecycle.lost(row, claim.policies[row.kind], now)
                if change.after.state is State.QUEUED:
                    if row.id < below:
                        retryable.append(change)
                    continue
                settled.append(change)
            else:
                expired = _lifecycle.expired(row, now, claim.lease_now)
                if expired is not None:
                    settled.append(expired)
        for change in settled:
            self.put(change)
        retryable.sort(key=lambda change: order(change.after))
        gentle = [change for change in retryable if change.before.failure != WORKER_LOST]
        if claim.takes_suspect and retryable[:1] != gentle[:1]:
            gentle = retryable[:1]
        starts = {change.after.id: change for change in gentle[: claim.lost_limit]}
        due = [
            row
            for row in self.rows.values()
            if row.state is State.QUEUED
            and row.kind in claim.policies
            and (row.run_at <= due_by or row.run_at <= row.enqueued_at)
            and row.id < below
            and row.id not in claim.held
        ]
        places = sorted([*due, *(change.after for change in starts.values())], key=order)
        jobs: list[ClaimedJob] = []
        number = claim.limit
        for row in places[claim.limit : claim.limit + claim.ahead_limit]:
            is_last = row.attempt + 1 >= claim.policies[row.kind].attempts
            if row.kind not in claim.ahead_kinds or row.id in starts or is_last:
                break
            number += 1
        for row in places[:number]:
            if row.id in starts:
                self.put(starts[row.id])
                settled.append(starts[row.id])
            taken = _lifecycle.claimed(row, now, claim.lease_until)
            self.rows[row.id] = taken
            jobs.append(
                ClaimedJob(
                    row=taken,
                    was=row,
                    payload=b"[1]",
                    taken_up=row.id in starts,
                    is_suspect=row.id in starts and starts[row.id].before.failure == WORKER_LOST,
                )
            )
        in_hand = claim.held | {job.row.id for job in jobs}
        nexts = [
            row.run_at
            for row in self.rows.values()
            if row.state is State.QUEUED
            and row.kind in claim.policies
            and row.id < below
            and row.id not in in_hand
        ]
        nexts += [one.after.run_at for one in starts.values() if one.after.id not in in_hand]
        for row in self.rows.values():
            if row.state is State.RUNNING and row.id not in in_hand:
                assert row.lease_until is not None
                ends_at = row.lease_until
                if row.kind not in claim.policies and not row.cancel_requested:
                    ends_at = max(ends_at, row.deadline or ends_at) if row.deadline else 0
                if ends_at > claim.lease_now:
                    nexts.append(ends_at)
        deadlines = [
            row.deadline
            for row in self.rows.values()
            if row.state is State.QUEUED and row.deadline is not None
        ]
        return Claimed(
            jobs=jobs,
            settled=settled,
            lost_waiting=len(retryable) > len(starts),
            more=len(places) > number,
            next_due=min(nexts, default=None),
            next_deadline=min(deadlines, default=None),
            cancelled=[
                row.fence
                for row in self.rows.values()
                if row.state is State.RUNNING and row.cancel_requested
            ],
        )


def order(row: Row) -> tuple[int, int, int]:
    return (-row.priority, row.run_at, row.id)


def by_id(claimed: Claimed) -> Claimed:
    """Settled and cancelled rows come in no order."""
    return msgspec.structs.replace(
        claimed,
        settled=sorted(claimed.settled, key=lambda change: change.before.id),
        cancelled=sorted(claimed.cancelled),
    )


kinds = st.sampled_from(["a", "b", "c"])
policies = st.dictionaries(
    kinds,
    st.builds(policy, attempts=st.integers(1, 3), on_interrupt=st.sampled_from(["retry", "fail"])),
    min_size=1,
)
ends = st.one_of(
    st.builds(Returned, st.sampled_from([b"1", b'"two"'])),
    st.builds(Raised, st.just(Failure("no", "ValueError"))),
    st.builds(RefusedForGood, st.just(Failure("never"))),
    st.builds(RetryAfter, st.integers(0, 10)),
    st.just(InterruptedByShutdown()),
)
soon = st.integers(-3, 6)
ago = st.integers(0, 12)


class StoreAndModel(RuleBasedStateMachine):
    """Random operations, also on rows as they were before; the clock goes both ways."""

    def __init__(self, make: Callable[[Path], Store], folder: Path) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=folder)
        self.store = make(Path(self.folder.name))
        self.store.open()
        self.model = Model()
        self.versions: list[Row] = []
        self.now = 100

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @initialize(count=st.integers(1, 6))
    def begin(self, count: int) -> None:
        self.add([new("abc"[n % 3], priority=n // 3) for n in range(count)])

    @rule(by=soon)
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule(
        jobs=st.lists(
            st.builds(
                new,
                kind=kinds,
                priority=st.integers(-1, 1),
                run_at=soon,
                deadline=st.none() | soon,
                key=st.sampled_from([None, "k", "l"]),
            ),
            max_size=4,
        )
    )
    def add(self, jobs: list[NewJob]) -> None:
        jobs = [
            msgspec.structs.replace(
                job,
                enqueued_at=self.now,
                run_at=self.now + job.run_at % 10,
                deadline=None if job.deadline is None else self.now + job.deadline,
            )
            for job in jobs
        ]
        with self.store.transaction():
            added = self.store.add(jobs)
        for job, (row, is_new) in zip(jobs, added, strict=True):
            found = self.model.live(job.kind, job.key)
            assert is_new == (found is None)
            if found is None:
                assert row.id == len(self.model.rows) + 1
                self.model.rows[row.id] = row
                self.model.past[row.id] = []
            else:
                assert row == found

    @rule(
        policies=policies,
        limit=st.integers(0, 4),
        ahead_limit=st.sampled_from([0, 0, 1, 3]),
        ahead_kinds=st.frozensets(kinds),
        lost_limit=st.integers(0, 3),
        takes_suspect=st.booleans(),
        held=st.frozensets(st.integers(1, 4), max_size=1),
        below=st.none() | st.integers(1, 8),
        lease=st.integers(1, 8),
        lease_lag=st.just(0) | soon,
        due_lag=st.none() | soon,
    )
    def claim(self, lease: int, lease_lag: int, due_lag: int | None, **fields: Any) -> None:
        claim = Claim(
            now=self.now,
            lease_now=self.now + lease_lag,
            lease_until=self.now + lease,
            due_by=None if due_lag is None else self.now + due_lag,
            **fields,
        )
        with self.store.transaction():
            claimed = self.store.claim(claim)

        expected = self.model.claim(claim)
        if claim.due_by is not None:
            claimed = msgspec.structs.replace(claimed, next_due=expected.next_due)
        elif claimed.more:
            assert claimed.next_due is None
            claimed = msgspec.structs.replace(claimed, next_due=expected.next_due)
        assert by_id(claimed) == by_id(expected)

    @rule(
        decisions=st.lists(
            st.tuples(ago, st.sampled_from(["end", "end", "cancel", "retry", "publish"]), ends),
            min_size=1,
            max_size=4,
        ),
        policy=st.builds(policy),
    )
    def apply(self, decisions: Sequence[tuple[int, str, End]], policy: Policy) -> None:
        changes = [
            change
            for which, decision, end in decisions
            if (change := self.decide(self.version(which), decision, end, policy)) is not None
        ]
        with self.store.transaction():
            refused = self.store.apply(changes)
        assert refused == [self.model.apply(change) for change in changes]

    def decide(self, row: Row, decision: str, end: End, policy: Policy) -> Change | None:
        try:
            if decision == "cancel":
                return _lifecycle.cancelled(row, self.now)
            if decision == "retry":
                return _lifecycle.retried(row, self.now)
            if decision == "publish" and row.state is State.RUNNING:
                return _lifecycle.published(row, b'"%d"' % self.now)
            return _lifecycle.ended(row, end, policy, self.now)
        except _lifecycle.IllegalTransition:
            return None

    @rule(which=st.lists(ago, max_size=3), until=soon)
    def renew(self, which: list[int], until: int) -> None:
        fences = [self.version(each).fence for each in which]
        with self.store.transaction():
            renewed = self.store.renew(fences, self.now + until)
        expected = {}
        for fence in fences:
            row = self.model.rows[fence[0]]
            if row.fence == fence and row.state is State.RUNNING:
                expected[fence] = row.cancel_requested
                self.model.rows[row.id] = msgspec.structs.replace(row, lease_until=self.now + until)
        assert renewed == expected

    def version(self, which: int) -> Row:
        """A row as it is, or as it was before: the more, the longer ago."""
        return self.versions[-1 - which % len(self.versions)]

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        rows = list(self.model.rows.values())
        assert self.store.find(states=[], kind=None, after=0, limit=1000) == rows
        self.versions += [row for row in rows if row not in self.versions]
        for id, past in self.model.past.items():
            assert self.store.history(id) == past
        assert self.store.queued_kinds() == {row.kind for row in rows if row.state is State.QUEUED}


@pytest.mark.parametrize("name", STORES)
def test_random_operations_leave_what_the_pure_table_says(name: str, tmp_path: Path) -> None:
    machine: Any = lambda: StoreAndModel(STORES[name], tmp_path)  # noqa: E731
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=20 * TIMES,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        ),
    )
