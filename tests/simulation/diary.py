"""What a real process tells of itself, written down so that it survives its writer.

Each word is one line of JSON, written whole and appended to a file of this process alone. What is
missing at its end did not happen, or nobody knows; there are no holes, for the kernel has each
line before the process does the next thing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trio_jobs._identity import this_process


class Diary:
    """What this process tells of itself."""

    def __init__(self, path: Path, name: str) -> None:
        # Not buffered: what was said is in the kernel's hands when the process is killed.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._name = name

    def say(self, event: str, **fields: object) -> None:
        line = {"at": time.time_ns(), "process": self._name, "event": event, **fields}
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._file, data) != len(data):
            os.abort()  # its evidence is incomplete from here on, so it must not go on

    def say_started(self) -> None:
        here = this_process()
        identity = None if here is None else (here.place, here.pid, here.started)
        self.say("started", identity=identity)

    def close(self) -> None:
        os.close(self._file)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """All that was said. There is no file if the process was killed before its first word."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
