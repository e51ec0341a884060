"""The pure core: the table of transitions, row by row, and what must hold of every change."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from trio_jobs import _lifecycle as lifecycle
from trio_jobs._instants import LATEST
from trio_jobs._lifecycle import Event, IllegalTransition
from trio_jobs._model import Change, Failure, Policy, Row, State

NOW = 1_000_000_000
SECOND = 1_000_000
POLICY = Policy(attempts=3, on_interrupt="retry", wait=lambda job_id, attempt: attempt * SECOND)
FAIL_POLICY = msgspec.structs.replace(POLICY, on_interrupt="fail")
FAILURE = Failure("no")

QUEUED = Row(
    id=7,
    kind="resize",
    state=State.QUEUED,
    attempt=0,
    claims=0,
    interruptions=0,
    cancel_requested=False,
    priority=0,
    key=None,
    enqueued_at=NOW - 9,
    run_at=NOW - 5,
    deadline=None,
    lease_until=None,
    started_at=None,
    finished_at=None,
    result=None,
    failure=None,
)
RUNNING = lifecycle.claimed(QUEUED, NOW - 2, NOW + 60 * SECOND)
LAST = msgspec.structs.replace(RUNNING, attempt=3, claims=3)
CANCELLING = msgspec.structs.replace(RUNNING, cancel_requested=True)

ENDS = [
    lifecycle.Returned(b"1"),
    lifecycle.Raised(FAILURE),
    lifecycle.RefusedForGood(FAILURE),
    lifecycle.RetryAfter(30 * SECOND),
    lifecycle.InterruptedByShutdown(),
    lifecycle.NeverStarted(QUEUED),
    lifecycle.LeaseOver(),
    lifecycle.DeadlinePassed(),
]


def ended(row: Row, end: lifecycle.End, policy: Policy = POLICY) -> Change:
    return lifecycle.ended(row, end, policy, NOW)


def test_a_claim_counts_the_attempt_and_the_claim_and_sets_the_lease() -> None:
    row = lifecycle.claimed(QUEUED, NOW, NOW + 60)

    assert (row.state, row.attempt, row.claims) == (State.RUNNING, 1, 1)
    assert (row.lease_until, row.started_at, row.run_at) == (NOW + 60, NOW, QUEUED.run_at)


def test_a_returned_value_succeeds_and_clears_the_failure_of_earlier_attempts() -> None:
    change = ended(msgspec.structs.replace(RUNNING, failure=FAILURE), lifecycle.Returned(b"5"))

    assert change.after.state is State.SUCCEEDED
    assert (change.after.result, change.after.failure) == (b"5", None)
    assert (change.after.finished_at, change.after.lease_until) == (NOW, None)
    assert change.past is None


def test_a_failed_attempt_waits_for_its_backoff() -> None:
    change = ended(RUNNING, lifecycle.Raised(FAILURE))

    assert (change.after.state, change.after.attempt) == (State.QUEUED, 1)
    assert change.after.run_at == NOW + SECOND
    assert change.after.failure == FAILURE
    assert change.past is not None
    assert (change.past.outcome, change.past.number, change.past.claim) == ("failed", 1, 1)
    assert (change.past.started_at, change.past.ended_at) == (NOW - 2, NOW)


def test_the_last_failed_attempt_is_a_dead_letter() -> None:
    change = ended(LAST, lifecycle.Raised(FAILURE))

    assert (change.after.state, change.after.failure) == (State.DEAD, FAILURE)


def test_a_timeout_is_a_failed_attempt_with_an_outcome_of_its_own() -> None:
    change = ended(RUNNING, lifecycle.Raised(lifecycle.TIMED_OUT, "timed out"))

    assert change.after.state is State.QUEUED
    assert change.past is not None
    assert change.past.outcome == "timed out"
    assert change.past.failure == Failure("timed out")


def test_a_refusal_fails_for_good_whatever_attempts_are_left() -> None:
    change = ended(RUNNING, lifecycle.RefusedForGood(FAILURE))

    assert (change.after.state, change.after.failure) == (State.FAILED, FAILURE)


def test_retry_later_gives_the_attempt_back() -> None:
    change = ended(LAST, lifecycle.RetryAfter(30 * SECOND))

    assert (change.after.state, change.after.attempt) == (State.QUEUED, 2)
    assert change.after.run_at == NOW + 30 * SECOND
    assert change.past is not None
    assert change.past.outcome == "retry later"


def test_retry_later_never_passes_the_year_9999() -> None:
    change = ended(RUNNING, lifecycle.RetryAfter(2**62))

    assert change.after.run_at == LATEST


def test_an_interruption_keeps_run_at_and_gives_the_attempt_back() -> None:
    change = ended(LAST, lifecycle.InterruptedByShutdown())

    assert (change.after.state, change.after.attempt) == (State.QUEUED, 2)
    assert (change.after.run_at, change.after.interruptions) == (LAST.run_at, 1)
    assert change.past is not None
    assert change.past.outcome == "interrupted"


def test_after_ten_interruptions_in_a_row_each_further_one_uses_up_an_attempt() -> None:
    row = msgspec.structs.replace(RUNNING, interruptions=9)
    tenth = ended(row, lifecycle.InterruptedByShutdown()).after
    again = lifecycle.claimed(tenth, NOW, NOW + SECOND)
    eleventh = ended(again, lifecycle.InterruptedByShutdown()).after

    assert (tenth.interruptions, tenth.attempt) == (10, 0)
    assert (eleventh.interruptions, eleventh.attempt) == (11, 1)


def test_an_interruption_with_no_attempt_left_is_a_dead_letter() -> None:
    row = msgspec.structs.replace(LAST, interruptions=10)

    change = ended(row, lifecycle.InterruptedByShutdown())

    assert (change.after.state, change.after.failure) == (State.DEAD, Failure("interrupted"))


@pytest.mark.parametrize(
    "end", [lifecycle.Raised(FAILURE), lifecycle.RetryAfter(1), lifecycle.LeaseOver()]
)
def test_any_other_end_starts_the_count_of_interruptions_anew(end: lifecycle.End) -> None:
    row = msgspec.structs.replace(RUNNING, interruptions=9)

    assert ended(row, end).after.interruptions == 0


@pytest.mark.parametrize("end", [lifecycle.InterruptedByShutdown(), lifecycle.LeaseOver()])
def test_a_kind_that_must_not_be_repeated_fails_as_interrupted_by_restart(
    end: lifecycle.End,
) -> None:
    change = ended(RUNNING, end, FAIL_POLICY)

    assert change.after.state is State.FAILED
    assert change.after.failure == Failure("interrupted by restart")


def test_a_row_that_was_never_started_leaves_no_trace_but_in_claims() -> None:
    change = ended(RUNNING, lifecycle.NeverStarted(QUEUED), FAIL_POLICY)

    assert change.after == msgspec.structs.replace(QUEUED, claims=1)
    assert change.past is None


def test_a_lost_attempt_counts_and_the_row_is_due_at_once() -> None:
    change = lifecycle.lost(RUNNING, POLICY, NOW)

    assert (change.after.state, change.after.attempt) == (State.QUEUED, 1)
    assert change.after.run_at == RUNNING.run_at
    assert change.past is not None
    assert (change.past.outcome, change.past.failure) == ("lost", Failure("worker lost"))


def test_a_lost_row_with_no_attempt_left_is_dead_with_worker_lost() -> None:
    change = lifecycle.lost(LAST, POLICY, NOW)

    assert (change.after.state, change.after.failure) == (State.DEAD, Failure("worker lost"))


def test_a_lost_row_past_its_deadline_fails_with_deadline() -> None:
    change = lifecycle.lost(msgspec.structs.replace(RUNNING, deadline=NOW), POLICY, NOW)

    assert (change.after.state, change.after.failure) == (State.FAILED, Failure("deadline"))


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
def test_a_requested_cancel_comes_before_every_end(end: lifecycle.End) -> None:
    change = ended(CANCELLING, end)

    assert change.after.state is State.CANCELLED
    assert change.after.finished_at == NOW


def test_a_requested_cancel_comes_before_a_loss() -> None:
    assert lifecycle.lost(CANCELLING, FAIL_POLICY, NOW).after.state is State.CANCELLED


def test_cancel_ends_a_queued_row_at_once() -> None:
    change = lifecycle.cancelled(QUEUED, NOW)

    assert change is not None
    assert (change.after.state, change.past) == (State.CANCELLED, None)


def test_cancel_of_a_running_row_is_a_request_that_its_attempt_answers() -> None:
    change = lifecycle.cancelled(RUNNING, NOW)

    assert change is not None
    assert change.after == CANCELLING


def test_cancel_of_a_lost_row_ends_it_at_once() -> None:
    change = lifecycle.cancelled(msgspec.structs.replace(RUNNING, lease_until=NOW), NOW)

    assert change is not None
    assert change.after.state is State.CANCELLED


@pytest.mark.parametrize("state", [state for state in State if state.is_final])
def test_cancel_of_an_ended_row_changes_nothing(state: State) -> None:
    assert lifecycle.cancelled(msgspec.structs.replace(RUNNING, state=state), NOW) is None


def test_a_second_cancel_of_a_running_row_changes_nothing() -> None:
    assert lifecycle.cancelled(CANCELLING, NOW) is None


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (msgspec.structs.replace(QUEUED, deadline=NOW), State.FAILED),
        (msgspec.structs.replace(QUEUED, deadline=NOW + 1), None),
        (QUEUED, None),
        (msgspec.structs.replace(RUNNING, deadline=NOW), None),
        (msgspec.structs.replace(RUNNING, deadline=NOW, lease_until=NOW), State.FAILED),
        (msgspec.structs.replace(CANCELLING, lease_until=NOW), State.CANCELLED),
        (msgspec.structs.replace(RUNNING, lease_until=NOW), None),
    ],
)
def test_any_runner_ends_what_its_deadline_or_cancel_ends(row: Row, state: State | None) -> None:
    change = lifecycle.expired(row, NOW)

    assert (None if change is None else change.after.state) == state


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (msgspec.structs.replace(RUNNING, deadline=NOW), State.FAILED),
        (CANCELLING, State.CANCELLED),
        (msgspec.structs.replace(RUNNING, deadline=NOW + 1), None),
        (msgspec.structs.replace(QUEUED, deadline=NOW + 1), None),
        (msgspec.structs.replace(LAST, state=State.DEAD, cancel_requested=True), None),
    ],
)
def test_a_row_whose_owner_is_dead_is_lost_before_its_lease_ends(
    row: Row, state: State | None
) -> None:
    change = lifecycle.expired(row, NOW, is_owner_dead=True)

    assert (None if change is None else change.after.state) == state
    assert lifecycle.is_lost(row, NOW, is_owner_dead=True) == (row.state is State.RUNNING)


@pytest.mark.parametrize(
    ("row", "state"), [(RUNNING, State.CANCELLED), (CANCELLING, State.CANCELLED), (LAST, None)]
)
def test_a_cancel_ends_a_row_whose_owner_is_dead_before_its_lease_ends(
    row: Row, state: State | None
) -> None:
    row = row if state else msgspec.structs.replace(row, state=State.DEAD, lease_until=None)

    change = lifecycle.cancelled(row, NOW, is_owner_dead=True)

    assert (None if change is None else change.after.state) == state
    assert change is None or (change.past is not None and change.past.outcome == "cancelled")


@pytest.mark.parametrize("state", [State.FAILED, State.DEAD, State.CANCELLED])
def test_a_retry_by_hand_is_a_new_life_that_keeps_claims_and_the_published_result(
    state: State,
) -> None:
    row = msgspec.structs.replace(
        LAST, state=state, result=b"[1]", interruptions=4, finished_at=NOW - 1, lease_until=None
    )

    after = lifecycle.retried(row, NOW).after

    assert (after.state, after.attempt, after.interruptions) == (State.QUEUED, 0, 0)
    assert (after.claims, after.result, after.run_at, after.finished_at) == (3, b"[1]", NOW, None)


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING, State.SUCCEEDED])
def test_no_other_row_can_be_retried_by_hand(state: State) -> None:
    with pytest.raises(IllegalTransition, match=f"job 7 is {state.value}"):
        lifecycle.retried(msgspec.structs.replace(RUNNING, state=state), NOW)


def test_publishing_touches_nothing_but_the_result() -> None:
    change = lifecycle.published(RUNNING, b"[1]")

    assert change.after == msgspec.structs.replace(RUNNING, result=b"[1]")


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
@pytest.mark.parametrize("state", [state for state in State if state.is_final])
def test_an_attempt_cannot_end_what_has_ended(state: State, end: lifecycle.End) -> None:
    with pytest.raises(IllegalTransition):
        ended(msgspec.structs.replace(RUNNING, state=state), end)


def test_every_event_and_every_state_has_a_place_in_the_table() -> None:
    assert {event for _, event in lifecycle.TRANSITIONS} == set(Event)
    assert {to for states in lifecycle.TRANSITIONS.values() for to in states} == set(State)
    assert not any(state is State.SUCCEEDED for state, _ in lifecycle.TRANSITIONS)


rows = st.builds(
    Row,
    id=st.integers(1, 9),
    kind=st.just("resize"),
    state=st.just(State.RUNNING),
    attempt=st.integers(1, 9),
    claims=st.integers(1, 30),
    interruptions=st.integers(0, 20),
    cancel_requested=st.booleans(),
    priority=st.integers(-3, 3),
    key=st.none() | st.text(),
    enqueued_at=st.integers(0, NOW),
    run_at=st.integers(0, NOW),
    deadline=st.none() | st.integers(0, 2 * NOW),
    lease_until=st.integers(0, 2 * NOW),
    started_at=st.integers(0, NOW),
    finished_at=st.none(),
    result=st.none() | st.binary(),
    failure=st.none() | st.just(FAILURE),
)
policies = st.builds(
    Policy,
    attempts=st.integers(1, 9),
    on_interrupt=st.sampled_from(["retry", "fail"]),
    wait=st.just(POLICY.wait),
)


@given(rows, policies, st.sampled_from(ENDS))
def test_every_end_keeps_who_the_job_is_and_gives_up_the_lease(
    row: Row, policy: Policy, end: lifecycle.End
) -> None:
    after = lifecycle.ended(row, end, policy, NOW).after

    for name in ("id", "kind", "claims", "priority", "key", "enqueued_at", "deadline"):
        assert getattr(after, name) == getattr(row, name)
    assert after.lease_until is None
    assert (after.finished_at is not None) == after.state.is_final
    assert after.attempt in (row.attempt, row.attempt - 1, QUEUED.attempt)


WHAT_HAPPENS: dict[str, lifecycle.End] = {
    "raise": lifecycle.Raised(FAILURE),
    "interrupt": lifecycle.InterruptedByShutdown(),
    "lose": lifecycle.LeaseOver(),
}


@given(rows, policies, st.lists(st.sampled_from(list(WHAT_HAPPENS)), max_size=200))
def test_no_job_is_started_for_ever(row: Row, policy: Policy, story: list[str]) -> None:
    starts, now = 0, NOW
    row = msgspec.structs.replace(
        row, attempt=1, claims=1, interruptions=0, cancel_requested=False, deadline=None
    )
    for what in story:
        starts += 1
        after = lifecycle.ended(row, WHAT_HAPPENS[what], policy, now).after
        if after.state is not State.QUEUED:
            break
        row = lifecycle.claimed(after, now, now + SECOND)

    # At most ten interruptions are free, and only those that come in a row.
    assert starts <= policy.attempts * (lifecycle.MAX_INTERRUPTIONS + 1)
