"""What happens to real processes in one round, all of it drawn from the seed beforehand.

The instants are as exact as a busy machine lets them be: with one seed the same things are done
in the same order, and the processes answer a little differently each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from .child import Driver, Mode

RoundKind: TypeAlias = Literal["kill", "interrupt", "terminate", "stop", "full"]

KINDS: Final[tuple[RoundKind, ...]] = get_args(RoundKind)

SYNCHRONOUS: Final[tuple[Literal["full", "normal"], ...]] = ("full", "normal")


@dataclass(frozen=True)
class MemberPlan:
    """One of the processes on the file; when it ends it is started again as another life."""

    name: str
    mode: Mode
    driver: Driver
    synchronous: Literal["full", "normal"]


@dataclass(frozen=True)
class Moment:
    """Something that is done to one process, or with no `member` to all."""

    at: float
    """Seconds since the start of the round."""
    member: int | None
    action: Literal["kill", "signal", "freeze", "fill"]
    seconds: float = 0.0
    """How long it lasts: frozen, full; or until the signal is sent once more, if not 0."""


@dataclass(frozen=True)
class Plan:
    kind: RoundKind
    seed: int
    members: tuple[MemberPlan, ...]
    moments: tuple[Moment, ...]
    seconds: float
    """How long the chaos lasts."""
    lease: float
    poll: float
    disk: Literal["small", "limited"] = "small"
    """How the disk gets full: it is one, or no file may grow over a limit. Where a small disk
    cannot be made it is the limit, too."""
    ends_in_order: bool = False
    """After the chaos the processes are stopped, not killed."""

    @property
    def ballast(self) -> int:
        return 60_000 if self.kind == "full" else 0


def draw(kind: RoundKind, seed: int) -> Plan:
    dice = random.Random(f"{kind} {seed}")
    lease = dice.uniform(0.5, 1.0)
    seconds = dice.uniform(1.0, 1.6) + (lease if kind == "stop" else 0)
    members = tuple(
        MemberPlan(
            name,
            mode=_mode(kind, dice),
            driver=dice.choice(["sqlite3", "apsw"]),
            synchronous=dice.choice(SYNCHRONOUS),
        )
        for name in "ABCD"[: dice.randrange(2, 5)]
    )
    moments = _moments(kind, dice, len(members), seconds, lease)
    return Plan(
        kind,
        seed,
        members,
        tuple(sorted(moments, key=lambda moment: moment.at)),
        seconds,
        lease,
        poll=dice.uniform(0.05, 0.25),
        disk=dice.choice(["small", "limited"]),
        ends_in_order=kind in ("interrupt", "terminate") or dice.random() < 0.3,
    )


def _mode(kind: RoundKind, dice: random.Random) -> Mode:
    if kind == "interrupt":
        return dice.choice(["scope", "drain", "command", "bare"])
    return dice.choice(["scope", "scope", "drain", "command"])


def _moments(
    kind: RoundKind, dice: random.Random, members: int, seconds: float, lease: float
) -> list[Moment]:
    if kind == "full":
        return _full(dice, seconds)
    moments = []
    # Somebody must be there to take what the frozen ones have.
    for member in range(1 if kind == "stop" else 0, members):
        at = dice.uniform(0.02, 0.4)
        while at < seconds:
            if kind == "kill":
                moments.append(Moment(at, member, "kill"))
                at += dice.uniform(0.03, 0.5)
            elif kind == "stop":
                frozen = dice.uniform(1.1, 1.8) * lease
                moments.append(Moment(at, member, "freeze", frozen))
                at += frozen + dice.uniform(0.1, 0.4)
            else:
                again = dice.uniform(0.01, 0.2) if dice.random() < 0.3 else 0
                moments.append(Moment(at, member, "signal", again))
                at += dice.uniform(0.3, 0.9)
    return moments


def _full(dice: random.Random, seconds: float) -> list[Moment]:
    moments = []
    at = dice.uniform(0.2, 0.4)
    while at < seconds:
        full = dice.uniform(0.1, 0.6)
        moments.append(Moment(at, None, "fill", full))
        at += full + dice.uniform(0.1, 0.3)
    return moments
