"""Planted faults: is the simulator to be trusted?

Each mutant is one small mistake in a copy of the library. The simulator runs over the copy and
has to find it within some hundred seeds. A mutant that survives is a hole in the simulator, or
a change that breaks no promise; the latter say so, and why.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import click

from .invariants import PROMISES
from .progress import INTERRUPTED

ROOT: Final = Path(__file__).resolve().parents[2]
WANTED: Final = 0.95
"""Share of the mutants that have to be found."""
LONGEST: Final = 180
"""Seconds for one mutant; of one that takes longer nothing is known, it may only be slow. Where
others are at work too, 300 seeds that find nothing take more than two minutes. (A run without an
end is broken off, unless it is one loop of Python that asks for nothing.)"""
_WIDTH: Final = 90
"""Characters of how it was found."""


class Mutant(NamedTuple):
    name: str
    file: str
    """In the package."""
    old: str
    """Occurs once in the file."""
    new: str
    equivalent: str = ""
    """Why it breaks no promise, if that is so."""


MUTANTS: Final[Sequence[Mutant]] = [
    # Fences.
    Mutant(
        "an end is written whatever claim holds the row",
        "_writes.py",
        "WHERE (2, held.value, 0) IS NOT (\n    SELECT job.state, job.claims, job.cancel_requested",
        "WHERE (2, held.value, 0) IS NOT (\n    SELECT job.state, held.value, job.cancel_requested",
    ),
    Mutant(
        "an end is written to a row that has ended",
        "_writes.py",
        "WHERE (2, held.value, 0) IS NOT (\n    SELECT job.state,",
        "WHERE (2, held.value, 0) IS NOT (\n    SELECT 2,",
    ),
    Mutant(
        "an end overwrites a cancel request",
        "_writes.py",
        "WHERE (2, held.value, 0) IS NOT (\n    SELECT job.state, job.claims, job.cancel_requested",
        "WHERE (2, held.value, 0) IS NOT (\n    SELECT job.state, job.claims, 0",
    ),
    Mutant(
        "other changes are not compared with the row",
        "_writes.py",
        "WHERE (before.state, before.claims, before.cancel_requested, before.lease_over) IS NOT (",
        "WHERE false AND (before.state, before.claims, before.cancel_requested, before.lease_over)"
        " IS NOT (",
    ),
    Mutant(
        "a cancel ends a job whose lease was renewed after it looked",
        "_lifecycle.py",
        "return replace(change, lease_over=row.lease_until)",
        "return change",
    ),
    Mutant(
        "a lease is renewed by its id alone",
        "_writes.py",
        "WHERE job.id = fence.id AND job.claims = fence.claims AND job.state = 2",
        "WHERE job.id = fence.id AND job.state = 2",
    ),
    Mutant(
        "claims are not counted",
        "_claims.py",
        "attempt = attempt + 1, claims = claims + 1,",
        "attempt = attempt + 1,",
    ),
    # Attempts.
    Mutant(
        "an attempt does not count from its claim",
        "_claims.py",
        "attempt = attempt + 1, claims = claims + 1,",
        "claims = claims + 1,",
    ),
    Mutant(
        "one attempt too many",
        "_lifecycle.py",
        "case Raised(failure, outcome):\n            if row.attempt >= policy.attempts:",
        "case Raised(failure, outcome):\n            if row.attempt > policy.attempts:",
    ),
    Mutant(
        "a lost attempt is given back",
        "_lifecycle.py",
        'return _requeue(row, Event.LOST, now, "lost", WORKER_LOST, run_at=row.run_at)',
        'return _requeue(row, Event.LOST, now, "lost", WORKER_LOST, run_at=row.run_at,'
        " attempt=row.attempt - 1)",
    ),
    Mutant(
        "a lost job never dies",
        "_lifecycle.py",
        "if row.attempt >= policy.attempts:\n        return _finish(row, Event.LOST",
        "if row.attempt > policy.attempts:\n        return _finish(row, Event.LOST",
    ),
    Mutant(
        "RetryLater uses up an attempt",
        "_lifecycle.py",
        "run_at=later(now, wait),\n                attempt=row.attempt - 1,",
        "run_at=later(now, wait),\n                attempt=row.attempt,",
    ),
    Mutant(
        "a claim that is handed back counts",
        "_lifecycle.py",
        "attempt=was.attempt,\n",
        "attempt=row.attempt,\n",
    ),
    Mutant(
        "an interruption is not counted",
        "_lifecycle.py",
        "interruptions=row.interruptions + 1,",
        "interruptions=row.interruptions,",
    ),
    Mutant(
        "an interrupted job goes to the end of the line",
        "_lifecycle.py",
        "run_at=row.run_at,\n        attempt=row.attempt if uses_up",
        "run_at=now,\n        attempt=row.attempt if uses_up",
    ),
    Mutant(
        "a new life begins with the old attempts",
        "_lifecycle.py",
        "State.QUEUED,\n        attempt=0,",
        "State.QUEUED,\n        attempt=row.attempt,",
    ),
    # Leases.
    Mutant(
        "rows are taken before their lease ends",
        "_claims.py",
        'which="lease_until <= :lease_now"',
        'which="lease_until <= :lease_now + 30000000"',
    ),
    Mutant(
        "who is of another process is taken for dead",
        "_owners.py",
        "return process != here and self._is_dead(process, here)",
        "return process != here",
    ),
    Mutant(
        "a handler goes on when its lease cannot be renewed",
        "_attempt.py",
        "if at <= now and not (why is Stop.FENCE and now >= self.lease_until):",
        "if at <= now and why is not Stop.FENCE:",
    ),
    Mutant(
        "leases are not renewed",
        "_keeper.py",
        "held = await self._bridge.renew(",
        "held = {one.fence: False for one in keep} or await self._bridge.renew(",
    ),
    Mutant(
        "an attempt that lost its row goes on",
        "_attempt.py",
        "            self.is_over = True\n            _log.warning(",
        "            _log.warning(",
    ),
    # Starts.
    Mutant(
        "rows that are not due are kept beside those that are",
        "_claims.py",
        "WHERE state = 1 AND kind = served.value AND run_at <= :due_by AND id < :below",
        "WHERE state = 1 AND kind = served.value AND id < :below",
        equivalent="the claim looks at run_at once more; only slower",
    ),
    Mutant(
        "a job starts before it is due",
        "_claims.py",
        '"due_by": claim.now if claim.due_by is None else claim.due_by,',
        '"due_by": 5_000_000 + (claim.now if claim.due_by is None else claim.due_by),',
    ),
    Mutant(
        "a deadline is no reason not to start",
        "_attempt.py",
        "late = row.deadline is not None and row.deadline <= host.decision_now()",
        "late = False",
    ),
    Mutant(
        "a deadline does not end a queued job",
        "_claims.py",
        "    if look.deadline is not None and look.deadline <= claim.now:\n",
        "    if False:\n",
    ),
    Mutant(
        "a handler is not stopped at its timeout",
        "_attempt.py",
        "        if self._timeout_at is not None:\n            left = ",
        "        if False:\n            left = ",
    ),
    Mutant(
        "a handler is not stopped at the deadline of its job",
        "_attempt.py",
        "        if self.row.deadline is not None and self._host.watches_deadlines:",
        "        if False:",
    ),
    Mutant(
        "a failure has no backoff",
        "_lifecycle.py",
        "run_at=later(now, policy.wait(row.id, row.attempt)),",
        "run_at=now,",
    ),
    # Ends.
    Mutant(
        "a refusal is repeated",
        "_attempt.py",
        "            if all(fail.retry for fail in fails):",
        "            if True:",
    ),
    Mutant(
        "an end is tried once",
        "_attempt.py",
        "        if not self._is_last_try:\n            return True\n",
        "",
    ),
    Mutant(
        "the published value stays the result",
        "_writes.py",
        "    result = excluded.result,\n    failure = NULL,",
        "    result = ifnull(trio_jobs_job.result, excluded.result),\n    failure = NULL,",
    ),
    Mutant(
        "a result is not written",
        "_writes.py",
        "    result = excluded.result,\n    failure = NULL,",
        "    failure = NULL,",
    ),
    Mutant(
        "a requested cancel does not come first",
        "_lifecycle.py",
        "    if row.cancel_requested:\n        return _finish(row, Event.CANCELLED,"
        ' State.CANCELLED, now, outcome="cancelled")\n    match end:',
        "    match end:",
    ),
    Mutant(
        "an interrupted job that must not be repeated is repeated",
        "_lifecycle.py",
        '    if policy.on_interrupt == "fail":\n        return _finish(\n            row,'
        " Event.INTERRUPTED",
        '    if policy.on_interrupt == "never":\n        return _finish(\n            row,'
        " Event.INTERRUPTED",
    ),
    Mutant(
        "a lost job that must not be repeated is repeated",
        "_lifecycle.py",
        '    if policy.on_interrupt == "fail":\n        return _finish(row, Event.LOST',
        '    if policy.on_interrupt == "never":\n        return _finish(row, Event.LOST',
    ),
    Mutant(
        "an exotic exception ends the runner",
        "_attempt.py",
        "        except BaseException as error:  # noqa: ASYNC103 - each is this attempt's end",
        "        except Exception as error:",
    ),
    # Stopping.
    Mutant(
        "what was claimed ahead is kept at a stop",
        "_pool.py",
        "        for execution in self.workers.take_back():\n"
        "            self.ends.add(execution, execution.not_started())",
        "        self.workers.take_back()",
    ),
    Mutant(
        "a claim that is answered after the stop is dropped",
        "_pool.py",
        "        if changes and not self._bridge.is_closed:",
        "        if False:",
    ),
    Mutant(
        "the last ends are not waited for",
        "_engine.py",
        "FINAL_WRITES: Final = 2.0",
        "FINAL_WRITES: Final = 0.0",
    ),
    # Commits.
    Mutant(
        "a commit that failed is taken for one that did not",
        "sqlite.py",
        "            raise failed  # nobody has come after us, or somebody in our place",
        "            return",
    ),
    Mutant(
        "a commit that took place is taken for one that failed",
        "sqlite.py",
        "        if found == mark:\n            return\n",
        "",
    ),
    Mutant(
        "what is unknown is called a failure",
        "sqlite.py",
        "        unknown.is_outcome_unknown = True\n",
        "",
    ),
    Mutant(
        "a failed transaction stays open",
        "_connections.py",
        "        roll_back(connection)\n        self._has_lock = False",
        "        self._has_lock = False",
    ),
    Mutant(
        "transactions begin without the lock",
        "_connections.py",
        'self.patiently(connection, "BEGIN IMMEDIATE")\n        finally',
        'self.patiently(connection, "BEGIN")\n        finally',
    ),
    # Keys.
    Mutant(
        "a key that is held is not looked for",
        "_writes.py",
        "    holders = live_of(connection, keyed)\n",
        "    holders: dict[Name, Row] = {}\n",
    ),
    Mutant(
        "a retry does not look who has the key",
        "_writes.py",
        "        if _takes_key(change) and connection.execute(_HOLDER",
        "        if False and connection.execute(_HOLDER",
    ),
    # Waking.
    Mutant(
        "the next due time is forgotten",
        "_agenda.py",
        "        self._due = earliest(due, self._heard_due)",
        "        self._due = self._heard_due",
    ),
    Mutant(
        "a look finds that nothing has changed",
        "_batch.py",
        "        if write.version == write.unless:\n",
        "        if True:\n",
    ),
    Mutant(
        "a claim that was refused is not repeated",
        "_agenda.py",
        "        self.is_hungry = True\n        self._refused_at = now",
        "        self._refused_at = now",
        equivalent="the poller claims when the pause after a refusal is over, hungry or not",
    ),
    Mutant(
        "a cancel request of another process is not passed on",
        "_engine.py",
        "        for fence in claimed.cancelled:\n            self._cancel(fence)",
        "        for fence in ():\n            self._cancel(fence)",
    ),
    # Lost rows.
    Mutant(
        "lost rows are taken up all at once",
        "_probation.py",
        "limit = max(0, 1 + self._proven - len(self._unproven))",
        "limit = 1000",
    ),
    Mutant(
        "a row that was lost twice is taken up beside others",
        "_probation.py",
        "return Allowance(limit, not self._unproven and not self._last_lives)",
        "return Allowance(limit, True)",
    ),
    Mutant(
        "nobody sees that an owner is dead",
        "_owners.py",
        "        self.dead = [id for id in gone if id not in left]",
        "        self.dead = []",
    ),
    # What is in hand.
    Mutant(
        "a renewal counts from when it was answered",
        "_keeper.py",
        "                one.kept_from = now\n",
        "                one.kept_from = self._clock.now()\n",
    ),
    Mutant(
        "a renewal that found another claim is not minded",
        "_keeper.py",
        "            elif one.is_handling:\n                one.lose()",
        "            elif one.is_handling:\n                one.kept_from = now",
    ),
    Mutant(
        "a cancel request that a renewal saw is not minded",
        "_keeper.py",
        "                if held[one.fence]:\n",
        "                if False:\n",
        equivalent="the next look says so too, within a poll; only later where polls are rare",
    ),
    Mutant(
        "an end that is to be decided again is dropped",
        "_ends.py",
        "        else:\n            self.add(execution, end)\n",
        "        else:\n            pass\n",
    ),
    Mutant(
        "an end that was refused is not written again",
        "_ends.py",
        "                    self._engine.start(self._add_later, execution, end)",
        "                    pass",
    ),
    Mutant(
        "kinds are short that were seen often",
        "_pace.py",
        "return self.seen >= _ENOUGH and self.takes <= SHORT",
        "return self.seen >= _ENOUGH",
        equivalent="fewer are claimed ahead the longer the longest takes, and none waits longer",
    ),
    Mutant(
        "a claim may give a row that is in hand",
        "_pool.py",
        "                held=held,",
        "                held=frozenset(),",
    ),
    Mutant(
        "an attempt publishes after its end",
        "_attempt.py",
        "        while self.is_handling and not self.is_over:",
        "        while not self.is_over:",
    ),
    Mutant(
        "what others wrote after a failed commit is not told from its own",
        "sqlite.py",
        "        if found is not None and found[1] <= mark[1]:",
        "        if found is not None:",
    ),
    # Secrets.
    Mutant(
        "a payload that does not decode is told of with its value",
        "_attempt.py",
        "            return _lifecycle.RefusedForGood(_NOT_DECODED)  # noqa: ASYNC104",
        '            told = f"{_NOT_DECODED.message}: {self._payload!r}"\n'
        "            return _lifecycle.RefusedForGood(Failure(told))",
    ),
    Mutant(
        "a past start keeps the text of its exception",
        "_lifecycle.py",
        "        outcome=outcome,\n        failure=failure,\n    )",
        "        outcome=outcome,\n        failure=None if failure is None else"
        ' replace(failure, message=f"{failure.message} canary"),\n    )',
    ),
    Mutant(
        "the text of any exception is stored",
        "_attempt.py",
        "return _lifecycle.Raised(Failure(_INTERNAL_ERROR, safe_text(_type_name(error), 1_000)))",
        "return _lifecycle.Raised(Failure(str(error), safe_text(_type_name(error), 1_000)))",
    ),
]


class Verdict(NamedTuple):
    mutant: Mutant
    seed: int | None
    """That found it, if one did."""
    seconds: float
    how: str
    """The first promise that was broken."""
    is_over: bool = True
    """All seeds were run, or one has found it."""

    def __str__(self) -> str:
        if not self.is_over:
            said = "no verdict, it took too long"
        elif self.seed is not None:
            said = f"found by seed {self.seed}"
        elif self.mutant.equivalent:
            said = f"survives, but {self.mutant.equivalent}"
        else:
            said = "SURVIVES"
        how = textwrap.shorten(self.how, _WIDTH, placeholder=" ...")
        return f"{self.mutant.name}: {said} ({self.seconds:.0f} s) {how}".rstrip()


def copy_with(mutant: Mutant, to: Path) -> None:
    """Raises ValueError for a mutant that does not fit the library any more."""
    for part in ("trio_jobs", "tests"):
        shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    path = to / "trio_jobs" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its place in {mutant.file} is there not once")
    path.write_text(text.replace(mutant.old, mutant.new))


class Simulators:
    """The processes that look for mutants. Ctrl-C at a terminal is not for them: `end` is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False

    @contextlib.contextmanager
    def start(self, folder: str, seeds: int) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "tests.simulation", "--no-shrink"]
        with subprocess.Popen(
            [*command, "--seeds", str(seeds), "--workers", "1"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            with self._lock:
                self._running.add(process)
                if self._is_over:
                    process.kill()
            try:
                yield process
            finally:
                process.kill()
                with self._lock:
                    self._running.remove(process)

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._running:
                process.kill()


def verdict_of(mutant: Mutant, seeds: int, simulators: Simulators) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy_with(mutant, Path(folder))
        with simulators.start(folder, seeds) as process:
            try:
                output = "".join(process.communicate(timeout=LONGEST))
            except subprocess.TimeoutExpired:
                return Verdict(mutant, None, time.monotonic() - began, "", is_over=False)
    seconds = time.monotonic() - began
    found = re.search(r"^again: .* --seed (\d+)", output, re.MULTILINE)
    if found is None and process.returncode != 0:
        raise RuntimeError(f"{mutant.name}: the simulator did not run:\n{output[-2000:]}")
    how = re.search(r"^ *((I\d+|crash)\b.*)", output, re.MULTILINE)
    return Verdict(
        mutant,
        None if found is None else int(found[1]),
        seconds,
        "" if how is None else how[1],
    )


def verdicts(mutants: Sequence[Mutant], seeds: int, workers: int) -> Generator[Verdict, None, None]:
    """In that order, of so many mutants at a time."""
    simulators = Simulators()
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(partial(verdict_of, seeds=seeds, simulators=simulators), mutants)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        simulators.end()
        pool.shutdown()


@click.command("mutants")
@click.option("--seeds", type=click.IntRange(min=1), default=300, show_default=True, help="Each.")
@click.option("--only", metavar="TEXT", default="", help="Those with this in their names.")
@click.option("--workers", type=click.IntRange(min=1), default=os.cpu_count(), help="At a time.")
def main(seeds: int, only: str, workers: int) -> None:
    """Planted mistakes, and whether they are found.

    Each is in a copy of the library, and seeds look for it. The exit code is 1 if fewer are found
    than should be.
    """
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    if not chosen:
        raise click.BadParameter(f"no mutant has {only!r} in its name.", param_hint="--only")
    found = wanted = 0
    broken: set[str] = set()
    try:
        with contextlib.closing(verdicts(chosen, seeds, workers)) as all_verdicts:
            for verdict in all_verdicts:
                if not verdict.mutant.equivalent:
                    wanted += 1
                    found += verdict.seed is not None
                broken.add(verdict.how.partition(":")[0])
                click.echo(verdict)
    except KeyboardInterrupt:
        click.echo(f"interrupted: {found} of {wanted} found")
        sys.exit(INTERRUPTED)
    for name, promise in PROMISES.items():
        if name in broken:
            click.echo(f"{name} is: {promise}")
    click.echo(f"{found} of {wanted} found")
    sys.exit(found < WANTED * wanted)
