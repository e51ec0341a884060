"""What is particular to the store on SQLite: locks, files, drivers, forks, faults, plans."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from stories import PassThrough, new_job as new, reader, writer

from trio_jobs import StoreBusy, StoreError, _connections, _drivers, _lifecycle, _schema
from trio_jobs._connections import has_reset_bug
from trio_jobs._drivers import Connection, Driver, Record, Values
from trio_jobs._lifecycle import Raised, Returned
from trio_jobs._model import Claim, Claimed, Failure, NewJob, Policy, Row, State
from trio_jobs.sqlite import SqliteStore

ROOT = Path(__file__).parent.parent
POLICY = Policy(attempts=3, on_interrupt="retry", wait=lambda id, attempt: 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture(params=["sqlite3", "apsw"])
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param
    return driver


@pytest.fixture
def store(path: Path, driver: Driver) -> Iterator[SqliteStore]:
    with opened(SqliteStore(path, driver=driver)) as store:
        yield store


@contextlib.contextmanager
def opened(store: SqliteStore) -> Iterator[SqliteStore]:
    store.open()
    try:
        yield store
    finally:
        store.close()


def add(store: SqliteStore, *jobs: NewJob) -> list[Row]:
    with store.transaction():
        return [row for row, _ in store.add(jobs)]


def claim(store: SqliteStore, now: int = 100, limit: int = 100, **fields: Any) -> Claimed:
    fields = {"policies": {"mail": POLICY}, "lost_limit": 10, **fields}
    with store.transaction():
        return store.claim(
            Claim(now=now, lease_now=now, lease_until=now + 60, limit=limit, **fields)
        )


def tidy(store: SqliteStore, now: int = 100) -> None:
    """As the bridge does it, but here and now."""
    if store.tidy(now):
        store.checkpoint()


def count(store: SqliteStore) -> int:
    return sum(store.counts(None).values())


class Spy(PassThrough):
    """A connection that tells `before` of each statement, which may raise, and then `after`."""

    def __init__(self, real: Connection, spies: Spies, number: int) -> None:
        super().__init__(real)
        self.spies = spies
        self.number = number

    @property
    def version(self) -> tuple[int, ...]:
        return self.spies.version or super().version

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        self.spies.log.append((self.number, sql, values))
        self.spies.before(sql)
        records = super().execute(sql, values)
        self.spies.after(sql)
        return records


class Spies:
    """Stands between a store and its connections."""

    def __init__(self, store: SqliteStore, version: tuple[int, ...] | None = None) -> None:
        self.version = version
        self.log: list[tuple[int, str, Values]] = []
        self.before: Callable[[str], None] = lambda sql: None
        self.after: Callable[[str], None] = lambda sql: None
        self._connect = store.connect
        self._numbers = itertools.count()
        store.connect = self._open

    def _open(self, path: str) -> Connection:
        return Spy(self._connect(path), self, next(self._numbers))


class Lock:
    """Somebody else's write lock on the file."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self._connection.close()


# The package without its __init__: that imports trio, which takes longer than all the rest.
LIGHT = """
import sys, types
sys.modules["trio_jobs"] = package = types.ModuleType("trio_jobs")
package.__path__ = ["trio_jobs"]
"""


def python(script: str, *args: object) -> subprocess.Popen[str]:
    """Another process, in which warnings are errors."""
    script = LIGHT + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def output(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    return out


# The constructor.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"path": ""}, ValueError),
        ({"path": "a\0b"}, ValueError),
        ({"path": b"app.db"}, TypeError),
        ({"path": 3}, TypeError),
        ({"synchronous": "off"}, ValueError),
        ({"synchronous": None}, ValueError),
        ({"driver": "psycopg"}, ValueError),
        ({"busy_timeout": -0.1}, ValueError),
        ({"busy_timeout": float("nan")}, ValueError),
        ({"busy_timeout": float("inf")}, ValueError),
        ({"busy_timeout": "5"}, TypeError),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        SqliteStore(**{"path": "app.db", **arguments})


def test_constructing_touches_no_file(path: Path) -> None:
    store = SqliteStore(path)

    assert not path.exists()
    assert not store.inline
    assert SqliteStore(":memory:").inline


@pytest.mark.parametrize(("synchronous", "number"), [("full", 2), ("normal", 1)])
def test_synchronous_is_what_was_asked_for(
    path: Path, driver: Driver, synchronous: Any, number: int
) -> None:
    store = SqliteStore(path, synchronous=synchronous, driver=driver)
    with opened(store):
        assert writer(store).execute("PRAGMA synchronous") == [(number,)]
        assert writer(store).execute("PRAGMA wal_autocheckpoint") == [(0,)]


# Opening.


def test_m2_ten_processes_open_a_new_file_at_once(path: Path) -> None:
    script = """
        import sys
        from trio_jobs._model import NewJob
        from trio_jobs.sqlite import SqliteStore
        job = NewJob(kind="mail", payload=b"1", raw=False, priority=0, enqueued_at=1, run_at=1,
            deadline=None, key=None)
        store = SqliteStore(sys.argv[1], busy_timeout=30)
        print("ready", flush=True)
        input()
        store.open()
        for _ in range(5):
            with store.transaction():
                store.add([job])
        store.close()
        """
    processes = [python(script, path) for _ in range(10)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        output(process)

    with opened(SqliteStore(path)) as store:
        rows = store.find(states=[], kind=None, after=0, limit=999)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")

        assert [row.id for row in rows] == list(range(1, 51))
        assert sorted(name for (name,) in tables) == [
            "trio_jobs_job",
            "trio_jobs_meta",
            "trio_jobs_owner",
            "trio_jobs_past",
        ]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_rows_are_there_after_opening_again(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    for n in range(3):
        with opened(store):
            assert count(store) == n
            add(store, new())


def test_the_rest_of_the_file_is_left_alone(path: Path, driver: Driver) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "PRAGMA user_version = 7; PRAGMA application_id = 8; CREATE TABLE job (id);"
            " INSERT INTO job VALUES (1)"
        )

    with opened(SqliteStore(path, driver=driver)) as store:
        add(store, new())

    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (7,)
        assert connection.execute("PRAGMA application_id").fetchone() == (8,)
        assert connection.execute("SELECT * FROM job").fetchall() == [(1,)]


def test_opening_waits_while_another_connection_writes_to_a_file_without_a_log(
    path: Path, driver: Driver
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (x)")
    lock = Lock(path)
    store = SqliteStore(path, driver="sqlite3")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            lock.release()

    store.sleep = sleep
    with opened(store):
        assert len(pauses) == 20
        assert count(store) == 0


def test_opening_reads_only_while_another_connection_writes(path: Path) -> None:
    with opened(SqliteStore(path)):
        lock = Lock(path)
        with opened(SqliteStore(path, busy_timeout=0)) as second:
            assert count(second) == 0
        lock.release()


def test_a_path_may_be_relative_and_a_link(
    path: Path, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.db").symlink_to(path)
    with (
        opened(SqliteStore("app.db", driver=driver)) as store,
        opened(SqliteStore("link.db", driver=driver)) as linked,
    ):
        monkeypatch.chdir("/")

        add(store, new())
        add(linked, new(payload=b"x" * 5_000_000))
        tidy(linked)

        assert store.identity == linked.identity
        assert count(linked) == 2


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "directory": (lambda path: path.mkdir(), "it is a directory"),
    "no folder": (lambda path: path.parent.rmdir(), "No such file or directory: /"),
    "not a database": (lambda path: _write(path, b"hello " * 1000), "file is not a database"),
    "corrupt": (lambda path: _corrupt(path), "database disk image is malformed"),
    "newer": (lambda path: _newer(path), "newer version of trio_jobs"),
    "utf-16": (lambda path: _utf16(path), "it must be UTF-8"),
}


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _corrupt(path: Path) -> None:
    with opened(SqliteStore(path)):
        pass
    content = bytearray(path.read_bytes())
    content[100:2000] = b"\xaa" * 1900
    path.write_bytes(content)


def _newer(path: Path) -> None:
    with opened(SqliteStore(path)) as store:
        writer(store).execute("UPDATE trio_jobs_meta SET version = version + 1")


def _utf16(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA encoding = 'UTF-16'")
        connection.execute("CREATE TABLE t (x)")


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_cannot_be_used_is_refused_for_good(
    tmp_path: Path, driver: Driver, how: str
) -> None:
    breaks, text = BROKEN[how]
    path = tmp_path / "folder" / "app.db"
    path.parent.mkdir()
    breaks(path)
    store = SqliteStore(path, driver=driver)

    for _ in range(2):
        with pytest.raises(StoreError, match=f"app.db: opening: .*{text}") as caught:
            store.open()
        assert caught.value.is_permanent
    with pytest.raises(StoreError, match="not open"):
        store.counts(None)


def test_a_newer_file_is_not_touched(path: Path) -> None:
    _newer(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    before = path.read_bytes()

    with pytest.raises(StoreError):
        SqliteStore(path).open()

    assert path.read_bytes() == before


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into; those of pytest are for one user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("file", "attempt to write a readonly database"),
        ("folder", "attempt to write a readonly database|unable to open database file"),
        ("new", "unable to open database file"),
        ("parent", "Permission denied: .*folder"),
    ],
)
def test_without_permission_to_write_opening_is_refused(
    open_folder: Path, driver: Driver, what: str, text: str
) -> None:
    folder = open_folder / "parent" / "folder"
    folder.mkdir(parents=True)
    if what != "new":
        with opened(SqliteStore(folder / "app.db")):
            pass
        (folder / "app.db").chmod(0o444 if what == "file" else 0o666)
    folder.chmod(0o777 if what == "file" else 0o555)
    folder.parent.chmod(0o000 if what == "parent" else 0o755)
    script = """
        import os, sys
        from trio_jobs._errors import StoreError
        from trio_jobs.sqlite import SqliteStore
        if sys.argv[2] == "apsw":
            import apsw
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            SqliteStore(sys.argv[1], driver=sys.argv[2]).open()
        except StoreError as error:
            print(error.is_permanent, error)
        """
    out = output(python(script, folder / "app.db", driver))
    folder.parent.chmod(0o755)

    assert re.match(rf"True .*app.db: opening: ({text})", out)


def test_a_file_that_was_deleted_is_not_written_to(store: SqliteStore, path: Path) -> None:
    add(store, new())
    path.unlink()

    with pytest.raises(StoreError, match="deleted or replaced") as caught:
        add(store, new())

    assert caught.value.is_permanent
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="deleted or replaced"):
        add(store, new())
    assert path.read_bytes() == b""


def test_an_old_sqlite_is_refused(path: Path) -> None:
    store = SqliteStore(path)
    Spies(store, version=(3, 34, 1))

    with pytest.raises(StoreError, match=r"SQLite 3\.34\.1 is older than 3\.35") as caught:
        store.open()
    assert caught.value.is_permanent


# Migrations.


def test_an_older_file_is_migrated_once_and_keeps_its_rows(
    path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(SqliteStore(path, driver=driver)) as store:
        rows = add(store, new(), new())
    steps = [
        *_schema.MIGRATIONS,
        ["ALTER TABLE trio_jobs_job ADD COLUMN colour TEXT", "CREATE TABLE trio_jobs_more (x)"],
        ["UPDATE trio_jobs_job SET colour = 'red'"],
    ]
    monkeypatch.setattr(_connections, "MIGRATIONS", steps)

    for _ in range(2):
        with opened(SqliteStore(path, driver=driver)) as store:
            assert store.find(states=[], kind=None, after=0, limit=9) == rows
            assert writer(store).execute("SELECT version FROM trio_jobs_meta") == [(len(steps),)]
            assert writer(store).execute("SELECT colour FROM trio_jobs_job") == [("red",)] * 2


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(SqliteStore(path, driver=driver)) as store:
        rows = add(store, new())
    with monkeypatch.context() as patch:
        broken = [*_schema.MIGRATIONS, ["CREATE TABLE trio_jobs_more (x)", "no such statement"]]
        patch.setattr(_connections, "MIGRATIONS", broken)
        with pytest.raises(StoreError, match="syntax error"):
            SqliteStore(path, driver=driver).open()

    with opened(SqliteStore(path, driver=driver)) as store:
        assert store.find(states=[], kind=None, after=0, limit=9) == rows
        more = "SELECT count(*) FROM sqlite_master WHERE name = 'trio_jobs_more'"
        assert writer(store).execute(more) == [(0,)]


# Waiting for the lock.


def test_m1_a_lock_held_too_long_is_busy_and_nothing_is_inserted(
    path: Path, driver: Driver
) -> None:
    pauses: list[float] = []
    store = SqliteStore(path, driver=driver, busy_timeout=2.5)
    store.sleep = pauses.append
    with opened(store):
        lock = locked_by_another_process(path)
        with pytest.raises(StoreBusy) as busy:
            add(store, new())
        release(lock)

        assert re.search(
            r"app\.db: beginning a transaction: .*locked \(waited 2\.5 s\): another connection has"
            r" a transaction open, perhaps one of this process that waits for this call$",
            str(busy.value),
        )
        assert 2.5 <= sum(pauses) < 2.51
        assert max(pauses) <= 0.004
        assert max(pauses[:20]) <= 0.0005
        assert count(store) == 0
        assert len(add(store, new())) == 1


def test_m1_a_lock_held_for_less_is_waited_for(path: Path, driver: Driver) -> None:
    pauses: list[float] = []
    store = SqliteStore(path, driver=driver, busy_timeout=2.5)
    with opened(store):
        lock = locked_by_another_process(path)

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 100:
                release(lock)

        store.sleep = sleep

        assert len(add(store, new())) == 1
        assert len(pauses) == 100


def locked_by_another_process(path: Path) -> subprocess.Popen[str]:
    script = """
        import sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        print("locked", flush=True)
        input()
        connection.close()
        """
    process = python(script, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def release(lock: subprocess.Popen[str]) -> None:
    lock.communicate("\n")


def test_a_lock_of_another_process_is_seen(store: SqliteStore, path: Path) -> None:
    lock = locked_by_another_process(path)
    locked = store.is_unlocked()
    release(lock)

    assert not locked
    assert store.is_unlocked()


def test_closing_ends_a_wait_in_another_thread(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver, busy_timeout=1e6)
    store.open()
    lock = locked_by_another_process(path)
    waits = threading.Event()
    errors: list[BaseException] = []

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    def write() -> None:
        try:
            add(store, new())
        except StoreError as error:
            errors.append(error)

    store.sleep = sleep
    thread = threading.Thread(target=write)
    thread.start()
    waits.wait()
    store.close()
    thread.join()
    release(lock)

    assert [type(error) for error in errors] == [StoreBusy]


def test_a_reader_waits_while_the_log_is_recovered(path: Path) -> None:
    store = SqliteStore(path)
    spies = Spies(store)
    refusals = iter([StoreBusy("database is locked")] * 3)

    def before(sql: str) -> None:
        for error in refusals:
            raise error

    with opened(store):
        spies.before = before
        assert store.counts(None) == {}
        assert len([sql for _, sql, _ in spies.log if "count(*) FROM trio_jobs_job" in sql]) == 4


def test_u1_of_16_threads_that_enqueue_one_key_one_inserts(path: Path, driver: Driver) -> None:
    stores = [SqliteStore(path, driver=driver, busy_timeout=30) for _ in range(16)]
    barrier = threading.Barrier(16)
    added: list[tuple[Row, bool]] = []

    def enqueue(store: SqliteStore) -> None:
        barrier.wait()
        with store.transaction():
            added.extend(store.add([new(key="k")]))

    with contextlib.ExitStack() as stack:
        for store in stores:
            stack.enter_context(opened(store))
        threads = [threading.Thread(target=enqueue, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(is_new for _, is_new in added) == [False] * 15 + [True]
        assert {row.id for row, _ in added} == {1}
        assert count(stores[0]) == 1


def test_u1_of_4_processes_that_enqueue_20_keys_each_key_is_inserted_once(path: Path) -> None:
    script = """
        import sys
        from trio_jobs._model import NewJob
        from trio_jobs.sqlite import SqliteStore
        store = SqliteStore(sys.argv[1], busy_timeout=30)
        store.open()
        print("ready", flush=True)
        input()
        for n in range(20):
            with store.transaction():
                [(row, is_new)] = store.add([NewJob(kind="mail", payload=b"1", raw=False,
                    priority=0, enqueued_at=1, run_at=1, deadline=None, key=str(n))])
            print(row.id, is_new)
        store.close()
        """
    processes = [python(script, path) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    lines = [output(process).splitlines() for process in processes]

    for n, answers in enumerate(zip(*lines, strict=True), 1):
        assert sorted(answers) == [f"{n} False"] * 3 + [f"{n} True"]


# Faults.


def test_m5_a_full_disk_is_an_error_that_says_so_and_then_all_is_well(
    store: SqliteStore, path: Path
) -> None:
    add(store, new())
    [(pages,)] = writer(store).execute("PRAGMA page_count")
    writer(store).execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(StoreError, match="adding jobs: database or disk is full") as caught:
        add(store, new(payload=b"SECRET" * 100_000))

    assert not isinstance(caught.value, StoreBusy)
    assert not caught.value.is_permanent
    assert "SECRET" not in repr(caught.value)
    assert count(store) == 1
    writer(store).execute("PRAGMA max_page_count = 1000000")
    assert len(add(store, new(payload=b"x" * 600_000))) == 1
    assert writer(store).execute("PRAGMA integrity_check") == [("ok",)]


def test_after_a_statement_failed_the_transaction_is_over(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        spies.before = fails_at("INTO trio_jobs_past")
        row = add(store, new())[0]
        [job] = claim(store).jobs
        with (
            pytest.raises(StoreError, match="applying changes: disk I/O error"),
            store.transaction(),
        ):
            store.apply([_lifecycle.ended(job.row, Raised(Failure("no")), POLICY, 100)])
        spies.before = lambda sql: None

        assert store.get(row.id) == job.row
        assert store.is_unlocked()


def test_a_rollback_that_fails_too_does_not_hide_why(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        spies.before = fails_at("INSERT INTO trio_jobs_job", "ROLLBACK")
        with pytest.raises(StoreError, match="adding jobs: disk I/O error at INSERT"):
            add(store, new())
        spies.before = lambda sql: None

        assert len(add(store, new())) == 1
        assert count(store) == 1


def test_an_error_swallowed_inside_a_transaction_lets_nothing_through(
    path: Path, driver: Driver
) -> None:
    with opened(SqliteStore(path, driver=driver)) as store:

        def swallow() -> None:
            with store.transaction():
                store.add([new()])
                writer(store).execute("ROLLBACK")  # as SQLite does by itself for some errors
                with contextlib.suppress(StoreError):
                    store.add([new()])

        with pytest.raises(StoreError, match="SQLite has rolled it back"):
            swallow()
        assert count(store) == 0


def test_where_sqlite_rolled_back_a_claim_nothing_more_of_it_is_written(
    path: Path, driver: Driver
) -> None:
    """What came after the statement that failed would commit itself."""
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        add(store, new())

        def fail(sql: str) -> None:
            if "wanted" in sql:
                spies.before = lambda sql: None
                writer(store).execute("ROLLBACK")  # as SQLite does by itself for some errors
                raise StoreError("disk I/O error")

        spies.before = fail
        with pytest.raises(StoreError, match="disk I/O error"):
            claim(store)

        [row] = store.find(states=[], kind=None, after=0, limit=9)
        assert (row.state, row.claims) == (State.QUEUED, 0)


def fails_at(*statements: str) -> Callable[[str], None]:
    def before(sql: str) -> None:
        for statement in statements:
            if statement in sql:
                raise StoreError(f"disk I/O error at {statement}")

    return before


def test_a_commit_that_failed_has_failed(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        add(store, new())
        spies.before = fails_at("COMMIT")
        with pytest.raises(StoreError, match="committing: disk I/O error at COMMIT") as caught:
            add(store, new())
        spies.before = lambda sql: None

        assert not caught.value.is_outcome_unknown
        assert count(store) == 1
        assert len(add(store, new())) == 1


def test_a_commit_that_took_place_is_no_error(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        spies.after = fails_at("COMMIT")

        assert len(add(store, new())) == 1
        assert len(add(store, new())) == 1

        spies.after = lambda sql: None
        assert count(store) == 2


def test_what_is_added_is_marked_with_the_statement_that_takes_its_ids(
    path: Path, driver: Driver
) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        add(store, new())
        spies.log.clear()
        spies.after = fails_at("COMMIT")
        with store.transaction():
            store.add([new()])
            store.add([new()])
        spies.after = lambda sql: None

        assert len([sql for _, sql, _ in spies.log if "UPDATE trio_jobs_meta" in sql]) == 2
        assert count(store) == 3


@pytest.mark.parametrize("error", [StoreError, StoreBusy])
@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_nobody_can_read_back_has_an_unknown_outcome(
    path: Path, driver: Driver, committed: bool, error: type[StoreError]
) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        add(store, new())
        failed = False

        def before(sql: str) -> None:
            nonlocal failed
            if sql == "COMMIT" and not committed:
                failed = True
                raise error("disk I/O error")
            if failed:
                raise StoreError("disk I/O error")

        def after(sql: str) -> None:
            nonlocal failed
            if sql == "COMMIT":
                failed = True
                raise error("disk I/O error")

        spies.before, spies.after = before, after
        with pytest.raises(StoreError, match="disk I/O error; the outcome is unknown") as caught:
            add(store, new())
        spies.before = spies.after = lambda sql: None

        assert caught.value.is_outcome_unknown
        assert type(caught.value) is StoreError  # StoreBusy says that nothing was written
        assert len(add(store, new())) == 1
        assert count(store) == (3 if committed else 2)


def test_a_commit_that_another_writer_has_covered_has_an_unknown_outcome(
    path: Path, driver: Driver
) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store), opened(SqliteStore(path, driver=driver)) as other:

        def after(sql: str) -> None:
            if sql == "COMMIT":
                add(other, new())
                raise StoreError("disk I/O error")

        spies.after = after
        with pytest.raises(StoreError) as caught:
            add(store, new())
        spies.after = lambda sql: None

        assert caught.value.is_outcome_unknown
        assert count(store) == 2


def test_statements_leave_no_memory_behind(store: SqliteStore) -> None:
    def work() -> None:
        for _ in range(1000):
            store.get(1)
            with store.transaction():
                pass

    work()
    tracemalloc.start()
    try:
        work()
        first = tracemalloc.get_traced_memory()[0]
        work()
        assert tracemalloc.get_traced_memory()[0] - first < 20_000
    finally:
        tracemalloc.stop()


def test_a_transaction_that_changes_nothing_writes_nothing(path: Path, driver: Driver) -> None:
    with opened(SqliteStore(path, driver=driver)) as store:
        row = add(store, new(key="k"))[0]
        log = Path(f"{path}-wal")
        before = log.read_bytes()

        claim(store, policies={"sms": POLICY})
        add(store, new(key="k"))
        with store.transaction():
            store.renew([(row.id, 7)], 900)
            store.apply([_lifecycle.published(_lifecycle.claimed(row, 1, 2), b"1")])

        assert log.read_bytes() == before


def test_the_connection_that_reads_cannot_write(store: SqliteStore) -> None:
    with pytest.raises(StoreError, match="readonly"):
        reader(store).execute("DELETE FROM trio_jobs_job")


def test_many_rows_take_no_more_statements_than_one(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    taken: list[int] = []
    with opened(store):
        add(store, new())
        claim(store)  # the first says who we are, and looks who else there is
        for jobs in ([new()], [new()] * 64, [new(payload=b"x" * 20_000)] * 3):
            spies.log.clear()
            add(store, *jobs)
            claimed = claim(store).jobs
            with store.transaction():
                store.renew([job.row.fence for job in claimed], 200)
                store.apply(
                    [_lifecycle.ended(job.row, Returned(b"1"), POLICY, 100) for job in claimed]
                )
            taken.append(len(spies.log))

    # Large payloads are read one by one; and three rows are inserted and renewed as two and one.
    assert taken == [taken[0], taken[0], taken[0] + 3 + 2]


def test_no_reading_verb_leaves_a_transaction_open(store: SqliteStore) -> None:
    row = add(store, new(key="k"))[0]
    verbs: list[Callable[[], object]] = [
        lambda: store.get(row.id),
        lambda: store.find(states=[State.QUEUED], kind=None, after=0, limit=1),
        lambda: store.history(row.id),
        lambda: store.counts(None),
        store.next_id,
        store.queued_kinds,
        store.is_unlocked,
    ]
    for verb in verbs:
        verb()
        assert not reader(store).in_transaction
        assert writer(store).execute("PRAGMA wal_checkpoint(TRUNCATE)") == [(0, 0, 0)]


COLUMNS = ["kind", "key", "result", "failure", "failure_type", "payload"]


@pytest.mark.parametrize("column", [*COLUMNS, "outcome", "past failure", "past failure_type"])
def test_bytes_that_are_no_text_make_no_fetch_fail(
    store: SqliteStore, path: Path, column: str
) -> None:
    rows = add(store, *[new(key=str(n)) for n in range(4)])
    for job in claim(store, limit=2).jobs:
        failed = _lifecycle.ended(job.row, Raised(Failure("no", "E")), POLICY, 100)
        with store.transaction():
            store.apply([_lifecycle.published(job.row, b"1"), failed])
    hostile = bytes(range(256)) + b"\xed\xa0\x80\xff"
    table, _, name = column.rpartition(" ")
    table = "past" if table or name == "outcome" else "job"
    where = " WHERE id = 1" if name == "key" else ""
    writer(store).execute(
        f"UPDATE trio_jobs_{table} SET {name} = CAST(? AS TEXT){where}", (hostile,)
    )

    text = hostile.decode(errors="replace")
    found = store.find(states=[], kind=None, after=0, limit=9)
    assert [row.id for row in found] == [row.id for row in rows]
    assert store.get(1) == found[0]
    history = store.history(1)
    assert history is not None
    assert len(history) == 1
    if table == "job":
        assert store.queued_kinds() == {text if name == "kind" else "mail"}
        assert {
            "kind": found[0].kind == text,
            "key": found[0].key == text,
            "result": found[0].result == hostile,
            "failure": found[0].failure == Failure(text, "E"),
            "failure_type": found[0].failure == Failure("no", text),
            "payload": True,
        }[name]
    claimed = claim(store, now=200)
    if name == "kind":
        assert claimed.jobs == []
    else:
        assert len(claimed.jobs) == 4
        assert (claimed.jobs[0].payload == hostile) == (name == "payload")
    changes = [_lifecycle.ended(job.row, Returned(b"2"), POLICY, 210) for job in claimed.jobs]
    with store.transaction():
        assert store.apply(changes) == [None] * len(changes)


# The application's own connection.


APPLICATION: dict[str, dict[str, Any]] = {
    "legacy": {},
    "immediate": {"isolation_level": "IMMEDIATE"},
    "autocommit": {"isolation_level": None},
}


@pytest.fixture
def sqlite3_store(path: Path) -> Iterator[SqliteStore]:
    with opened(SqliteStore(path)) as store:
        yield store


@pytest.mark.parametrize("ends_with", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("options", APPLICATION)
def test_a_job_on_the_applications_connection_shares_its_fate(
    sqlite3_store: SqliteStore, path: Path, options: str, ends_with: str
) -> None:
    store = sqlite3_store
    with contextlib.closing(sqlite3.connect(path, **APPLICATION[options])) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        if options == "autocommit":
            connection.execute("BEGIN")

        row, is_new = store.add_on(connection, new(key="k"))
        again = store.add_on(connection, new(key="k"))

        assert is_new
        assert again == (row, False)
        assert connection.in_transaction
        assert count(store) == 0
        assert not store.is_unlocked()
        connection.execute(ends_with)
        assert store.get(row.id) == (row if ends_with == "COMMIT" else None)
        assert store.is_unlocked()


def test_a_key_that_is_taken_stays_so_until_the_transaction_ends(
    sqlite3_store: SqliteStore, path: Path
) -> None:
    [row] = add(sqlite3_store, new(key="k"))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert sqlite3_store.add_on(connection, new(key="k")) == (row, False)

        assert connection.in_transaction
        assert not sqlite3_store.is_unlocked()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="autocommit= came with Python 3.12")
def test_a_connection_that_is_always_in_a_transaction_is_fine(
    sqlite3_store: SqliteStore, path: Path
) -> None:
    options: Any = {"autocommit": False}
    connection: Any = sqlite3.connect(path, **options)
    with contextlib.closing(connection):
        row, _ = sqlite3_store.add_on(connection, new())
        assert count(sqlite3_store) == 0
        connection.commit()

    assert sqlite3_store.get(row.id) == row


def test_without_a_transaction_a_job_is_there_at_once(
    sqlite3_store: SqliteStore, path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        row, _ = sqlite3_store.add_on(connection, new())

        assert not connection.in_transaction
        assert sqlite3_store.get(row.id) == row


def test_a_row_read_before_does_not_keep_the_job_from_its_transaction(
    sqlite3_store: SqliteStore, path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN DEFERRED")
        connection.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
        row, _ = sqlite3_store.add_on(connection, new())
        connection.execute("COMMIT")

        assert sqlite3_store.get(row.id) == row

        connection.execute("BEGIN DEFERRED")
        connection.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
        add(sqlite3_store, new())
        with pytest.raises(StoreBusy):
            sqlite3_store.add_on(connection, new())
        connection.execute("ROLLBACK")


class Ours(sqlite3.Connection):
    """An application's class, which counts on nobody else making cursors."""

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    def execute(self, *args: Any) -> Any:
        raise AssertionError


def test_the_settings_of_the_applications_connection_do_not_matter(
    sqlite3_store: SqliteStore, path: Path
) -> None:
    options: dict[str, Any] = {"factory": Ours, "detect_types": sqlite3.PARSE_DECLTYPES}
    with contextlib.closing(sqlite3.connect(path, **options)) as connection:

        def refuse(*args: object) -> object:
            raise AssertionError

        connection.row_factory = refuse
        connection.text_factory = refuse
        job = new("\u00e9", key="\u00e9", deadline=900)
        row, _ = sqlite3_store.add_on(connection, job)
        same, is_new = sqlite3_store.add_on(connection, job)
        connection.commit()

        assert (same, is_new) == (row, False)
        assert connection.row_factory is refuse
        assert sqlite3_store.get(row.id) == row


def test_the_settings_of_an_apsw_connection_do_not_matter(path: Path) -> None:
    def refuse(*args: object) -> Any:
        raise AssertionError

    with opened(SqliteStore(path, driver="apsw")) as store:
        connection = apsw.Connection(str(path))
        connection.exec_trace = refuse
        connection.row_trace = refuse
        connection.cursor_factory = refuse
        with contextlib.closing(connection):
            row, _ = store.add_on(connection, new(key="k"))
            assert store.add_on(connection, new(key="k")) == (row, False)
            assert store.get(row.id) == row


def test_apsw_in_its_own_transaction(path: Path) -> None:
    with opened(SqliteStore(path, driver="apsw")) as store:
        connection = apsw.Connection(str(path))
        with contextlib.closing(connection):
            with contextlib.suppress(ZeroDivisionError), connection:
                store.add_on(connection, new())
                raise ZeroDivisionError
            assert count(store) == 0

            with connection:
                store.add_on(connection, new())
                assert count(store) == 0
            assert count(store) == 1


def test_a_key_that_another_inserts_between_two_statements_gives_that_row(
    sqlite3_store: SqliteStore, path: Path
) -> None:
    others: list[Row] = []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:

        def trace(sql: str) -> None:
            if "INSERT INTO trio_jobs_job" in sql and not others:
                others.extend(add(sqlite3_store, new(key="k")))

        connection.set_trace_callback(trace)
        added = sqlite3_store.add_on(connection, new(key="k"))

    assert added == (others[0], False)
    assert count(sqlite3_store) == 1


def test_a_connection_to_something_else_is_refused(
    store: SqliteStore, driver: Driver, tmp_path: Path, path: Path
) -> None:
    connect: Callable[[str], Any] = sqlite3.connect if driver == "sqlite3" else apsw.Connection
    other: Callable[[str], Any] = apsw.Connection if driver == "sqlite3" else sqlite3.connect
    for name in (":memory:", "", str(tmp_path / "other.db")):
        with contextlib.closing(connect(name)) as connection:
            connection.execute("ATTACH ? AS jobs", (str(path),))
            with pytest.raises(ValueError, match=r"is not .*app\.db"):
                store.add_on(connection, new())
    with contextlib.closing(other(":memory:")) as connection:
        for thing in (connection, None, str(path), connection.cursor()):
            with pytest.raises(TypeError, match=rf"not an? {driver}\.Connection"):
                store.add_on(thing, new())


def test_memory_has_no_other_connection() -> None:
    with (
        opened(SqliteStore(":memory:")) as store,
        contextlib.closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(ValueError, match="in memory"),
    ):
        store.add_on(connection, new())


def test_the_same_file_by_another_name_is_accepted(
    sqlite3_store: SqliteStore, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(path)
    uri = f"file:{tmp_path}/../{tmp_path.name}/link.db?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        sqlite3_store.add_on(connection, new())
        connection.commit()

    assert count(sqlite3_store) == 1


def test_a_closed_connection_is_a_store_error(sqlite3_store: SqliteStore, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.close()

    with pytest.raises(StoreError, match="closed"):
        sqlite3_store.add_on(connection, new())


# Two copies of SQLite in one process.


def test_two_stores_with_two_drivers_on_one_file_are_refused(path: Path, driver: Driver) -> None:
    other: Driver = "apsw" if driver == "sqlite3" else "sqlite3"
    with opened(SqliteStore(path, driver=driver)) as store:
        with pytest.raises(StoreError, match="another copy of SQLite") as caught:
            SqliteStore(path, driver=other).open()
        assert caught.value.is_permanent
        assert len(add(store, new())) == 1
    with opened(SqliteStore(path, driver=other)) as store:
        assert count(store) == 1


def test_a_file_that_an_apsw_connection_has_open_is_refused(path: Path, tmp_path: Path) -> None:
    connection = apsw.Connection(str(path))
    memory = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (x)")
    with contextlib.closing(connection), contextlib.closing(memory):
        with pytest.raises(StoreError, match="apsw has the file open"):
            SqliteStore(path).open()
        with opened(SqliteStore(tmp_path / "other.db")) as store:
            add(store, new())
    with opened(SqliteStore(path)) as store:
        assert count(store) == 0


def test_sqlite3_cannot_connect_to_a_file_that_an_apsw_store_has_open(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(path)
    names: list[Any] = [str(path), path, os.fsencode(path), tmp_path / "link.db"]
    with opened(SqliteStore(path, driver="apsw")) as store:
        for name in names:
            with pytest.raises(StoreError, match="another copy of SQLite"):
                sqlite3.connect(name)
        for uri in (f"file:{path}", f"file://{path}?mode=ro", f"file://localhost{path}"):
            with pytest.raises(StoreError, match="another copy of SQLite"):
                sqlite3.connect(uri, uri=True)
        for harmless in (":memory:", "", tmp_path / "other.db", "file::memory:"):
            sqlite3.connect(harmless, uri=True).close()
        with pytest.raises(TypeError):
            sqlite3.connect(None)  # type: ignore[call-overload]
        with pytest.raises(sqlite3.Error):
            sqlite3.connect("file://[", uri=True)
        assert len(add(store, new())) == 1
    sqlite3.connect(path).close()


def test_apsw_is_not_imported_unless_it_is_asked_for() -> None:
    script = """
        import sys
        from trio_jobs.sqlite import SqliteStore
        store = SqliteStore(":memory:")
        store.open()
        store.close()
        print("apsw" in sys.modules)
        """
    assert output(python(script)) == "False\n"


# Forks.


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@needs_fork
def test_m9_in_a_forked_child_every_verb_is_refused(path: Path, driver: Driver) -> None:
    script = """
        import os, sqlite3, sys, warnings
        from trio_jobs._errors import StoreError
        from trio_jobs.sqlite import SqliteStore
        path, driver = sys.argv[1:]
        store = SqliteStore(path, driver=driver)
        store.open()
        child = os.fork()
        if child == 0:
            verbs = {
                "transaction": lambda: store.transaction().__enter__(),
                "add": lambda: store.add([]),
                "add_on": lambda: store.add_on(None, None),
                "apply": lambda: store.apply([]),
                "renew": lambda: store.renew([], 1),
                "claim": lambda: store.claim(None),
                "get": lambda: store.get(1),
                "find": lambda: store.find(states=[], kind=None, after=0, limit=1),
                "history": lambda: store.history(1),
                "counts": lambda: store.counts(None),
                "next_id": store.next_id,
                "queued_kinds": store.queued_kinds,
                "is_unlocked": store.is_unlocked,
                "tidy": lambda: store.tidy(0),
                "checkpoint": store.checkpoint,
                "open": store.open,
                "open another": SqliteStore(path, driver=driver).open,
            }
            for name, verb in verbs.items():
                try:
                    verb()
                except StoreError as error:
                    print(name, "fork" in str(error), flush=True)
            store.close()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        with store.transaction():
            pass
        store.close()
        child = os.fork()  # now it is nobody's
        if child == 0:
            store.open()
            print(store.counts(None))
            store.close()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        """
    lines = output(python(script, path, driver)).splitlines()

    assert len(lines) == 18
    assert {line.rpartition(" ")[2] for line in lines[:-1]} == {"True"}
    assert lines[-1] == "{}"


@needs_fork
def test_m9_children_that_end_do_not_disturb_the_writing_parent(path: Path, driver: Driver) -> None:
    script = """
        import gc, os, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        from trio_jobs._model import NewJob
        from trio_jobs.sqlite import SqliteStore
        job = NewJob(kind="mail", payload=b"x" * 500, raw=False, priority=0, enqueued_at=1,
            run_at=1, deadline=None, key=None)
        store = SqliteStore(sys.argv[1], driver=sys.argv[2], synchronous="normal")
        store.open()
        added = 0
        ending = threading.Event()
        def write():
            global added
            while not ending.is_set():
                with store.transaction():
                    store.add([job])
                added += 1
                if store.tidy(0):
                    store.checkpoint()
        thread = threading.Thread(target=write)
        thread.start()
        for n in range(5):
            children = []
            for way in range(4):
                child = os.fork()
                if child == 0:
                    if way == 0:
                        store.close()
                    elif way == 1:
                        del store, write, thread
                        gc.collect()
                    elif way == 2:
                        os._exit(0)
                    sys.exit()
                children.append(child)
            assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
            assert os.path.exists(sys.argv[1] + "-wal")
        ending.set()
        thread.join()
        print(added, store.counts(None).popitem()[1])
        store.close()
        """
    added, counted = map(int, output(python(script, path, driver)).split())

    assert added == counted > 0
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM trio_jobs_job").fetchone() == (added,)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@needs_fork
def test_m9_a_fork_in_the_middle_of_a_statement_lets_the_child_end(
    path: Path, driver: Driver
) -> None:
    script = """
        import gc, os, sys, threading, warnings, weakref
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        from trio_jobs.sqlite import SqliteStore
        store = SqliteStore(sys.argv[1], driver=sys.argv[2])
        store.open()
        inside, leave = threading.Event(), threading.Event()
        def wait():
            inside.set()
            leave.wait()
        native = store._connections.writer._connection
        if sys.argv[2] == "apsw":
            native.create_scalar_function("wait", wait, 0)
        else:
            native.create_function("wait", 0, wait)
        del native
        thread = threading.Thread(target=store._connections.writer.execute, args=("SELECT wait()",))
        thread.start()
        inside.wait()
        module = sys.modules.get("apsw", gc)
        references = sys.getrefcount(module)
        child = os.fork()
        if child == 0:
            ours = store._connections
            connections = (ours.writer, ours.reader, ours.checkpointer)
            kept = [weakref.ref(connection) for connection in connections]
            del store, thread, connections
            gc.collect()
            print(all(connection() for connection in kept))
            # The end of apsw's module would close all its connections.
            print(module is gc or sys.getrefcount(module) > references, flush=True)
            sys.exit()  # closing the connection would wait for the statement for ever
        status = os.waitpid(child, 0)[1]
        leave.set()
        thread.join()
        store.close()
        print(status)
        """
    assert output(python(script, path, driver)) == "True\nTrue\n0\n"


# Checkpoints.


@pytest.mark.parametrize(
    ("version", "has_bug"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
        ((4, 0, 0), False),
    ],
)
def test_which_versions_can_corrupt_a_file(version: tuple[int, ...], has_bug: bool) -> None:
    assert has_reset_bug(version) is has_bug


@pytest.mark.parametrize(
    "version",
    [(3, 40, 1), (3, 44, 6), (3, 50, 6), (3, 50, 7), (3, 51, 2), (3, 51, 3)],
    ids=str,
)
def test_M10_a_checkpoint_runs_under_the_lock_where_it_must_and_else_beside_the_writers(
    path: Path, driver: Driver, version: tuple[int, ...]
) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store, version)
    with opened(store):
        add(store, new(payload=b"x" * 5_000_000))
        spies.log.clear()
        is_more = store.tidy(0)
        at_once = bool(spies.log)
        if is_more:
            store.checkpoint()

    statements = [(number, sql) for number, sql, _ in spies.log]
    checkpoint = (2, "PRAGMA wal_checkpoint(PASSIVE)")
    if has_bug(version):
        assert statements == [(0, "BEGIN IMMEDIATE"), checkpoint, (0, "ROLLBACK")]
    else:
        assert statements == [checkpoint]
    assert is_more is not has_bug(version)
    assert at_once is has_bug(version)


@pytest.mark.parametrize("version", [(3, 40, 1), (3, 51, 3)], ids=str)
def test_the_log_stays_bounded_while_jobs_are_written(
    path: Path, driver: Driver, version: tuple[int, ...]
) -> None:
    store = SqliteStore(path, driver=driver, synchronous="normal")
    Spies(store, version)
    log = Path(f"{path}-wal")
    with opened(store):
        sizes = []
        for _ in range(300):
            add(store, new(payload=b"x" * 100_000))
            tidy(store)
            sizes.append(log.stat().st_size)

        assert max(sizes) < 4_400_000
    assert not log.exists()


def test_what_anybody_else_commits_is_news_and_what_is_rolled_back_is_not(
    path: Path, driver: Driver
) -> None:
    def version() -> object:
        with mine.transaction():
            return mine.version(100)

    mine, other = SqliteStore(path, driver=driver), SqliteStore(path, driver=driver)
    connect: Callable[[str], Any] = sqlite3.connect if driver == "sqlite3" else apsw.Connection
    with opened(mine), opened(other), contextlib.closing(connect(str(path))) as connection:
        versions = [version()]
        add(other, new())
        versions.append(version())
        for end in ("ROLLBACK", "COMMIT"):
            connection.execute("BEGIN")
            mine.add_on(connection, new())
            connection.execute(end)
            versions.append(version())
        versions.append(version())

    start, after_other, after_rollback, after_commit, later = versions
    assert start != after_other == after_rollback != after_commit == later


def test_nothing_is_checkpointed_while_there_is_little_to_do(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        add(store, new())
        spies.log.clear()
        tidy(store)

        assert spies.log == []


def test_a_reader_that_holds_the_log_does_not_make_every_call_try_again(
    path: Path, driver: Driver
) -> None:
    store = SqliteStore(path, driver=driver, synchronous="normal")
    spies = Spies(store)
    log = Path(f"{path}-wal")
    connect: Callable[[str], Any] = sqlite3.connect if driver == "sqlite3" else apsw.Connection
    with opened(store), contextlib.closing(connect(str(path))) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
        for _ in range(200):
            add(store, new(payload=b"x" * 100_000))
            tidy(store)
        tried = len([sql for _, sql, _ in spies.log if "wal_checkpoint" in sql])
        reader.execute("ROLLBACK")
        for _ in range(50):
            add(store, new(payload=b"x" * 100_000))
            tidy(store)

        assert 2 <= tried <= 6
        assert log.stat().st_size < 4_400_000


def has_bug(version: tuple[int, ...]) -> bool:
    return has_reset_bug(version)


def test_where_commits_go_on_beside_a_checkpoint_the_rest_is_moved_under_the_lock(
    path: Path, driver: Driver
) -> None:
    def let_go(sql: str) -> None:
        if reading.in_transaction:
            reading.execute("ROLLBACK")

    store = SqliteStore(path, driver=driver)
    spies = Spies(store, (3, 51, 3))
    with opened(store):
        add(store, new(payload=b"x" * 9_000_000))
        others = SqliteStore(path, driver=driver)
        with opened(others):
            reading = reader(others)
            # It needs what the log had before the last commit: the first pass cannot move that.
            reading.execute("BEGIN")
            reading.execute("SELECT count(*) FROM trio_jobs_job")
            add(others, new())
            spies.log.clear()
            spies.after = let_go
            tidy(store)
            spies.after = lambda sql: None
        done = [sql for _, sql, _ in spies.log]

    checkpoint = "PRAGMA wal_checkpoint(PASSIVE)"
    assert done[:4] == [checkpoint, "BEGIN IMMEDIATE", checkpoint, "ROLLBACK"]


def test_while_the_lock_is_held_the_rest_of_a_checkpoint_waits_for_the_next(
    path: Path, driver: Driver
) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store, (3, 51, 3))
    log = Path(f"{path}-wal")
    connect: Callable[[str], Any] = sqlite3.connect if driver == "sqlite3" else apsw.Connection
    with opened(store), contextlib.closing(connect(str(path))) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
        add(store, new(payload=b"x" * 9_000_000))
        spies.log.clear()
        lock = locked_by_another_process(path)
        tidy(store)  # no error, and no waiting
        release(lock)
        tried = [sql for _, sql, _ in spies.log]
        left = log.stat().st_size
        reader.execute("ROLLBACK")
        tidy(store, 100 + 5_100_000)
        cut = log.stat().st_size

    assert tried[:2] == ["PRAGMA wal_checkpoint(PASSIVE)", "BEGIN IMMEDIATE"]
    assert tried.count("BEGIN IMMEDIATE") == 1
    assert left > 9_000_000
    assert cut < 4_400_000


@pytest.mark.parametrize("version", [(3, 40, 1), (3, 51, 3)], ids=str)
def test_Q6_a_reader_that_keeps_the_log_long_is_told_of_once_and_then_the_log_is_cut(
    path: Path, driver: Driver, version: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(path, driver=driver, synchronous="normal")
    Spies(store, version)
    log = Path(f"{path}-wal")
    connect: Callable[[str], Any] = sqlite3.connect if driver == "sqlite3" else apsw.Connection
    with opened(store), contextlib.closing(connect(str(path))) as reader:
        for _ in range(2):
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
            for _ in range(60):
                add(store, new(payload=b"x" * 500_000))
                tidy(store)
            pinned = log.stat().st_size
            reader.execute("ROLLBACK")
            tidy(store, 100 + 4_900_000)
            too_early = log.stat().st_size
            tidy(store, 100 + 5_100_000)
            cut = log.stat().st_size
            tidy(store)

            assert pinned > 30_000_000
            assert too_early == pinned
            assert cut < 4_400_000

    assert len([one for one in caplog.records if "reading transaction" in one.message]) == 2


class PatientLock:
    """Says how long others were ready to wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.patience: list[float] = []

    def acquire(self, *, timeout: float) -> bool:
        self.patience.append(timeout)
        return bool(self._lock.acquire(timeout=timeout))

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize(("size", "patience"), [(5, []), (9, [0.02]), (14, [0.2])])
def test_Q6_the_longer_the_log_the_longer_a_checkpoint_waits_for_a_read(
    path: Path, driver: Driver, size: int, patience: list[float]
) -> None:
    store = SqliteStore(path, driver=driver)
    Spies(store, (3, 40, 1))
    with opened(store):
        add(store, new(payload=b"x" * size * 1_000_000))
        reading = store._connections.reading
        lock = PatientLock(reading)
        vars(store._connections)["reading"] = lock
        tidy(store)
        vars(store._connections)["reading"] = reading

    assert lock.patience == patience


def test_tidying_gives_way_to_a_lock(path: Path, driver: Driver) -> None:
    store = SqliteStore(path, driver=driver)
    Spies(store, (3, 40, 1))
    with opened(store):
        add(store, new(payload=b"x" * 5_000_000))
        lock = locked_by_another_process(path)
        tidy(store)
        release(lock)
        assert Path(f"{path}-wal").stat().st_size > 5_000_000

        tidy(store)
        add(store, new())
        assert Path(f"{path}-wal").stat().st_size < 4_400_000


def test_a_checkpoint_that_fails_is_logged_and_no_error(
    path: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(path, driver=driver)
    spies = Spies(store)
    with opened(store):
        add(store, new(payload=b"x" * 5_000_000))
        spies.before = fails_at("wal_checkpoint")
        with caplog.at_level(logging.WARNING, "trio_jobs"):
            tidy(store)
            tidy(store)
        spies.before = lambda sql: None

        assert [record.message for record in caplog.records if "checkpointing" in record.message]
        assert len(add(store, new())) == 1


def test_M10_an_old_version_is_told_of_once_in_a_process(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, said in (((3, 51, 3), 0), ((3, 51, 2), 1)):
        monkeypatch.setattr(_connections, "_said", set())
        caplog.clear()
        with caplog.at_level(logging.INFO, "trio_jobs"):
            for _ in range(3):
                store = SqliteStore(path)
                Spies(store, version)
                with opened(store):
                    pass

        assert [record.levelname for record in caplog.records] == ["INFO"] * said
        for record in caplog.records:
            assert record.message == (
                "SQLite 3.51.2: give connections of your own to the file PRAGMA "
                "wal_autocheckpoint = 0 (see README)"
            )


def test_a_connection_that_checkpoints_by_itself_is_told_of_once(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, pages, said in (((3, 51, 3), 1000, 0), ((3, 51, 2), 0, 0), ((3, 51, 2), 1000, 1)):
        monkeypatch.setattr(_connections, "_said", set())
        store = SqliteStore(path)
        Spies(store, version)
        with opened(store), contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")
            caplog.clear()
            with caplog.at_level(logging.INFO, "trio_jobs"):
                for _ in range(3):
                    store.add_on(connection, new())
                connection.commit()

        assert [record.levelname for record in caplog.records] == ["WARNING"] * said
        assert all("wal_autocheckpoint = 0" in record.message for record in caplog.records)


# Plans and costs.


@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_no_statement_of_a_runner_walks_over_the_table(
    path: Path, driver: Driver, rows: int
) -> None:
    store = SqliteStore(path, driver=driver)
    with opened(store):
        add(store, *[new(key=str(n), deadline=900, run_at=50 + n % 100) for n in range(rows)])
        for job in claim(store).jobs:
            failed = _lifecycle.ended(job.row, Raised(Failure("no")), POLICY, 100)
            with store.transaction():
                store.apply([failed])
        writer(store).execute("ANALYZE")  # the application may, and at a bad moment
    spies = Spies(store)
    with opened(store):
        spies.log.clear()
        live_through_everything(store)
        plans = {
            sql: [
                record[3] for record in writer(store).execute(f"EXPLAIN QUERY PLAN {sql}", values)
            ]
            for _, sql, values in list(spies.log)
            if sql not in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
        }

    assert len(plans) > 25
    assert any("DELETE FROM trio_jobs_past" in sql for sql in plans)
    for sql, plan in plans.items():
        for step in plan:
            walks = step.startswith("SCAN") and any(
                f"SCAN {table}" in step and "trio_jobs_cancel" not in step
                for table in ("trio_jobs_job", "trio_jobs_past", "job", "past")
            )
            assert not walks, (sql, plan)
            assert "TEMP B-TREE" not in step or "UNION" in sql, (sql, plan)


def live_through_everything(store: SqliteStore) -> None:
    """Every verb but those that count and list."""
    rows = add(store, *[new(key=f"x{n}") for n in range(3)], new(run_at=200), new(deadline=101))
    writer(store).execute("UPDATE trio_jobs_job SET claims = 100 WHERE id = ?", (rows[0].id,))
    jobs = claim(store).jobs
    claim(store, now=101, limit=0)
    with store.transaction():
        store.renew([job.row.fence for job in jobs], 150)
    for job in jobs[:-2]:
        with store.transaction():
            store.apply([_lifecycle.published(job.row, b"1")])
            store.apply([_lifecycle.ended(job.row, Raised(Failure("no")), POLICY, 110)])
            store.apply([_lifecycle.ended(job.row, Returned(b"1"), POLICY, 110)])
    cancelled = _lifecycle.cancelled(jobs[-1].row, 110)
    assert cancelled is not None
    with store.transaction():
        store.apply([cancelled])
        store.apply([_lifecycle.ended(cancelled.after, Returned(b"1"), POLICY, 110)])
    row = store.get(cancelled.after.id)
    assert row is not None
    with store.transaction():
        store.apply([_lifecycle.retried(row, 120)])
    claim(store, now=300)
    claim(store, now=500)
    store.history(rows[0].id)
    store.queued_kinds()
    store.next_id()


def test_a_claim_costs_the_same_beside_any_number_of_other_rows(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / name, synchronous="normal") for name in ("few", "many")]
    with opened(stores[0]), opened(stores[1]):
        fill(stores[1], "state = 3, finished_at = 100", 200_000)
        fill(stores[1], "state = 1, run_at = 1000000 + id", 200_000)
        fill(stores[1], "state = 0, kind = 'kind ' || (id % 7)", 200_000)
        for store in stores:
            add(store, *[new() for _ in range(4000)])
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(150):
            for store, measured in zip(stores, times, strict=True):
                with store.transaction():
                    start = time.thread_time()
                    taken = store.claim(
                        Claim(
                            policies={"mail": POLICY, "sms": POLICY},
                            limit=10,
                            lost_limit=5,
                            now=100,
                            lease_now=100,
                            lease_until=200,
                        )
                    )
                    measured.append(time.thread_time() - start)
                assert len(taken.jobs) == 10

    few, many = map(statistics.median, times)
    print(f"a claim of 10 jobs: {few * 1e6:.0f} us alone, {many * 1e6:.0f} us beside 600,000 rows")
    assert many < 1.5 * few


def fill(store: SqliteStore, columns: str, rows: int) -> None:
    """Insert many rows by SQL alone: through the store it would take a minute."""
    names = [column.split(" = ")[0] for column in columns.split(", ")]
    values = [column.split(" = ")[1] for column in columns.split(", ")]
    if "kind" not in names:
        names, values = [*names, "kind"], [*values, "'mail'"]
    [(first,)] = writer(store).execute("SELECT next_id FROM trio_jobs_meta")
    writer(store).execute(
        f"""
        WITH RECURSIVE new(id) AS (
            SELECT {first} UNION ALL SELECT id + 1 FROM new WHERE id < {first + rows - 1}
        )
        INSERT INTO trio_jobs_job (id, {", ".join(names)}, payload)
        SELECT id, {", ".join(values)}, '[1]' FROM new
        """
    )
    writer(store).execute(f"UPDATE trio_jobs_meta SET next_id = next_id + {rows}")


@pytest.mark.parametrize("connect", [_drivers.connect_sqlite3, _drivers.connect_apsw])
def test_a_connection_whose_last_statement_failed_lets_go_of_the_file_when_it_closes(
    connect: Callable[[str], Connection], tmp_path: Path
) -> None:
    connection = connect(str(tmp_path / "app.db"))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE it (id INTEGER PRIMARY KEY)")
    with pytest.raises(StoreError) as caught:
        connection.execute("INSERT INTO it SELECT 1 UNION ALL SELECT 1")

    connection.close()

    assert caught.value.__cause__ is not None  # whose traceback has the cursor
    assert [path.name for path in tmp_path.iterdir()] == ["app.db"]  # the last takes the log along
