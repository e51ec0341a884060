"""`trio-jobs demo` end to end: right numbers on real folders, and after `kill -9`."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trio_jobs import _demo
from trio_jobs.__main__ import main

ROOT = Path(__file__).parent.parent
MANY = 1_000_000

# The demo as it is, but slow, and it writes down whatever it hashes.
SLOW_DEMO = """
import itertools, os, signal, sys, time
from trio_jobs import _demo
from trio_jobs.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's "&"
log = os.open(sys.argv.pop(1), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
walk_most, hash_most = int(sys.argv.pop(1)), int(sys.argv.pop(1))
hash_delay = float(sys.argv.pop(1))
numbers = itertools.count()
files_below, read_and_hash = _demo.files_below, _demo.read_and_hash

def slow_files_below(folder, database):
    for number, path in enumerate(files_below(folder, database)):
        time.sleep(0 if number < walk_most else 60)
        yield path

def slow_read_and_hash(path, database):
    os.write(log, path + b"\\n")
    time.sleep(hash_delay if next(numbers) < hash_most else 60)
    return read_and_hash(path, database)

_demo.files_below, _demo.read_and_hash = slow_files_below, slow_read_and_hash
main()
"""


def run_demo(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["demo", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def demo_process(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "trio_jobs", "demo", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def slow_demo(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a slow demo; what it hashes is in the file `hashed`. After so many files the walk,
    or the hashing, stands still."""
    script = tmp_path / "slow_demo.py"
    script.write_text(SLOW_DEMO)
    processes = []

    def start(
        *arguments: str | Path, walk: int = MANY, hashes: int = MANY, hash: float = 0.0
    ) -> subprocess.Popen[str]:
        log = tmp_path / "hashed"
        log.touch()
        process = subprocess.Popen(
            [sys.executable, script, log, *map(str, [walk, hashes, hash]), "demo", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


def wasted(output: str) -> tuple[int, int]:
    """Bytes and groups."""
    match = re.search(r"^Wasted: ([\d,]+) bytes in ([\d,]+) groups", output, re.MULTILINE)
    assert match is not None, output
    return number(match[1]), number(match[2])


def files(output: str) -> tuple[int, int]:
    """Found, and not hashed."""
    match = re.search(r"^Files: ([\d,]+) found, ([\d,]+) not hashed", output, re.MULTILINE)
    assert match is not None, output
    return number(match[1]), number(match[2])


def number(text: str) -> int:
    return int(text.replace(",", ""))


def rows(output: str) -> list[list[str]]:
    """The cells of the table of duplicates."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def query(database: Path, sql: str) -> list[tuple[Any, ...]]:
    """Ask through a connection of this process that is closed again."""
    connection = sqlite3.connect(database, timeout=30)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_files(folder: Path, count: int, kinds: int) -> int:
    """Files of `kinds` contents in a tree; how many bytes are wasted among them."""
    contents = [f"content {kind}".encode() * (kind + 1) for kind in range(kinds)]
    for each in range(count):
        below = folder / f"{each % 7}" / f"{each % 49}"
        if each < 49:
            below.mkdir(parents=True, exist_ok=True)
        (below / f"{each}.txt").write_bytes(contents[each % kinds])
    copies = Counter(each % kinds for each in range(count))
    return sum(len(contents[kind]) * (number - 1) for kind, number in copies.items())


def test_duplicates_are_told_with_their_sizes_and_the_exact_total(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("a", "deep/b", "deep/er/c"):
        (folder / name).write_bytes(b"x" * 1000)
    for name in ("d", "e"):
        (folder / name).write_bytes(b"y" * 5000)
    (folder / "alone").write_bytes(b"z" * 5000)

    result = run_demo(folder)

    assert result.exit_code == 0
    assert wasted(result.output) == (7000, 2)
    assert files(result.output) == (6, 0)
    assert rows(result.output) == [
        ["2", "5,000", "5,000", f"{folder}/d"],
        ["", "", "", f"{folder}/e"],
        ["3", "1,000", "2,000", f"{folder}/a"],
        ["", "", "", f"{folder}/deep/b"],
        ["", "", "", f"{folder}/deep/er/c"],
    ]
    assert re.search(r"^Runner: 7 jobs, 0 retries, 0 failures .* jobs/s", result.output, re.M)


def test_files_that_differ_only_in_their_last_byte_are_not_the_same(folder: Path) -> None:
    size = 3 * _demo.CHUNK
    (folder / "a").write_bytes(bytes(size))
    (folder / "b").write_bytes(bytes(size))
    (folder / "c").write_bytes(bytes(size - 1) + b"\1")

    assert wasted(run_demo(folder).output) == (size, 1)


def test_only_the_largest_groups_are_printed_and_all_are_counted(folder: Path) -> None:
    for each in range(30):
        for copy in "ab":
            (folder / f"{each}{copy}").write_text("x" * (each + 1))

    output = run_demo(folder).output

    assert wasted(output) == (30 * 31 // 2, 30)
    assert rows(output)[0][:3] == ["2", "30", "30"]
    assert len(rows(output)) == 2 * 20
    assert "and 10 more groups" in output


def test_of_a_large_group_some_paths_are_printed(folder: Path) -> None:
    for each in range(8):
        (folder / f"{each}").write_text("x")

    output = run_demo(folder).output

    assert wasted(output) == (7, 1)
    assert rows(output)[-1] == ["", "", "", "and 3 more"]


def test_hard_links_waste_nothing(folder: Path) -> None:
    (folder / "a").write_bytes(b"x" * 100)
    os.link(folder / "a", folder / "a again")
    assert wasted(run_demo(folder).output) == (0, 0)

    (folder / "b").write_bytes(b"x" * 100)
    output = run_demo(folder).output

    assert wasted(output) == (100, 1)
    assert files(output) == (3, 0)
    assert rows(output)[0][0] == "2"


def test_symlinks_and_what_is_no_regular_file_are_not_looked_at(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"x" * 100)
    (folder / "a").write_bytes(b"x" * 100)
    (folder / "link").symlink_to("a")
    (folder / "broken").symlink_to("nothing")
    (folder / "loop").symlink_to(".")
    (folder / "other").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe")

    output = run_demo(folder).output

    assert files(output) == (1, 0)
    assert wasted(output) == (0, 0)


def test_empty_files_are_counted_and_are_no_duplicates(folder: Path) -> None:
    for name in "abc":
        (folder / name).touch()

    output = run_demo(folder).output

    assert files(output) == (3, 0)
    assert wasted(output) == (0, 0)
    assert rows(output) == []


def test_an_empty_folder_has_nothing(folder: Path) -> None:
    result = run_demo(folder)

    assert result.exit_code == 0
    assert files(result.output) == (0, 0)
    assert wasted(result.output) == (0, 0)


def test_the_current_folder_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a").touch()
    monkeypatch.chdir(folder)

    assert files(run_demo().output) == (1, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names have to be text")
def test_names_may_be_any_bytes(folder: Path) -> None:
    names = [b"\xff", rb"\xff", b"new\nline", b"[bold]red", b"\x1b[31m", "\u0434".encode()]
    for name in names:
        with open(os.fsencode(folder) + b"/" + name, "wb") as file:
            file.write(b"same")
    os.mkdir(os.fsencode(folder) + b"/\xfe")
    with open(os.fsencode(folder) + b"/\xfe/in it", "wb") as file:
        file.write(b"other")

    output = run_demo(folder).output

    assert files(output) == (7, 0)
    assert wasted(output) == (5 * 4, 1)
    shown = {row[3].removeprefix(f"{folder}/") for row in rows(output)}
    assert len(shown) == 6  # five and "and 1 more"
    assert shown - {"and 1 more"} < {
        r"\xff",
        r"\\xff",
        r"new\nline",
        "[bold]red",
        r"\x1b[31m",
        "\u0434",
    }
    assert "\x1b" not in output


def test_a_file_that_is_gone_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "gone"):
        (folder / name).write_bytes(b"x" * 10)
    files_below = _demo.files_below

    def and_one_goes(below: bytes, database: str) -> Iterator[bytes]:
        for path in files_below(below, database):
            if path.endswith(b"gone"):
                os.unlink(path)
            yield path

    monkeypatch.setattr(_demo, "files_below", and_one_goes)
    result = run_demo(folder)

    assert result.exit_code == 0
    assert files(result.output) == (3, 1)
    assert f"{folder}/gone: cannot be read: No such file or directory" in result.output
    assert wasted(result.output) == (10, 1)


def test_a_file_that_may_not_be_read_fails_with_a_safe_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a").write_bytes(b"x" * 10)
    (folder / "secret").write_bytes(b"x" * 10)

    # For root every file can be read.
    def refuse(path: bytes, mode: str) -> object:
        if path.endswith(b"secret"):
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr(_demo, "open", refuse, raising=False)
    database = tmp_path / "search.db"
    result = run_demo(folder, "--db", database)

    assert f"{folder}/secret: cannot be read: Permission denied" in result.output
    assert (
        query(database, "SELECT state, failure, failure_type FROM trio_jobs_job ORDER BY id")[
            1:
        ].count((4, "cannot be read: Permission denied", None))
        == 1
    )
    assert "Runner: 3 jobs, 0 retries, 1 failures" in result.output
    assert "Traceback" not in caplog.text


def test_a_folder_that_cannot_be_read_is_left_out_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a").touch()
    (folder / "secret").mkdir()
    scandir = os.scandir

    def refuse(path: bytes | int) -> object:
        if isinstance(path, bytes) and path.endswith(b"secret"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    result = run_demo(folder)

    assert result.exit_code == 0
    assert files(result.output) == (1, 0)
    assert f"left out, {folder}/secret cannot be read: Permission denied" in caplog.messages


def test_a_file_that_became_a_pipe_is_not_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").touch()
    files_below = _demo.files_below

    def and_it_changes(below: bytes, database: str) -> Iterator[bytes]:
        for path in files_below(below, database):
            os.unlink(path)
            os.mkfifo(path)
            yield path

    monkeypatch.setattr(_demo, "files_below", and_it_changes)
    output = run_demo(folder).output

    assert "is no longer the file that was found" in output


def test_without_db_nothing_is_left_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (folder / "a").touch()

    output = run_demo(folder).output

    assert "temporary file, which is gone" in output
    assert list(temporary.iterdir()) == []
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_its_temporary_database_in_the_folder_is_not_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (folder / "a").touch()

    assert files(run_demo(folder).output) == (1, 0)


def test_its_own_database_is_never_opened_and_loses_nothing(
    folder: Path, slow_demo: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    total = make_files(folder, 300, 20)
    database = folder / "0" / "search.db"
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE app (number INTEGER)")
    connection.close()
    os.link(database, folder / "another name")
    (folder / "link.db").symlink_to(database)

    demo = slow_demo(folder, "--db", folder / "link.db", hash=0.02)
    inserted = 0
    while demo.poll() is None:
        # Another process comes and goes. If the demo had opened its database by path, its
        # locks were gone, this would be the last one to leave, and would take the -wal along.
        visitor = sqlite3.connect(database, timeout=30)
        visitor.execute("PRAGMA wal_autocheckpoint = 0")
        with visitor:
            visitor.execute("INSERT INTO app VALUES (?)", (inserted,))
        visitor.close()
        inserted += 1
        time.sleep(0.005)
    output, errors = demo.communicate()

    assert demo.returncode == 0, errors
    assert inserted > 20
    assert wasted(output) == (total, 20)
    assert files(output) == (300, 0)
    hashed = (tmp_path / "hashed").read_text().splitlines()
    assert sorted(hashed) == sorted(map(str, folder.glob("*/*/*.txt")))
    assert query(database, "PRAGMA integrity_check") == [("ok",)]
    assert query(database, "SELECT count(*), count(DISTINCT number) FROM app") == [(inserted,) * 2]
    assert query(database, "SELECT state, count(*) FROM trio_jobs_job GROUP BY 1") == [(3, 301)]


def test_a_path_that_became_the_database_is_not_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").touch()
    database = tmp_path / "search.db"
    files_below = _demo.files_below

    def and_it_changes(below: bytes, database: str) -> Iterator[bytes]:
        for path in files_below(below, database):
            os.unlink(path)
            os.link(database + "-wal", path)
            yield path

    monkeypatch.setattr(_demo, "files_below", and_it_changes)
    output = run_demo(folder, "--db", database).output

    assert "is no longer the file that was found" in output


@pytest.mark.parametrize("during", ["the walk", "the hashing"])
def test_killed_and_started_again_it_goes_on_and_hashes_nothing_twice(
    during: str, folder: Path, slow_demo: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    count = 800
    total = make_files(folder, count, 50)
    database = tmp_path / "search.db"
    succeeded = "SELECT key FROM trio_jobs_job WHERE kind = 'hash file' AND state = 3"
    stop = {"walk" if during == "the walk" else "hashes": _demo.BATCH + 100}

    killed = slow_demo(folder, "--db", database, "--workers", "8", **stop)
    wait_for(database.exists, killed)
    has_table = "SELECT count(*) FROM sqlite_master WHERE name = 'trio_jobs_past'"
    wait_for(lambda: query(database, has_table) == [(1,)], killed)
    wait_for(lambda: len(query(database, succeeded)) >= 200, killed)
    killed.kill()
    killed.communicate()
    finished = {key for (key,) in query(database, succeeded)}
    [(walk_state, found)] = query(
        database,
        "SELECT state, (SELECT count(*) FROM trio_jobs_job WHERE kind = 'hash file') "
        "FROM trio_jobs_job WHERE kind = 'walk folder'",
    )
    again = slow_demo(folder, "--db", database)
    # Half of the usual lease: it does not wait for one to end.
    output, errors = again.communicate(timeout=30)

    assert again.returncode == 0, errors
    assert 200 <= len(finished) < count
    if during == "the walk":
        assert walk_state == 2
        assert 0 < found < count
    assert files(output) == (count, 0)
    assert wasted(output) == (total, 50)
    starts = Counter((tmp_path / "hashed").read_text().splitlines())
    assert len(starts) == count
    assert {path for path, number in starts.items() if number > 1}.isdisjoint(finished)
    # What its workers had in hand, and ends on their way to the disk.
    assert sum(starts.values()) <= count + 8 + 250
    assert query(database, "SELECT count(*), count(DISTINCT key) FROM trio_jobs_job") == [
        (count + 1,) * 2
    ]


def test_a_finished_search_is_printed_again_without_hashing(folder: Path, tmp_path: Path) -> None:
    make_files(folder, 20, 3)
    database = tmp_path / "search.db"
    first = run_demo(folder, "--db", database).output
    (folder / "later").write_text("is not in this search")

    second = run_demo(folder, "--db", database).output

    assert rows(second) == rows(first)
    assert files(second) == (20, 0)
    assert "Runner: 0 jobs, 0 retries, 0 failures" in second


def test_a_walk_that_had_failed_is_given_a_new_life(folder: Path, tmp_path: Path) -> None:
    make_files(folder, 20, 3)
    database = tmp_path / "search.db"
    run_demo(folder, "--db", database)
    connection = sqlite3.connect(database)
    with connection:
        connection.execute("UPDATE trio_jobs_job SET state = 5 WHERE kind = 'walk folder'")
    connection.close()

    output = run_demo(folder, "--db", database).output

    assert files(output) == (20, 0)
    assert "Runner: 1 jobs" in output


def test_a_database_holds_the_search_of_one_folder(folder: Path, tmp_path: Path) -> None:
    database = tmp_path / "search.db"
    run_demo(folder, "--db", database)
    (tmp_path / "other").mkdir()

    result = run_demo(tmp_path / "other", "--db", database)

    assert result.exit_code == 1
    assert (
        result.stderr == f"Error: this database holds the search of {folder}; give another --db\n"
    )


def test_ctrl_c_stops_it_and_the_next_start_goes_on(
    folder: Path, slow_demo: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    total = make_files(folder, 300, 20)
    database = tmp_path / "search.db"

    stopped = slow_demo(folder, "--db", database, hash=0.05)
    wait_for(lambda: (tmp_path / "hashed").stat().st_size > 0, stopped)
    stopped.send_signal(2)
    output, errors = stopped.communicate(timeout=10)
    states = query(database, "SELECT DISTINCT state FROM trio_jobs_job ORDER BY 1")
    again = run_demo(folder, "--db", database).output

    assert stopped.returncode == 130, errors
    assert (output, errors) == ("", "")
    assert (2,) not in states  # handed back
    assert wasted(again) == (total, 20)


def test_thousands_of_files_take_seconds(folder: Path) -> None:
    total = make_files(folder, 3_000, 300)

    start, before = time.monotonic(), os.times()
    demo = demo_process(folder)
    output, errors = demo.communicate(timeout=120)
    seconds, after = time.monotonic() - start, os.times()
    worked = after.children_user + after.children_system
    worked -= before.children_user + before.children_system

    print(f"{seconds:.1f} s, {worked:.1f} s of them at work; {output.splitlines()[-2]}")
    assert demo.returncode == 0, errors
    assert errors == ""
    assert files(output) == (3_000, 0)
    assert wasted(output) == (total, 300)
    assert worked < 12  # not the time on the wall: other processes are no business of ours


def test_a_bar_is_shown_on_a_terminal_only(folder: Path) -> None:
    make_files(folder, 50, 5)

    terminal, _ = demo_process(folder, FORCE_COLOR="1").communicate(timeout=30)
    pipe, _ = demo_process(folder).communicate(timeout=30)

    assert "hashing" in terminal
    assert "hashing" not in pipe
    assert "\x1b" not in pipe


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    result = run_demo(tmp_path / "nowhere")

    assert result.exit_code == 2
    assert "does not exist" in result.stderr
