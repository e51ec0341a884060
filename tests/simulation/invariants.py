"""What must be true of every run, as small judges over the evidence. They know nothing of how it
was made. The library's own word they take only for what nothing else says: what a past start came
to (`trio_jobs_past`), which they hold against what its handler did, and what runners say of
themselves when all is at rest (`statistics()`).

Each is a function of the timeline that gives a sentence for everything that is wrong; its
docstring is the promise. They are in `row_`, `claim_`, `limit_`, `time_` and `run_invariants`. I12
is about schedules, which there are none of yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from . import (
    claim_invariants as claims,
    limit_invariants as limits,
    row_invariants as rows,
    run_invariants as runs,
    time_invariants as times,
)
from .evidence import Evidence
from .timeline import Found, Timeline


@dataclass(frozen=True)
class Violation:
    invariant: str
    job: int | None
    """The job whose evidence shows it, if it is about one."""
    text: str

    def __str__(self) -> str:
        about = "" if self.job is None else f"job {self.job}: "
        return f"{self.invariant}: {about}{self.text}"


PROMISES: Final[Mapping[str, str]] = {
    "I1": "what was acknowledged is there, once, and nothing else is",
    "I2": "an end is for good, and nothing changes that nobody asked for",
    "I3": "claims, attempts and interruptions are counted, and a job ends as its kind says",
    "I4": "each start of a handler has a claim of its own, and none is too many",
    "I5": "nobody takes what another still holds, and lost rows are taken up gently",
    "I6": "what an attempt writes is written under its claim, and is what it came to",
    "I7": "a result is of the claim that the row has",
    "I8": "a row has a lease while it runs, which only its holder moves",
    "I9": "what a call answered was so while it was under way",
    "I10": "an orderly stop leaves nothing running, and a hurried one starts nothing",
    "I11": "of a kind only one live job has a key",
    "I13": "nothing starts before it is due or at its deadline, or runs past a limit, or without "
    "its row",
    "I14": "at rest nobody is in a transaction",
    "I15": "nothing fails where nothing went wrong",
    "I16": "when all is healed everything ends, and in time",
    "I17": "the file is sound, and its log short",
    "I18": "nothing of a payload is logged, or stored in a failure",
    "I19": "nobody does the same over and over without an end",
}
"""In a sentence, for a report; the docstrings of the judges say all of it. (These numbers are not
those of any other list.)"""

CHECKERS: Final[Sequence[tuple[str, Callable[[Timeline], Found]]]] = [
    ("I1", rows.nothing_is_lost),
    ("I2", rows.an_end_is_an_end),
    ("I2", rows.cancels_are_asked_for),
    ("I2", rows.what_was_asked_for_stays),
    ("I3", rows.numbers_are_right),
    ("I3", rows.ends_are_by_the_rules),
    ("I3", limits.refusals_are_the_handlers_own),
    ("I4", claims.starts_are_counted),
    ("I5", claims.nobody_takes_what_is_held),
    ("I5", claims.lost_rows_are_taken_up_gently),
    ("I5", times.attempts_do_not_overlap),
    ("I6", claims.writes_are_fenced),
    ("I7", claims.results_are_of_their_claim),
    ("I8", claims.leases_are_of_the_running),
    ("I9", runs.answers_are_true),
    ("I9", runs.refusals_are_as_documented),
    ("I10", times.a_stop_leaves_nothing),
    ("I11", rows.a_key_has_one_live_job),
    ("I13", times.nothing_starts_too_early_or_late),
    ("I13", limits.handlers_are_stopped_at_their_limits),
    ("I13", limits.handlers_are_stopped_without_their_row),
    ("I13", limits.timeouts_are_what_they_say),
    ("I13", limits.failures_wait_for_their_backoff),
    ("I14", runs.nobody_is_left_in_a_transaction),
    ("I15", runs.nothing_fails_by_itself),
    ("I16", runs.everything_ends),
    ("I16", runs.nothing_is_late),
    ("I16", times.refused_ends_are_written_again),
    ("I17", runs.the_file_is_sound),
    ("I18", runs.nothing_is_told),
    ("I19", runs.nobody_spins),
]


def check_all(evidence: Evidence) -> list[Violation]:
    """All that is wrong, in the order of the invariants."""
    timeline = Timeline(evidence)
    return [Violation(name, job, text) for name, check in CHECKERS for job, text in check(timeline)]
