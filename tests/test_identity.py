"""Which process this is, and which others are gone: real ones, and what /proc may say."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from trio_jobs import _identity
from trio_jobs._identity import Process, is_dead, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it for certain")


@pytest.fixture
def here() -> Process:
    process = this_process()
    assert process is not None
    return process


@contextlib.contextmanager
def sleeping(program: str | Path = "sleep") -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([program, "60"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def process_of(child: subprocess.Popen[bytes], here: Process) -> Process:
    return Process(here.place, child.pid, _identity._Status(child.pid).started)


def end_but_do_not_wait_for(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def reads(path: str, text: str | OSError) -> Callable[[str], str]:
    """Reading that file gives this, reading others what it gives."""
    read = _identity._read

    def instead(asked: str) -> str:
        if asked != path:
            return read(asked)
        if isinstance(text, OSError):
            raise text
        return text

    return instead


def test_a_process_is_the_same_whenever_and_wherever_it_asks(here: Process) -> None:
    answers: list[Process | None] = []
    thread = threading.Thread(target=lambda: answers.append(this_process()))
    thread.start()
    thread.join()

    assert answers == [here]
    assert here.pid == os.getpid()
    assert not is_dead(here, here)


def test_a_place_is_a_boot_and_the_namespaces_of_pids_and_of_time(here: Process) -> None:
    # In another time namespace the same process has another start time.
    namespaces = [Path(f"/proc/self/ns/{name}") for name in ("pid", "time")]

    assert here.place.split() == [
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        *(str(one.stat().st_ino) if one.exists() else "0" for one in namespaces),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks with threads
def test_a_forked_child_is_another_process(here: Process) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, msgspec.json.encode(this_process()))
        os._exit(0)
    os.waitpid(child, 0)
    forked = msgspec.json.decode(os.read(reading, 1000), type=Process)
    os.close(reading)
    os.close(writing)

    assert (forked.place, forked.pid) == (here.place, child)
    assert is_dead(forked, here)


def test_a_child_lives_until_it_has_ended_and_need_not_be_waited_for(here: Process) -> None:
    with sleeping() as child:
        process = process_of(child, here)
        living = is_dead(process, here)
        end_but_do_not_wait_for(child)
        zombie = is_dead(process, here)
        child.wait()
        reaped = is_dead(process, here)

    assert (living, zombie, reaped) == (False, True, True)


def test_a_stopped_process_lives(here: Process) -> None:
    with sleeping() as child:
        process = process_of(child, here)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)

        assert not is_dead(process, here)


def test_a_process_whose_pid_another_has_now_is_dead(here: Process) -> None:
    with sleeping() as child:
        process = process_of(child, here)

        assert is_dead(msgspec.structs.replace(process, started=process.started - 1), here)


def test_a_name_with_spaces_and_parentheses_hides_nothing(here: Process, tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    # As it would be in the file of a zombie that another name ends early.
    program = tmp_path / "x) Z 1 (y"
    program.symlink_to(sleep)
    with sleeping(program) as child, sleeping() as plain:
        assert "x) Z 1 (y) " in _identity._read(f"/proc/{child.pid}/stat")
        process = process_of(child, here)
        assert not is_dead(process, here)
        assert abs(process.started - process_of(plain, here).started) < 1000
        end_but_do_not_wait_for(child)
        assert is_dead(process, here)


def test_a_process_lives_as_long_as_any_of_its_threads(here: Process) -> None:
    script = """
import ctypes, os, threading
threading.Thread(target=os.read, args=(0, 1)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        process = process_of(child, here)
        for _ in range(1000):
            if ") Z " in _identity._read(f"/proc/{child.pid}/stat"):
                break
            time.sleep(0.01)
        first_thread_gone = is_dead(process, here)
        end_but_do_not_wait_for(child)

        assert not first_thread_gone
        assert is_dead(process, here)


def test_of_a_process_in_another_place_nothing_is_known(here: Process) -> None:
    boot, pids, times = here.place.split()
    with sleeping() as child:
        process = process_of(child, here)
    assert is_dead(process, here)

    for place in (f"{boot[::-1]} {pids} {times}", f"{boot} 1 {times}", f"{boot} {pids} 1"):
        assert not is_dead(msgspec.structs.replace(process, place=place), here)


def test_where_proc_hides_the_processes_of_others_they_live(
    here: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    with sleeping() as child:
        process = process_of(child, here)
        other = msgspec.structs.replace(process, started=1)
        path = f"/proc/{child.pid}/stat"
        monkeypatch.setattr(os, "kill", refuse)
        seen = is_dead(process, here), is_dead(other, here)
        monkeypatch.setattr(_identity, "_read", reads(path, FileNotFoundError()))
        hidden = is_dead(process, here), is_dead(other, here)
        monkeypatch.undo()

    assert seen == (False, True)
    assert hidden == (False, False)


@pytest.mark.parametrize("text", ["", "7", "7 (x) S 1", "7 (x) S " + "x " * 40])
def test_what_proc_says_and_nobody_understands_means_nothing(
    here: Process, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(_identity, "_read", reads(f"/proc/{here.pid}/stat", text))

    assert not is_dead(here, here)
    assert this_process() is None


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/proc/self/status", FileNotFoundError()),
        ("/proc/self/status", "Name:\tpython\n"),
        ("/proc/self/status", f"NSpid:\t4711\t{os.getpid()}\n"),  # as seen from around us
        ("/proc/self/status", "NSpid:\t1\n"),
        ("/proc/sys/kernel/random/boot_id", PermissionError()),
        (f"/proc/{os.getpid()}/stat", FileNotFoundError()),
    ],
    ids=["no /proc", "an old kernel", "another namespace", "another pid", "no boot id", "no stat"],
)
def test_without_a_proc_of_its_own_a_process_cannot_be_told_from_another(
    monkeypatch: pytest.MonkeyPatch, path: str, text: str | OSError
) -> None:
    monkeypatch.setattr(_identity, "_read", reads(path, text))

    assert this_process() is None
