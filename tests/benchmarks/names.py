"""What the cases are called: `plan` measures by these names, `figures` reads by them."""

from __future__ import annotations

from typing import Final

from .files import Durability

OURS: Final = "trio_jobs"
BARE: Final = "bare Trio"
RAW: Final = "raw SQLite"
INSERTS: Final = "enqueue: stdlib sqlite3, one INSERT a transaction, FULL"
HUEY: Final = "SqliteHuey"

FULL: Final[Durability] = "full"
NORMAL: Final[Durability] = "normal"

P50: Final = "p50 ms"
P99: Final = "p99 ms"
MAX: Final = "max ms"
P50_RETURNED: Final = "p50 ms from the return"
P99_RETURNED: Final = "p99 ms from the return"
IDLE_CPU: Final = "idle CPU %"
SLOWEST: Final = "slowest's share"
GROWTH: Final = "growth MB"


def drain(who: str, at_a_time: int, durability: Durability) -> str:
    return f"drain: {who}, {at_a_time} at a time, {durability.upper()}"


def bare(at_a_time: int) -> str:
    return f"drain: {BARE}, {at_a_time} at a time"


def raw(durability: Durability) -> str:
    return f"drain: {RAW}, finish and claim in batches of 100, {durability.upper()}"


def enqueue(who: str, at_a_time: int, durability: Durability) -> str:
    return f"enqueue: {who}, {at_a_time} at a time, {durability.upper()}"


WITH_CHECKPOINT: Final = f"drain: {OURS}, 100 at a time, NORMAL, handler with a checkpoint"
WHILE_IDLE: Final = "idle"
AT_1000: Final = "1,000 jobs/s offered"


def latency(load: str, durability: Durability) -> str:
    return f"enqueue to start: {load}, {durability.upper()}"


def wake(durability: Durability) -> str:
    return f"enqueue to start in another process, {durability.upper()}"


IDLE: Final = "idle runner process"


def life_cycle(table: str) -> str:
    return f"life cycle: {table}"


def claim(table: str) -> str:
    return f"enqueue to start, idle, NORMAL: {table}"


NONE: Final = "nothing else in the table"
FINISHED: Final = "many finished"
LATER: Final = "many scheduled for later"


def processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}, 100 workers each, FULL"


LATENESS: Final = "1 ms ticker beside a drain, 100 workers, FULL"
BARE_LATENESS: Final = "1 ms ticker beside bare Trio, 100 tasks"
MEMORY: Final = "memory of one runner"
