"""Makes a failing plan small: takes out what it fails without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .plan import Plan
from .runs import Result, run


def shrink(failed: Result, note: Callable[[int], None] = lambda pieces: None) -> Result:
    """The smallest run found that breaks one of the same promises. `note` hears how many pieces
    are left."""
    promises = {violation.invariant for violation in failed.violations}
    best = failed

    def fails(pieces: Sequence[str]) -> bool:
        nonlocal best
        result = run(failed.plan.only(pieces))
        if promises.isdisjoint(violation.invariant for violation in result.violations):
            return False
        best = result
        note(len(pieces))
        return True

    # What clients do first: without jobs most faults are about nothing.
    smallest(_in_order(failed.plan), fails)
    return best


def _in_order(plan: Plan) -> list[str]:
    return sorted(plan.pieces(), key=lambda piece: "sfev".index(piece[0]))


def smallest(pieces: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """What is left when nothing more can be taken out: halves first, then ever smaller parts."""
    left = list(pieces)
    size = len(left) // 2
    while size:
        start = 0
        while start < len(left):
            without = left[:start] + left[start + size :]
            if fails(without):
                left = without
            else:
                start += size
        size //= 2
    return left
