"""What settings have to be: each check returns the value, or raises and names it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Final

_MAX_PRIORITY: Final = 2**31


def seconds(value: float, name: str, *, least: float = 0, above: bool = False) -> float:
    """A finite number of seconds from `least` on (`above`: more than that), or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < least or (above and number == least):
        bound = f"more than {least}" if above else f"{least} or more"
        raise ValueError(f"{name} must be finite and {bound}, not {number}")
    return number


def text(value: str, name: str) -> str:
    """A string that is not empty and can be stored, or an error that names it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if not value or "\0" in value:
        raise ValueError(f"{name} must not be empty or have a NUL character")
    return storable(value, name)


def storable(value: str, name: str) -> str:
    """Refuse what has no UTF-8 form (lone surrogates)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has a lone surrogate, which cannot be stored") from None
    return value


def priority_of(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"priority must be an int, not {type(value).__name__}")
    if not -_MAX_PRIORITY <= value < _MAX_PRIORITY:
        raise ValueError("priority must fit in 32 bits")
    return value


def is_async(fn: object) -> bool:
    return _is(inspect.iscoroutinefunction, fn)


def is_async_generator(fn: object) -> bool:
    return _is(inspect.isasyncgenfunction, fn)


def _is(sort: Callable[[object], bool], fn: object) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return sort(fn) or (callable(fn) and sort(type(fn).__call__))


def refuses_one_argument(fn: Callable[..., object]) -> str | None:
    """Why it cannot be called with one argument; None if it can, or if that cannot be told."""
    try:
        # The signature of what is called: that of a wrapped function may be another.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(object())
    except TypeError as error:
        return str(error)
    return None


def name_of(fn: object) -> str:
    """What to call a function, a partial or any other object in a message."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__)
