"""Makes the order in which Trio runs its tasks a function of a seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import trio._core._run as trio_run


@contextlib.contextmanager
def scheduling(seed: int) -> Iterator[random.Random]:
    """Trio runs tasks in an order that depends on the seed alone; gives a generator of it."""
    assert isinstance(trio_run._r, random.Random)
    assert isinstance(trio_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    before = trio_run._r.getstate(), trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._r.seed(seed)
    vars(trio_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    try:
        yield random.Random(seed)
    finally:
        trio_run._r.setstate(before[0])
        vars(trio_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = before[1]
