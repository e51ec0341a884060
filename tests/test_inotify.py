"""A watch on one file, as the kernel keeps it."""

from __future__ import annotations

import os
import resource
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trio_jobs._inotify import Watch, open_watch

if sys.platform != "linux":
    pytest.skip("only Linux has it", allow_module_level=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "log"
    file.write_text("")
    return file


@pytest.fixture
def watch(file: Path) -> Iterator[Watch]:
    watch = open_watch(str(file))
    assert watch is not None
    yield watch
    watch.close()


def is_readable(watch: Watch) -> bool:
    return bool(select.select([watch.descriptor], [], [], 0)[0])


def test_it_is_readable_from_a_write_until_that_is_forgotten(file: Path, watch: Watch) -> None:
    with file.open("ab", buffering=0) as writer:
        before = is_readable(watch)
        writer.write(b"x")
        after = is_readable(watch)
        watch.forget()
        forgotten = is_readable(watch)
        writer.write(b"x")
        again = is_readable(watch)

    assert (before, after, forgotten, again) == (False, True, False, True)


def test_many_writes_are_forgotten_as_one(file: Path, watch: Watch) -> None:
    with file.open("ab", buffering=0) as writer:
        for _ in range(1000):
            writer.write(b"x")
    watch.forget()

    assert not is_readable(watch)


def test_to_forget_nothing_is_fine(watch: Watch) -> None:
    watch.forget()

    assert not is_readable(watch)


def test_opening_and_reading_the_file_is_no_write(file: Path, watch: Watch) -> None:
    file.read_text()

    assert not is_readable(watch)


def test_a_program_that_is_started_does_not_inherit_it(watch: Watch) -> None:
    assert not os.get_inheritable(watch.descriptor)


def test_it_holds_no_descriptor_of_the_file(file: Path, watch: Watch) -> None:
    held = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}

    assert str(file) not in held


def test_where_there_is_no_such_file_there_is_no_watch_and_nothing_is_left(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")

    assert open_watch(str(tmp_path / "missing")) is None
    assert os.listdir("/proc/self/fd") == before


def test_where_the_system_refuses_there_is_no_watch(file: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        watch = open_watch(str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert watch is None


def test_another_system_has_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    assert open_watch(str(file)) is None
