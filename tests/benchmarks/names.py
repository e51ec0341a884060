"""What the cases are called: `plan` measures by these names, `figures` reads by them."""

from __future__ import annotations

from typing import Final

from .files import Durability

OURS: Final = "trio_jobs"
BARE: Final = "bare Trio"
RAW: Final = "raw SQLite"
SYNC: Final = "enqueue: 4 kB written to a file and synchronized, no SQLite"
INSERTS: Final = "enqueue: stdlib sqlite3, one INSERT a transaction, FULL"
HUEY: Final = "SqliteHuey"
FLOOR: Final = "no library, SQLite in a thread"

FULL: Final[Durability] = "full"
NORMAL: Final[Durability] = "normal"

P50: Final = "p50 ms"
P99: Final = "p99 ms"
MAX: Final = "max ms"
P50_RETURNED: Final = "p50 after ack"
P99_RETURNED: Final = "p99 after ack"
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
ONE_INSERT: Final = "enqueue to start: no job, only stdlib sqlite3, one INSERT, FULL"
WHILE_IDLE: Final = "idle"
AT_1000: Final = "1,000 jobs/s offered"


def latency(load: str, durability: Durability) -> str:
    return f"enqueue to start: {load}, {durability.upper()}"


def floor_latency(load: str) -> str:
    return f"enqueue to start: {FLOOR}, {load}, FULL"


def wake(durability: Durability) -> str:
    return f"enqueue to start: in another process, {durability.upper()}"


IDLE: Final = "idle: runner process"


def life_cycle(table: str) -> str:
    return f"table: life cycle, {table}"


def claim(table: str) -> str:
    return f"table: enqueue to start, {table}"


NONE: Final = "nothing else"
FINISHED: Final = "many finished"
LATER: Final = "many for later"


def processes(count: int) -> str:
    return f"processes: {count}, 100 workers each, FULL"


LATENESS: Final = "lateness: 1 ms ticker beside a drain, 100 workers, FULL"
BARE_LATENESS: Final = "lateness: 1 ms ticker beside bare Trio, 100 at a time"
MEMORY: Final = "memory: one runner, 100 workers, NORMAL"
