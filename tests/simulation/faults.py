"""What can go wrong with one statement, and how SQLite would behave then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trio_jobs import StoreBusy, StoreError
from trio_jobs._drivers import Connection, Record, Values

from .plan import StatementFault

if TYPE_CHECKING:
    from .world import Process


class ProcessIsDead(StoreError):
    """A statement of a process that was killed: it reaches nothing any more."""

    def __init__(self) -> None:
        super().__init__("the process is dead")
        self.is_permanent = True  # so that what is left of it gives up at once


_WRITES: Final = ("INSERT", "UPDATE", "DELETE", "COMMIT", "WITH", "CREATE")


def io_error() -> StoreError:
    return StoreError("disk I/O error")


def is_write(sql: str) -> bool:
    return sql.lstrip().startswith(_WRITES)


def fits(fault: StatementFault, sql: str, in_transaction: bool) -> bool:
    """Whether it can happen to that statement; else it waits for one."""
    if fault.name.startswith("commit"):
        return sql == "COMMIT"
    if fault.name == "busy":
        return not in_transaction
    if fault.name == "busy snapshot":
        return in_transaction and sql != "ROLLBACK"
    if fault.name == "neighbour":
        return in_transaction and sql not in ("COMMIT", "ROLLBACK")
    if fault.name == "full":
        return in_transaction and is_write(sql)
    return sql != "ROLLBACK"


def strike(
    fault: StatementFault,
    process: Process,
    connection: Connection,
    sql: str,
    values: Values,
) -> list[Record]:
    """Run the statement, or not, with what goes wrong."""
    world = process.world
    if fault.name == "neighbour":  # nothing goes wrong with that
        world.write_as_neighbour()
        return connection.execute(sql, values)
    lasts = fault.seconds if fault.name in ("I/O errors", "full", "commit unknown") else 0.0
    world.note_fault(fault.name, None if fault.name in ("full", "delay") else process, lasts)
    match fault.name:
        case "crash before":
            process.kill()
            raise ProcessIsDead
        case "crash after":
            connection.execute(sql, values)
            process.kill()
            raise ProcessIsDead
        case "busy":
            raise StoreBusy("database is locked")
        case "busy snapshot":
            raise StoreBusy("database is locked (517)")
        case "I/O error":
            fail(connection)
            raise io_error()
        case "I/O errors":
            process.broken_until = world.now() + fault.seconds
            fail(connection)
            raise io_error()
        case "full":
            world.full_until = world.now() + fault.seconds
            fail(connection)
            raise disk_full()
        case "commit reports an error":
            connection.execute(sql, values)
            raise io_error()
        case "commit overtaken":
            connection.execute(sql, values)
            world.commit_as_other()
            raise io_error()
        case "commit fails":
            fail(connection)
            raise io_error()
        case "commit unknown":
            process.broken_until = world.now() + fault.seconds
            if fault.coin:
                connection.execute(sql, values)
            else:
                fail(connection)
            raise io_error()
        case "delay":
            if fault.coin:
                world.sleep(fault.seconds)
                return connection.execute(sql, values)
            records = connection.execute(sql, values)
            world.sleep(fault.seconds)
            return records


def disk_full() -> StoreError:
    return StoreError("database or disk is full")


def fail(connection: Connection) -> None:
    """After an I/O error or with a full disk SQLite has rolled back by itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
