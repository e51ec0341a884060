"""Each promise is kept by a good history, and each judge says so when it is broken."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from trio_jobs import SqliteStore

from .evidence import (
    Audit,
    Evidence,
    Fault,
    History,
    Image,
    LogLine,
    Publication,
    Rest,
    Rules,
    Start,
    Step,
    Stop,
    audit_schema,
    read_audit,
)
from .invariants import CHECKERS, PROMISES, check_all

RULES = {
    "work": Rules(attempts=2),
    "last": Rules(attempts=1),
    "limited": Rules(attempts=2, timeout=1.0, backoff=1.0),
}
SECOND = 1_000_000_000


class Case:
    """A history in the making: each call of `step` changes one job, at the next moment."""

    def __init__(self) -> None:
        self.history = History()
        self.steps: list[Step] = []
        self.images: dict[int, Image] = {}
        self.moment = 0
        self.rest: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        for process in ("client", "a", "b"):
            self.history.life(process, self.now())

    def now(self) -> int:
        self.moment += 10
        return self.moment

    def step(self, job: int, who: str, *, outcome: str | None = None, **changes: Any) -> Step:
        before = self.images.get(job)
        after = dataclasses.replace(before or Image("queued", "work"), **changes)
        self.images[job] = after
        payload = f'"canary {job}"' if before is None else None
        at = self.now()
        self.steps.append(Step(at, at, who, at, job, before, after, payload, outcome))
        return self.steps[-1]

    def enqueue(self, job: int = 1, **columns: Any) -> None:
        call = self.history.call(
            "enqueue", "client", self.now(), kind="work", payloads=(f'"canary {job}"',)
        )
        self.step(job, "client", **columns)
        call.ok(self.now(), ids=(job,))

    def claim(self, job: int = 1, who: str = "a", lease: int = 1000) -> Start:
        was = self.images[job]
        self.step(
            job,
            who,
            state="running",
            attempt=was.attempt + 1,
            claims=was.claims + 1,
            lease_until=self.moment + lease,
            started_at=self.moment,
        )
        at = self.now()
        return self.history.start(who, job, was.claims + 1, was.attempt + 1, at, at)

    def finish(
        self, start: Start, state: str = "succeeded", who: str | None = None, **columns: Any
    ) -> Step:
        start.ended_at = self.now()
        start.ending = "returned"
        start.returned = columns.setdefault("result", "7")
        return self.end(start.job, state, who or start.process, **columns)

    def end(self, job: int, state: str, who: str, **columns: Any) -> Step:
        finished_at = None if state == "queued" else self.moment
        columns |= {"lease_until": None, "finished_at": finished_at}
        return self.step(job, who, state=state, **columns)

    def fail(self, start: Start, state: str = "queued", **columns: Any) -> Step:
        start.ended_at, start.ending = self.now(), "ValueError"
        columns.setdefault("outcome", "failed")
        return self.end(start.job, state, start.process, **columns)

    def evidence(self) -> Evidence:
        at = self.now()
        states = {job: image.state for job, image in self.images.items()}
        return Evidence(
            self.history,
            Audit(self.steps),
            RULES,
            canary="canary",
            rest=Rest(at, **{"states": states, **self.rest}),
            settle_by=at,
            **self.settings,
        )

    def broken(self) -> set[str]:
        return {violation.invariant for violation in check_all(self.evidence())}

    def accused(self) -> str:
        """Sentence by sentence, where more than one of a promise would be broken."""
        return "\n".join(violation.text for violation in check_all(self.evidence()))


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_good_history_is_good(case: Case) -> None:
    case.enqueue(1, key="k")
    start = case.claim(1)
    case.step(1, "a", lease_until=5000)
    publication = Publication('"half"', case.now())
    start.published.append(publication)
    case.step(1, "a", result='"half"')
    publication.outcome, publication.answered_at = "ok", case.now()
    case.fail(start)
    case.finish(case.claim(1, "b"))
    case.enqueue(2, key="k")
    case.history.life("c", case.now()).killed_at = case.moment + 100
    case.claim(2, "c", lease=10**6)
    case.moment += 1000
    case.end(2, "queued", "b", outcome="lost")
    case.finish(case.claim(2, "b"))
    cancel = case.history.call("cancel", "client", case.now(), job=2)
    cancel.ok(case.now(), answer=False)
    got = case.history.call("get", "client", case.now(), job=2)
    got.ok(case.now(), ids=(2,), states=("succeeded",))

    assert check_all(case.evidence()) == []


def test_every_promise_has_its_judge() -> None:
    judged = {name for name, _ in CHECKERS}
    assert judged == PROMISES.keys() == {f"I{number}" for number in range(1, 20) if number != 12}


# I1.


def test_an_acknowledged_job_that_is_not_there(case: Case) -> None:
    case.history.call("enqueue", "client", 1, payloads=('"gone"',)).ok(2, ids=(9,))

    assert case.broken() == {"I1"}


def test_a_refused_enqueue_that_inserted(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.history.calls[0].failed(case.now(), "StoreBusy")

    assert "I1" in case.broken()


def test_an_unknown_enqueue_of_two_that_inserted_one(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    call = case.history.calls[0]
    call.payloads += ('"other"',)
    call.outcome = "unknown"

    assert case.broken() == {"I1"}


def test_a_job_that_nobody_asked_for(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.history.calls.clear()

    assert case.broken() == {"I1"}


def test_a_job_that_is_removed_while_it_waits(case: Case) -> None:
    case.enqueue()
    at = case.now()
    case.steps.append(Step(at, at, "client", at, 1, case.images.pop(1), None))

    assert case.broken() == {"I1"}


def test_a_key_that_gives_somebody_elses_job(case: Case) -> None:
    case.enqueue(1)
    call = case.history.call(
        "enqueue", "client", case.now(), kind="work", payloads=('"x"',), keys=("k",)
    )
    call.ok(case.now(), ids=(1,))
    case.finish(case.claim())

    assert case.broken() == {"I1"}


def test_a_payload_that_is_inserted_twice(case: Case) -> None:
    case.enqueue()
    case.step(2, "client")
    case.steps[-1] = dataclasses.replace(case.steps[-1], payload='"canary 1"')
    for job in (1, 2):
        case.finish(case.claim(job))

    assert case.broken() == {"I1"}
    assert "inserted one of them twice" in case.accused()


def test_an_acknowledged_enqueue_that_returned_no_job(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.history.calls[0].ids = ()

    assert case.broken() == {"I1"}
    assert "returned the jobs ()" in case.accused()


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ({1: "failed"}, "is failed in the end, its last change says"),
        ({1: "succeeded", 2: "succeeded"}, "was never inserted"),
    ],
)
def test_a_row_that_is_not_what_its_changes_made_of_it(
    case: Case, states: dict[int, str], sentence: str
) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.rest["states"] = states

    assert case.broken() == {"I1"}
    assert sentence in case.accused()


# I2.


def test_an_end_that_is_overwritten(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.step(1, "b", state="failed")

    assert case.broken() == {"I2"}


def test_a_new_life_that_nobody_asked_for(case: Case) -> None:
    case.enqueue(kind="last")
    case.fail(case.claim(), "dead")
    case.step(1, "b", state="queued", attempt=0)
    case.finish(case.claim())

    assert case.broken() == {"I2"}


def test_a_cancel_that_nobody_asked_for(case: Case) -> None:
    case.enqueue()
    case.end(1, "cancelled", "b")

    assert case.broken() == {"I2"}


def test_a_priority_that_changes(case: Case) -> None:
    case.enqueue()
    case.step(1, "b", priority=7)
    case.finish(case.claim())

    assert case.broken() == {"I2"}


@pytest.mark.parametrize(("outcome", "is_broken"), [("failed", False), ("lost", True)])
def test_a_due_time_that_changes(case: Case, outcome: str, is_broken: bool) -> None:
    case.enqueue()
    case.fail(case.claim(lease=0), outcome=outcome, run_at=case.moment)
    case.finish(case.claim())

    assert case.broken() == ({"I2"} if is_broken else set())


# I3.


def test_a_fence_that_is_given_out_twice(case: Case) -> None:
    case.enqueue()
    case.fail(case.claim())
    case.step(1, "b", state="running", attempt=2, lease_until=9000, started_at=case.moment)
    case.end(1, "failed", "b", outcome="failed", failure="payload does not decode")

    assert "I3" in case.broken()


def test_an_attempt_that_is_not_counted(case: Case) -> None:
    case.enqueue()
    case.fail(case.claim(), attempt=0)
    case.finish(case.claim())

    assert case.broken() == {"I3"}


def test_more_attempts_than_the_kind_allows(case: Case) -> None:
    case.enqueue()
    for _ in range(2):
        case.fail(case.claim())
    case.finish(case.claim())

    assert case.broken() == {"I3", "I4"}
    assert "is at attempt 3 of 2" in case.accused()


@pytest.mark.parametrize(
    ("kind", "outcome", "state"),
    [
        ("work", "failed", "dead"),
        ("work", "lost", "failed"),
        ("last", "timed out", "queued"),
    ],
)
def test_an_end_against_the_rules(case: Case, kind: str, outcome: str, state: str) -> None:
    case.enqueue(kind=kind)
    case.fail(case.claim(), state, outcome=outcome)
    if state == "queued":
        case.history.call("cancel", "client", case.now(), job=1)
        case.step(1, "client", state="cancelled")

    assert case.broken() == {"I3"}


@pytest.mark.parametrize(("counted", "is_broken"), [(1, False), (0, True)])
def test_an_interruption_that_is_not_counted(case: Case, counted: int, is_broken: bool) -> None:
    case.enqueue()
    case.fail(case.claim(), outcome="interrupted", attempt=0, interruptions=counted)
    case.finish(case.claim())

    assert case.broken() == ({"I3"} if is_broken else set())


# I4.


def test_a_start_without_a_claim(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.history.start("b", 1, 2, 2, case.now())

    assert case.broken() == {"I4"}


def test_two_starts_under_one_claim(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    case.history.starts.append(dataclasses.replace(start))
    case.finish(start)

    assert "I4" in case.broken()


def test_a_start_by_another_than_the_holder(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.process = "b"
    case.finish(start, who="a")

    assert "I4" in case.broken()


def test_a_start_before_its_claim(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.at = 1
    case.finish(start)

    assert case.broken() == {"I4"}
    assert "was started before claim 1" in case.accused()


def test_a_start_that_is_told_another_attempt(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.attempt = 2
    case.finish(start)

    assert case.broken() == {"I4"}
    assert "was told attempt 2, the claim says" in case.accused()


def test_a_start_that_was_handed_back_as_never_started(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.ended_at, start.ending = case.now(), "Cancelled"
    case.end(1, "queued", "a", attempt=0)
    case.finish(case.claim())

    assert case.broken() == {"I4"}


# I5.


def test_a_row_that_is_taken_up_before_its_lease_ends(case: Case) -> None:
    case.enqueue()
    case.claim(1, "a", lease=1000).ended_at = case.now()
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim(1, "b"))

    assert case.broken() == {"I5"}
    assert "claim 1 of a was ended by b at" in case.accused()


def test_a_row_that_is_taken_up_after_its_lease_or_from_the_dead(case: Case) -> None:
    case.enqueue(1)
    case.claim(1, "a", lease=0).ended_at = case.now()
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim(1, "b"))
    case.enqueue(2, kind="last")
    case.claim(2, "a")
    case.history.lives[1].killed_at = case.now()
    case.end(2, "dead", "b", outcome="lost")

    assert case.broken() == set()


@pytest.mark.parametrize("is_dead", [False, True])
def test_an_end_that_is_written_by_another(case: Case, is_dead: bool) -> None:
    case.enqueue()
    case.claim(1, "a", lease=0)
    if is_dead:
        case.history.lives[1].killed_at = case.now()
    case.end(1, "queued", "b", outcome="failed")
    case.finish(case.claim(1, "b"))

    assert case.broken() == {"I5"}


def test_a_claim_while_the_handler_of_the_last_one_is_under_way(case: Case) -> None:
    case.enqueue()
    late = case.claim(1, "a", lease=0)
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim(1, "b"))
    late.ended_at = case.now()
    assert case.broken() == {"I5"}

    late.is_stubborn = True
    assert case.broken() == set()

    late.is_stubborn = False
    case.history.faults.append(Fault("freeze", late.at, "b"))
    assert case.broken() == set()


@pytest.mark.parametrize(("runners", "is_broken"), [(1, True), (2, False), (None, False)])
def test_a_runner_claims_nothing_whose_handler_it_still_has(
    case: Case, runners: int | None, is_broken: bool
) -> None:
    case.enqueue()
    late = case.claim(lease=0)
    late.is_stubborn = True
    case.history.lives[1].runners = runners
    case.history.faults.append(Fault("freeze", late.at, "a"))
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim())
    late.ended_at = case.now()

    assert case.broken() == ({"I5"} if is_broken else set())


@pytest.mark.parametrize(("frozen_for", "is_broken"), [(100_000, True), (900_000, False)])
def test_only_a_pause_when_it_had_to_stop_excuses_a_handler(
    case: Case, frozen_for: int, is_broken: bool
) -> None:
    case.enqueue()
    late = case.claim(1, "a", lease=1000)  # microseconds; the rest is in nanoseconds
    case.history.faults.append(Fault("freeze", late.at, "a", late.at + frozen_for))
    case.moment += 1_000_000
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim(1, "b"))
    late.ended_at = case.now()

    assert case.broken() == ({"I5"} if is_broken else set())


def _take_up(case: Case, *, suspects: int = 0, number: int = 2, lasts: int = 10**6) -> list[Start]:
    """Jobs that "a" had when it died, all at a time by "b"."""
    had = len(case.history.starts)
    for job in range(1, number + 1):
        case.enqueue(job, failure="worker lost" if job <= suspects else None)
        case.claim(job, lease=lasts)
    for life in case.history.lives:
        life.runners = 1
        if life.process == "a":
            life.killed_at = case.now()
    case.moment += lasts
    for job in range(1, number + 1):
        case.end(job, "queued", "b", outcome="lost", failure="worker lost")
        case.claim(job, "b")
    return case.history.starts[had + number :]


def test_lost_rows_that_are_taken_up_all_at_a_time(case: Case) -> None:
    for start in _take_up(case):
        case.finish(start)

    assert case.broken() == {"I5"}


def test_of_several_runners_each_takes_up_one(case: Case) -> None:
    starts = _take_up(case)
    case.history.lives[2].runners = None
    for start in starts:
        case.finish(start)

    assert case.broken() == set()


def test_rows_that_their_own_holder_gave_up_are_no_poison(case: Case) -> None:
    for job in (1, 2):
        case.enqueue(job)
        case.claim(job)
    case.history.lives[1].runners = 1
    for start in list(case.history.starts):
        start.ended_at, start.ending = case.now(), "Cancelled"
        case.end(start.job, "queued", "a", outcome="lost", failure="worker lost")
    for job in (1, 2):
        case.claim(job)
    for start in case.history.starts[2:]:
        case.finish(start)

    assert case.broken() == set()


@pytest.mark.parametrize(("ends", "is_broken"), [(True, False), (False, True)])
def test_a_row_that_its_own_holder_gave_up_proves_as_much_as_others(
    case: Case, ends: bool, is_broken: bool
) -> None:
    case.enqueue(9)
    first = case.claim(9, "b")
    first.ended_at, first.ending = case.now(), "Cancelled"
    case.end(9, "queued", "b", outcome="lost")
    again = case.claim(9, "b", lease=10**9)
    if ends:
        case.finish(again)
    starts = _take_up(case, lasts=100)
    for start in starts:
        case.finish(start)
    if not ends:
        case.finish(again)

    assert case.broken() == ({"I5"} if is_broken else set())


def test_a_row_that_its_runner_never_had_in_hand_is_not_beside_others(case: Case) -> None:
    starts = _take_up(case)
    case.history.starts.remove(starts[0])
    case.finish(starts[1])
    case.end(1, "cancelled", "b")

    assert "I5" not in case.broken()


def test_a_lost_row_whose_payload_does_not_decode_is_proven_without_a_start(case: Case) -> None:
    starts = _take_up(case, number=1)
    case.history.starts.remove(starts[0])
    case.end(1, "failed", "b", outcome="failed", failure="payload does not decode")
    for job in (2, 3):
        case.enqueue(job)
        case.claim(job, "a", lease=10)
    case.moment += 100
    for job in (2, 3):
        case.end(job, "queued", "b", outcome="lost", failure="worker lost")
        starts.append(case.claim(job, "b"))
    for start in starts[1:]:
        case.finish(start)

    assert "I5" not in case.broken()


@pytest.mark.parametrize("suspects", [0, 1])
def test_a_row_that_was_lost_twice_and_is_taken_up_beside_others(case: Case, suspects: int) -> None:
    starts = _take_up(case, number=1)
    case.finish(starts[0])
    for job in (2, 3):
        case.enqueue(job, failure="worker lost" if job == 2 and suspects else None)
        case.claim(job, "a", lease=10)
        case.moment += 100
    for job in (2, 3):
        case.end(job, "queued", "b", outcome="lost", failure="worker lost")
        starts.append(case.claim(job, "b"))
    for start in starts[1:]:
        case.finish(start)

    assert case.broken() == ({"I5"} if suspects else set())


# I6.


def test_a_partial_result_of_another_process(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.published.append(Publication('"half"', case.now()))
    case.step(1, "b", result='"half"')
    case.finish(start)

    assert case.broken() == {"I6"}


def test_an_end_under_a_handler_that_still_runs(case: Case) -> None:
    case.enqueue()
    case.claim()
    case.end(1, "queued", "a", attempt=0, interruptions=1, outcome="interrupted")
    case.finish(case.claim())

    assert case.broken() == {"I5", "I6"}


def test_an_end_without_a_start(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.history.starts.clear()

    assert case.broken() == {"I6"}


def test_a_returned_value_that_is_handed_back(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    case.finish(start, "queued", attempt=0, interruptions=1, outcome="interrupted", result=None)
    case.finish(case.claim())

    assert case.broken() == {"I6"}


def test_a_success_of_a_handler_that_raised(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    case.finish(start)
    start.ending = "ValueError"

    assert case.broken() == {"I6"}
    assert "succeeded by claim 1, which raised ValueError" in case.accused()


# I7.


def test_a_result_that_was_not_returned(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    case.finish(start)
    start.returned = "8"

    assert case.broken() == {"I7"}


def test_a_partial_result_that_was_not_published_under_its_claim(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    case.step(1, "a", result='"of an earlier claim"')
    case.finish(start)

    assert case.broken() == {"I7"}


def test_an_acknowledged_partial_result_that_is_not_there(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.published.append(Publication('"half"', case.now(), "ok", case.now()))
    case.finish(start)

    assert case.broken() == {"I7"}


def test_a_partial_result_that_is_published_after_the_handler_has_ended(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    start.ended_at = case.now()
    start.published.append(Publication('"half"', case.now(), "ok"))
    case.step(1, "a", result='"half"')
    start.published[0].answered_at = case.now()
    start.ending, start.returned = "returned", "7"
    case.end(1, "succeeded", "a", result="7")

    assert case.broken() == {"I7"}
    assert '"half" was published under 1 after its end' in case.accused()


def test_a_refused_partial_result_that_is_there(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    publication = Publication('"half"', case.now(), "fail")
    start.published.append(publication)
    case.step(1, "a", result='"half"')
    publication.answered_at = case.now()
    case.finish(start)

    assert case.broken() == {"I7"}
    assert '"half" was refused under 1 and is there' in case.accused()


def test_a_retry_by_hand_that_forgets_the_result(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim(), "dead", result="1", outcome="lost")
    case.steps[-1] = dataclasses.replace(case.steps[-1], before=case.steps[-1].after)
    case.history.call("retry", "client", case.now(), job=1)
    case.step(1, "client", state="queued", attempt=0, result=None)
    case.finish(case.claim())

    assert "I7" in case.broken()


# I8.


def test_a_lease_that_stays_after_the_end(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    case.steps[-1] = dataclasses.replace(
        case.steps[-1], after=dataclasses.replace(case.images[1], lease_until=3)
    )

    assert case.broken() == {"I8"}


def test_a_lease_that_another_moves(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    case.step(1, "b", lease_until=9000)
    case.finish(start)

    assert case.broken() == {"I6", "I8"}


# I9.


@pytest.mark.parametrize("answer", [True, False])
def test_a_cancel_that_is_not_true(case: Case, answer: bool) -> None:
    case.enqueue()
    if answer:
        case.finish(case.claim())
    call = case.history.call("cancel", "client", case.now(), job=1)
    call.ok(case.now(), answer=answer)
    if not answer:
        case.finish(case.claim())

    assert case.broken() == {"I9"}


def test_a_cancel_that_is_forgotten(case: Case) -> None:
    case.enqueue()
    start = case.claim()
    call = case.history.call("cancel", "client", case.now(), job=1)
    case.step(1, "client", cancel_requested=1)
    call.ok(case.now(), answer=True)
    case.finish(start)

    assert case.broken() == {"I9"}


def test_a_cancel_that_claims_what_another_did(case: Case) -> None:
    case.enqueue()
    first = case.history.call("cancel", "client", case.now(), job=1)
    case.end(1, "cancelled", "client")
    first.ok(case.now(), answer=True)
    case.history.call("cancel", "client", case.now(), job=1).ok(case.now(), answer=True)

    assert case.broken() == {"I9"}


@pytest.mark.parametrize(
    ("verb", "ids", "states"),
    [("get", (2,), ("queued",)), ("wait_finished", (1,), ("queued",))],
)
def test_an_answer_about_another_job_or_too_early(
    case: Case, verb: Any, ids: tuple[int, ...], states: tuple[str, ...]
) -> None:
    case.enqueue(1)
    case.enqueue(2)
    call = case.history.call(verb, "client", case.now(), job=1)
    call.ok(case.now(), ids=ids, states=states)
    case.finish(case.claim(1))
    case.finish(case.claim(2))

    assert case.broken() == {"I9"}


def test_a_retry_that_did_nothing(case: Case) -> None:
    case.enqueue(kind="last")
    case.fail(case.claim(), "dead")
    case.history.call("retry", "client", case.now(), job=1).ok(case.now(), ids=(1,))

    assert case.broken() == {"I9"}


def test_a_state_that_was_not_so(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    call = case.history.call("get", "client", case.now(), job=1)
    call.ok(case.now(), ids=(1,), states=("dead",))

    assert case.broken() == {"I9"}


@pytest.mark.parametrize("answer", ["found", "found twice", "the dead one", "not found"])
def test_what_finds_all_leaves_nothing_out(case: Case, answer: str) -> None:
    case.enqueue(1)
    case.enqueue(2)
    call = case.history.call("find", "client", case.now())
    ids = {"found": (1, 2), "found twice": (1, 2, 2), "the dead one": (2, 1), "not found": (2,)}
    call.ok(case.now(), ids=ids[answer], states=("queued",) * len(ids[answer]))
    case.finish(case.claim(1))
    case.finish(case.claim(2))

    assert case.broken() == (set() if answer == "found" else {"I9"})


def test_a_job_that_may_not_be_committed_yet_need_not_be_found(case: Case) -> None:
    asked = case.history.call("enqueue_on", "client", case.now(), payloads=('"canary 1"',))
    case.step(1, "client")
    case.history.call("find", "client", case.now()).ok(case.now())
    case.history.call("counts", "client", case.now()).ok(case.now(), counts={"queued": 0})
    asked.ok(case.now(), ids=(1,))
    case.finish(case.claim())

    assert case.broken() == set()


def test_an_answer_of_jobs_without_their_states(case: Case) -> None:
    case.enqueue()
    case.history.call("get", "client", case.now(), job=1).ok(case.now(), ids=(1,))
    case.finish(case.claim())

    assert case.broken() == {"I9"}


@pytest.mark.parametrize(
    ("past", "broken"),
    [
        (((1, "failed"), (2, "failed")), set()),
        (((2, "failed"), (1, "failed")), {"I9"}),
        (((1, "failed"),), {"I9"}),
        (((1, "failed"), (2, "lost")), {"I9"}),
        (((1, "failed"), (2, "failed"), (3, "failed")), {"I9"}),
    ],
)
def test_a_history_that_is_not_true(
    case: Case, past: tuple[tuple[int, str], ...], broken: set[str]
) -> None:
    case.enqueue()
    case.fail(case.claim())
    case.fail(case.claim(), "dead")
    case.history.call("history", "client", case.now(), job=1).ok(case.now(), past=past)

    assert case.broken() == broken


@pytest.mark.parametrize("verb", ["get", "find", "wait_finished", "history", "cancel", "retry"])
def test_an_answer_about_a_job_that_there_is_not(case: Case, verb: Any) -> None:
    call = case.history.call(verb, "client", case.now(), job=None if verb == "find" else 7)
    call.ok(case.now(), ids=(7,), states=("dead",), answer=True, past=())

    assert case.broken() == {"I9"}


@pytest.mark.parametrize(
    ("news_takes", "verb", "broken"),
    [(1000, "wait_finished", set()), (5, "wait_finished", {"I9"}), (1000, "get", {"I9"})],
)
def test_news_of_an_end_that_comes_when_the_job_is_gone(
    case: Case, news_takes: int, verb: Any, broken: set[str]
) -> None:
    case.history.lives[0].news_takes = news_takes
    case.enqueue()
    case.finish(case.claim())
    case.steps.append(Step(case.now(), case.moment, "a", case.moment, 1, case.images.pop(1), None))
    case.history.call(verb, "client", case.now(), job=1).ok(
        case.now(), ids=(1,), states=("succeeded",)
    )

    assert case.broken() == broken


@pytest.mark.parametrize("verb", ["cancel", "retry", "get", "history"])
def test_a_job_that_was_there_and_is_not_found(case: Case, verb: Any) -> None:
    case.enqueue()
    case.history.call(verb, "client", case.now(), job=1).failed(case.now(), "JobNotFound")
    case.finish(case.claim())

    assert case.broken() == {"I9"}
    assert f"{verb} did not find it, and it was there" in case.accused()


def test_a_retry_that_is_refused_without_a_reason(case: Case) -> None:
    case.enqueue(kind="last")
    case.fail(case.claim(), "dead")
    case.history.call("retry", "client", case.now(), job=1).failed(case.now(), "StateError")

    assert case.broken() == {"I9"}
    assert "retry was refused without a reason" in case.accused()


@pytest.mark.parametrize(("queued", "broken"), [(0, {"I9"}), (1, set()), (2, set()), (3, {"I9"})])
def test_counts_that_are_not_true(case: Case, queued: int, broken: set[str]) -> None:
    case.enqueue(1)
    case.enqueue(2)
    call = case.history.call("counts", "client", case.now())
    start = case.claim(1)
    call.ok(case.now(), counts={"queued": queued, "running": 2 - queued if queued < 3 else 0})
    case.finish(start)
    case.finish(case.claim(2))
    if queued == 0:
        call.ok(call.answered_at or 0, counts={"queued": 0, "running": 1})

    assert case.broken() == broken


def test_a_refusal_that_nobody_knows_of(case: Case) -> None:
    case.history.call("retry", "client", 1, job=1).failed(2, "Conflict")

    assert case.broken() == {"I9"}


# I10.


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_a_row_that_runs_after_an_orderly_stop(case: Case, is_disturbed: bool) -> None:
    case.enqueue(kind="last")
    case.claim(lease=20)
    case.history.stops.append(Stop("a", case.now(), case.now()))
    if is_disturbed:
        case.history.faults.append(Fault("disk full", case.moment))
    case.moment += 100
    case.end(1, "dead", "b", outcome="lost")

    assert case.broken() == (set() if is_disturbed else {"I10"})


@pytest.mark.parametrize("is_hurried", [False, True])
def test_a_start_after_a_stop_began(case: Case, is_hurried: bool) -> None:
    case.enqueue()
    stop = Stop("a", case.now(), is_hurried=is_hurried)
    case.history.stops.append(stop)
    case.moment += 10**8
    case.finish(case.claim())
    stop.ended_at = case.now()

    assert case.broken() == ({"I10"} if is_hurried else set())


# I11.


def test_two_live_jobs_with_a_key(case: Case) -> None:
    case.enqueue(1, key="k")
    case.enqueue(2, key="k")
    case.finish(case.claim(1))
    case.finish(case.claim(2))

    assert case.broken() == {"I11"}


# I13.


def test_a_claim_at_the_deadline(case: Case) -> None:
    case.enqueue(deadline=case.moment + 30)
    start = case.claim()
    start.wall = None  # of its start nothing is known
    case.finish(start)

    assert case.broken() == {"I13"}
    assert "was claimed at 60, its deadline is 60" in case.accused()


def test_a_start_at_the_deadline_after_a_claim_in_time(case: Case) -> None:
    case.enqueue(deadline=1000)
    start = case.claim()
    start.wall = 1000
    case.finish(start)

    assert case.broken() == {"I13"}
    assert "was started at 1000, its deadline is 1000" in case.accused()


def test_a_claim_before_the_job_is_due(case: Case) -> None:
    case.enqueue(run_at=10**9)
    case.finish(case.claim())

    assert case.broken() == {"I13"}


def test_a_lost_job_may_be_taken_at_once_whatever_the_clock_says(case: Case) -> None:
    case.enqueue(run_at=10**9)
    start = case.claim(lease=0)
    start.ended_at = case.now()
    case.steps[-1] = dataclasses.replace(
        case.steps[-1], after=dataclasses.replace(case.images[1], started_at=10**9)
    )
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim(1, "b"))

    assert case.broken() == set()


# Limits of a kind.


def test_a_handler_that_is_stopped_at_its_timeout(case: Case) -> None:
    case.enqueue(kind="limited")
    start = case.claim()
    case.moment += SECOND
    case.fail(start, outcome="timed out", run_at=10**7)
    case.finish(case.claim(1, "b"))

    assert case.broken() == set()


def test_a_handler_that_runs_on_after_its_timeout(case: Case) -> None:
    case.enqueue(kind="limited")
    start = case.claim(lease=10 * SECOND)
    case.moment += 3 * SECOND
    case.finish(start)

    assert case.broken() == {"I13"}
    start.is_stubborn = True
    assert case.broken() == set()


def test_a_handler_that_runs_on_after_the_deadline(case: Case) -> None:
    case.enqueue(deadline=500)
    start = case.claim(lease=10 * SECOND)
    case.moment += 3 * SECOND
    case.finish(start)

    assert case.broken() == {"I13"}
    case.history.faults.append(Fault("freeze", start.at, "a", start.at + SECOND))
    assert case.broken() == set()


@pytest.mark.parametrize(
    ("lasts", "frozen", "is_broken"), [(1.6, 0.0, True), (1.4, 0.0, False), (2.5, 1.2, False)]
)
def test_a_handler_that_runs_on_when_another_has_its_row(
    case: Case, lasts: float, frozen: float, is_broken: bool
) -> None:
    case.enqueue()
    late = case.claim(lease=1_000_000)  # microseconds; the rest is in nanoseconds
    wrong = Fault("clock step", late.at, "b")
    case.history.faults += [wrong, Fault("freeze", late.at, "a", late.at + round(frozen * SECOND))]
    case.moment += 10**6
    case.end(1, "queued", "b", outcome="lost")
    case.finish(case.claim(1, "b"))
    case.moment += round(lasts * SECOND)
    case.history.lives[1].killed_at = case.now()

    assert case.broken() == ({"I13"} if is_broken else set())
    late.ended_at = case.history.lives[1].killed_at
    assert case.broken() == ({"I13"} if is_broken else set())
    late.is_stubborn = True
    assert case.broken() == set()


def test_an_attempt_that_is_timed_out_too_early(case: Case) -> None:
    case.enqueue(kind="limited")
    case.fail(case.claim(), outcome="timed out", run_at=10**7)
    case.moment = 10**7
    case.finish(case.claim(1, "b"))

    assert case.broken() == {"I13"}


def test_a_failure_without_its_backoff(case: Case) -> None:
    case.enqueue(kind="limited")
    case.fail(case.claim())
    case.finish(case.claim(1, "b"))

    assert case.broken() == {"I13"}


@pytest.mark.parametrize(("is_refusal", "state"), [(True, "queued"), (False, "failed")])
def test_a_refusal_that_is_repeated_and_a_failure_that_is_not(
    case: Case, is_refusal: bool, state: str
) -> None:
    case.enqueue()
    start = case.claim()
    start.is_refusal = is_refusal
    case.fail(start, state)
    if state == "queued":
        case.finish(case.claim(1, "b"))

    assert case.broken() == {"I3"}
    start.is_refusal = not is_refusal
    assert case.broken() == set()


# I14 to I18.


@pytest.mark.parametrize(
    ("invariant", "rest"),
    [
        ("I14", {"can_write": False}),
        ("I16", {"running": 1}),
        ("I16", {"trouble": "disk full"}),
        ("I17", {"integrity": "row 3 missing from index"}),
        ("I17", {"log_bytes": 10**9}),
    ],
)
def test_a_bad_end(case: Case, invariant: str, rest: dict[str, Any]) -> None:
    case.rest.update(rest)

    assert case.broken() == {invariant}


def test_a_run_without_an_end(case: Case) -> None:
    case.settings |= {"endless": "1,000 times the same"}

    assert case.broken() == {"I19"}


@pytest.mark.parametrize("faults", [0, 1])
def test_a_warning_where_nothing_was_wrong(case: Case, faults: int) -> None:
    case.history.logs.append(LogLine(logging.WARNING, "database is locked"))
    case.history.faults += [Fault("busy", 1)] * faults

    assert case.broken() == (set() if faults else {"I15"})


@pytest.mark.parametrize("calm_since", [None, 1])
def test_a_warning_where_somebody_died(case: Case, calm_since: int | None) -> None:
    case.settings |= {"calm_since": calm_since}
    case.history.logs.append(LogLine(logging.WARNING, "database is locked"))
    case.history.lives[0].killed_at = case.now()

    assert case.broken() == (set() if calm_since is None else {"I15"})


def test_a_refusal_where_nothing_was_wrong(case: Case) -> None:
    case.history.call("enqueue", "client", 1, payloads=("1",)).failed(2, "StoreBusy")

    assert case.broken() == {"I15"}


@pytest.mark.parametrize("at", [1, 500])
def test_a_refusal_at_a_time_when_nothing_was_wrong(case: Case, at: int) -> None:
    case.history.faults.append(Fault("I/O error", 1, "client", until=100))
    case.history.call("retry", "client", at, job=1).failed(at + 1, "StoreError")

    assert case.broken() == ({"I15"} if at == 500 else set())


def test_a_job_that_waits_for_ever(case: Case) -> None:
    case.enqueue()

    assert case.broken() == {"I16"}


def test_a_job_that_ends_too_late(case: Case) -> None:
    case.enqueue()
    case.finish(case.claim())
    late = dataclasses.replace(case.evidence(), settle_by=1)

    assert {violation.invariant for violation in check_all(late)} == {"I16"}


def test_what_was_asked_for_when_all_was_well_need_not_be_there_in_time(case: Case) -> None:
    case.settings |= {"calm_since": 1, "prompt": 10**6}
    case.enqueue()
    case.finish(case.claim())
    late = dataclasses.replace(case.evidence(), settle_by=1)

    assert check_all(late) == []


def test_a_payload_in_a_failure_or_in_the_log(case: Case) -> None:
    case.history.logs.append(LogLine(logging.INFO, "could not do canary 1"))
    assert case.broken() == {"I18"}

    case.history.logs.clear()
    case.enqueue(kind="last")
    case.fail(case.claim(), "dead", failure="canary 1 is not a number")
    assert case.broken() == {"I18"}


def test_a_payload_in_the_failure_of_a_past_start(case: Case) -> None:
    case.enqueue()
    case.fail(case.claim())
    case.finish(case.claim())
    case.steps[2] = dataclasses.replace(case.steps[2], past_failure="canary 1 is not a number")

    assert case.broken() == {"I18"}


def test_the_text_of_an_exception_may_be_logged_and_not_be_stored(case: Case) -> None:
    case.settings["raised"] = "unspeakable"
    case.history.logs.append(LogLine(logging.ERROR, "job 1 raised: unspeakable"))
    assert case.broken() == set()

    case.enqueue(kind="last")
    case.fail(case.claim(), "dead", failure="unspeakable")
    assert case.broken() == {"I18"}


@pytest.mark.parametrize("late", [False, True])
def test_what_is_late_when_all_is_well(case: Case, late: bool) -> None:
    case.settings |= {"calm_since": 1, "prompt": 100}
    case.enqueue()
    case.moment += 200 * late
    case.finish(case.claim())

    assert case.broken() == ({"I16"} if late else set())


@pytest.mark.parametrize("late", [False, True])
def test_a_cancel_that_another_process_hears_of_too_late(case: Case, late: bool) -> None:
    case.settings |= {"calm_since": 1, "prompt": 100}
    case.enqueue()
    start = case.claim()
    call = case.history.call("cancel", "client", case.now(), job=1)
    case.step(1, "client", cancel_requested=1)
    call.ok(case.now(), answer=True)
    case.moment += 200 * late
    case.finish(start, "cancelled", result=None, outcome="cancelled")

    assert case.broken() == ({"I16"} if late else set())


@pytest.mark.parametrize("late", [False, True])
def test_what_a_dead_process_had_is_taken_up_soon(case: Case, late: bool) -> None:
    case.settings |= {"calm_since": 1, "prompt": 100}
    case.enqueue(kind="last")
    case.claim()
    for life in case.history.lives:
        if life.process == "a":
            life.identity, life.killed_at = ("here", 1, 1), case.now()
    case.moment += 200 * late
    case.end(1, "dead", "b", outcome="lost", failure="worker lost")

    assert case.broken() == ({"I16"} if late else set())


@pytest.mark.parametrize("faults", [0, 1])
def test_an_end_that_is_not_written_while_there_is_time(case: Case, faults: int) -> None:
    case.enqueue(kind="last")
    start = case.claim(lease=10**7)
    start.ended_at, start.ending = case.now(), "returned"
    case.history.faults += [Fault("full", case.moment, until=10**10)] * faults
    case.moment = 10**10 + 100
    case.end(1, "dead", "b", outcome="lost")

    assert case.broken() == (set() if faults else {"I16"})


# The audit.


def test_the_audit_sees_what_the_store_writes_and_loses_what_is_rolled_back(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "jobs.db")
    store = SqliteStore(path)
    store.open()
    store.close()
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in audit_schema(who="'me'"):
        connection.execute(statement)
    connection.execute("INSERT INTO trio_jobs_job (id, kind, payload) VALUES (3, 'work', '7')")
    connection.execute("BEGIN")
    connection.execute("DELETE FROM trio_jobs_job")
    connection.execute("ROLLBACK")
    connection.execute(
        "INSERT INTO trio_jobs_job (id) VALUES (3) ON CONFLICT DO UPDATE"
        " SET state = 2, claims = 1, lease_until = 9"
    )
    connection.execute("UPDATE trio_jobs_job SET state = 1, lease_until = NULL")
    connection.execute("INSERT INTO trio_jobs_past VALUES (3, 1, 1, 0, 0, 'lost', 'no more', NULL)")
    connection.close()

    inserted, claimed, ended = read_audit(path).steps

    assert inserted.before is None
    assert (inserted.payload, inserted.who, inserted.job) == ("7", "me", 3)
    assert claimed.is_claim
    assert claimed.before == inserted.after
    assert ended.ends_claim
    assert ended.outcome == "lost"
    assert ended.past_failure == "no more None"
    assert 0 <= ended.at - inserted.at < 60 * 10**9
