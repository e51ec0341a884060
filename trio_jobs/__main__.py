"""The command `trio-jobs`: work, look, retry and cancel, and a demo. See `--help`."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import click
import trio

from . import _display
from ._attempt import leaves_of
from ._demo import find_duplicates
from ._errors import TrioJobsError
from ._job import Job
from ._jobs import Jobs, open_jobs
from ._model import State
from ._runner import MOST_WORKERS
from ._work import BadArgument, load_handlers, work

T = TypeVar("T")


def _file_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and (not value or "\0" in value):
        raise click.BadParameter("it must be the name of a file")
    return value


database_option = click.option(
    "--db",
    "database",
    metavar="FILE",
    required=True,
    envvar="TRIO_JOBS_DB",
    show_envvar=True,
    callback=_file_name,
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
id_argument = click.argument("id", type=int)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OSError as error:
            # Click has its own way with a pipe that nobody reads.
            if error.errno == errno.EPIPE or not _display.is_output_lost():
                raise
            raise click.ClickException(f"the output cannot be written: {error.strerror}") from error


@click.group(cls=_Commands)
@click.pass_context
def main(context: click.Context) -> None:
    """Background jobs that survive a crash, on one SQLite file."""
    is_working = context.invoked_subcommand == work_command.name
    _display.prepare_output(logging.INFO if is_working else logging.WARNING)


@main.command("work")
@click.argument("reference", metavar="MODULE:HANDLERS")
@database_option
@click.option("--workers", default=10, show_default=True, help="Jobs at a time.")
@click.option("--grace", default=10.0, show_default=True, help="Seconds jobs have to end in.")
@click.option("--lease", default=60.0, show_default=True, help="Seconds a claim is valid for.")
def work_command(reference: str, database: str, workers: int, grace: float, lease: float) -> None:
    """Run handlers in a worker process.

    HANDLERS is a Handler, an iterable of Handlers, or a function that returns either. Modules
    in the current directory can be imported.

    SIGTERM and Ctrl-C stop it in order: no more jobs are started, those under way have GRACE
    seconds to end, then they are cancelled and handed back. A second signal cancels them at
    once. A handler that cannot be cancelled (a thread) does not keep the process: 2 s later
    it ends with exit code 75, and that job is started again when its lease is over.
    """
    handlers = load_handlers(reference)
    _run(partial(work, database, handlers, workers=workers, grace=grace, lease=lease))


@main.command("list")
@database_option
@click.option("--state", type=click.Choice([state.value for state in State]))
@click.option("--kind")
@click.option("--after", type=int, metavar="ID", help="Only jobs with a higher id.")
@click.option("--limit", type=click.IntRange(min=0), default=100, show_default=True)
@json_option
def list_command(
    database: str,
    state: str | None,
    kind: str | None,
    after: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs by id."""
    wanted = None if state is None else State(state)

    def find(jobs: Jobs) -> Awaitable[list[Job[object]]]:
        return jobs.find(state=wanted, kind=kind, after=after, limit=limit)

    found = _ask(database, find)
    if as_json:
        _display.print_json([job.to_dict() for job in found])
        return
    _display.print_jobs(found)
    if found and len(found) == limit:
        click.echo(f"There may be more: --after {found[-1].id}")


@main.command()
@id_argument
@database_option
@json_option
def show(id: int, database: str, as_json: bool) -> None:
    """Show a job with its result (payloads are never shown)."""
    job: Job[object] = _ask(database, lambda jobs: jobs.get(id))
    if as_json:
        _display.print_json(job.to_dict())
    else:
        _display.print_job(job)


@main.command()
@id_argument
@database_option
@json_option
def history(id: int, database: str, as_json: bool) -> None:
    """Show the starts of a job that did not succeed, oldest first."""
    past = _ask(database, lambda jobs: jobs.history(id))
    if as_json:
        _display.print_json([_display.past_to_dict(one) for one in past])
    else:
        _display.print_history(past)


@main.command()
@id_argument
@database_option
@json_option
def retry(id: int, database: str, as_json: bool) -> None:
    """Give a failed, dead or cancelled job a new life."""
    job: Job[object] = _ask(database, lambda jobs: jobs.retry(id))
    if as_json:
        _display.print_json(job.to_dict())
    else:
        click.echo(f"Job {id} is queued again.")


@main.command()
@id_argument
@database_option
@json_option
def cancel(id: int, database: str, as_json: bool) -> None:
    """Cancel a job: one that waits at once, the handler of a running one within a second."""

    async def cancel_and_look(jobs: Jobs) -> tuple[bool, Job[object]]:
        return await jobs.cancel(id), await jobs.get(id)

    accepted, job = _ask(database, cancel_and_look)
    if as_json:
        _display.print_json({"cancelled": accepted, **job.to_dict()})
    elif not accepted:
        click.echo(f"Job {id} had already ended: it is {job.state.value}.")
    elif job.state is State.RUNNING:
        click.echo(f"Job {id} is running; its handler is being cancelled.")
    else:
        click.echo(f"Job {id} was cancelled.")


@main.command()
@database_option
@click.option("--kind", help="Only jobs of this kind.")
@json_option
def stats(database: str, kind: str | None, as_json: bool) -> None:
    """Count the jobs in each state."""
    counts = _ask(database, lambda jobs: jobs.counts(kind=kind))
    if as_json:
        _display.print_json({state.value: count for state, count in counts.items()})
    else:
        _display.print_counts(counts)


@main.command()
@click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--db",
    "database",
    metavar="FILE",
    callback=_file_name,
    help="Keep the search in this file.",
)
@click.option("--workers", type=click.IntRange(1, MOST_WORKERS), default=16, show_default=True)
def demo(folder: str, database: str | None, workers: int) -> None:
    """Find duplicate files below FOLDER (default: here) with a job for each file.

    Without --db the jobs are in a temporary file, which is removed at the end. With it a
    search that was stopped or killed goes on where it was, and a finished one is printed again.
    """
    with nullcontext() if database else tempfile.TemporaryDirectory() as temporary:
        file = os.path.realpath(database or os.path.join(temporary or "", "demo.db"))
        root = os.fsencode(os.path.abspath(folder))
        report = _run(partial(find_duplicates, root, file, workers, _display.output()))
    _display.print_report(report)
    if database is None:
        click.echo("The jobs were in a temporary file, which is gone now; --db FILE keeps them.")


def _ask(database: str, question: Callable[[Jobs], Awaitable[T]]) -> T:
    """Open a file that is there, ask, and close it."""

    async def ask() -> T:
        async with open_jobs(database) as jobs:
            return await question(jobs)

    # `open_jobs` would make it.
    if not os.path.isfile(database):
        raise click.ClickException(_display.printable(f"there is no file {database}"))
    return _run(ask)


def _run(fn: Callable[[], Awaitable[T]]) -> T:
    """As `trio.run`; what a user can do something about ends the command with one line."""
    try:
        return trio.run(fn)
    except (TrioJobsError, click.ClickException, KeyboardInterrupt, BaseExceptionGroup) as error:
        leaves = leaves_of(error)
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            raise click.exceptions.Exit(130) from None
        for leaf in leaves:
            if isinstance(leaf, TrioJobsError | click.ClickException):
                sort = BadArgument if isinstance(leaf, BadArgument) else click.ClickException
                raise sort(_display.printable(str(leaf))) from None
        raise


if __name__ == "__main__":
    main(prog_name="trio-jobs")
