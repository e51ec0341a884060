"""Which process this is, and whether another one is gone: only what the system says for certain.

On Linux a process is named by its boot, its namespaces, its pid and the tick it was started in.
A pid alone would not do: it is used again. Where that cannot be told (another system, another
machine, boot or container, a hidden /proc) nothing is said of a process, and its leases have to
end. A lock on a file would be an alternative, but it needs a file and a descriptor for each
process, and whoever looks would have to take it.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

_SINGLE_THREAD: Final = 1
_GONE: Final = frozenset("ZXx")


class Process(msgspec.Struct, frozen=True):
    """One process of one machine."""

    place: str
    """The boot and the namespaces: only within one place do pids and ticks mean the same."""
    pid: int
    started: int
    """In ticks of the kernel since it booted."""


def this_process() -> Process | None:
    """None where a process cannot be told from another."""
    pid = os.getpid()
    try:
        if not _is_proc_ours(pid):
            return None
        boot = _read("/proc/sys/kernel/random/boot_id").strip()
        # In another time namespace ticks are counted from another instant.
        place = f"{boot} {_namespace('pid')} {_namespace('time')}"
        return Process(place, pid, _Status(pid).started)
    except (OSError, ValueError):
        return None


def is_dead(process: Process, here: Process) -> bool:
    """True only if it has ended for certain, as seen from `here`, this process.

    A zombie has ended: its files are closed. A stopped process lives.
    """
    if process.place != here.place:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is somebody else's, so there is one
    try:
        status = _Status(process.pid)
    except (OSError, ValueError):
        return False  # it ended just now, or /proc hides other users' processes
    return status.started != process.started or status.is_gone


class _Status:
    """What /proc/<pid>/stat says, see proc(5)."""

    def __init__(self, pid: int) -> None:
        # The name comes second, in parentheses, and may hold spaces and parentheses.
        _, found, rest = _read(f"/proc/{pid}/stat").rpartition(")")
        fields = rest.split()
        if not found or len(fields) < 20:
            raise ValueError("not what proc(5) says")
        self.started = int(fields[19])
        # The first thread of a process may end before the others.
        self.is_gone = fields[0] in _GONE and int(fields[17]) <= _SINGLE_THREAD


def _is_proc_ours(pid: int) -> bool:
    """Whether /proc shows the processes by the pids they have for us, and not for a namespace
    around ours."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1:] == [str(pid)]
    return False


def _namespace(name: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino
    except FileNotFoundError:
        return 0  # this kernel has only one


def _read(path: str) -> str:
    # Without buffers and a text layer it takes half the time, and that under the write lock. The
    # name of a process may be no text.
    with open(path, "rb", buffering=0) as file:
        return file.read().decode(errors="replace")
