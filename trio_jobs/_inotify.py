"""To be woken when a file is written to, by whichever process: Linux's inotify, without a
dependency.

A watch holds no descriptor of the file itself: to open and close a database beside SQLite would
drop the locks this process has on it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_MODIFIED: Final = 0x2
_ENOUGH: Final = 4096
"""Bytes of one read. Equal events that nobody has read are one to the kernel, of 16 bytes."""


class Watch:
    """Readable at `descriptor` when the file was written to since `forget` was called."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def forget(self) -> None:
        try:
            os.read(self.descriptor, _ENOUGH)
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.descriptor)


def open_watch(path: str) -> Watch | None:
    """None where that cannot be had: another system, no such file, or no more instances (the
    kernel allows a user 128, containers often fewer)."""
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL(None)
        descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            return None
        if libc.inotify_add_watch(descriptor, os.fsencode(path), _MODIFIED) < 0:
            os.close(descriptor)
            return None
    except (OSError, AttributeError):  # a C library that has no such call
        return None
    return Watch(descriptor)
