"""Typed values as stored bytes: what fits comes back equal, what does not is named, not shown."""

from __future__ import annotations

import enum
import itertools
import math
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePath, PurePosixPath
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID

import attrs
import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from trio_jobs._codec import Codec, decode_plain, safe_text
from trio_jobs._errors import PayloadError

T = TypeVar("T")
CANARY = "hunter2-XYZ"
PLENTY = 1_000_000


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Item:
    path: str
    size: int = 0


@dataclass
class Order:
    items: list[Item] = field(default_factory=list)
    color: Color | None = None
    note: str | None = None
    weight: float | None = None
    extra: Any = None


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Slotted:
    _hidden: int
    shown: int = 5


@dataclass
class Box(Generic[T]):
    content: T
    more: list[T] = field(default_factory=list)


@dataclass
class Stamp:
    text: str
    score: float | None = field(default=None, compare=False)


@dataclass(eq=False)
class Unequal:
    text: str


@attrs.frozen
class Mail:
    to: str
    attached: tuple[bytes, ...] = ()


@attrs.define
class Secretive:
    _token: str = ""


class Point(NamedTuple):
    x: int
    item: Item | None = None


class Options(TypedDict):
    depth: int
    item: NotRequired[Item]


class Loose(TypedDict, total=False):
    depth: int


class Circle(msgspec.Struct, tag="circle", rename="camel", omit_defaults=True):
    line_width: int = 1
    item: Item | None = None


class Square(msgspec.Struct, tag="square"):
    side: int


class Row(msgspec.Struct, array_like=True, tag=True):
    number: int
    item: Item | None = None


class Cell(msgspec.Struct, array_like=True, tag=True):
    number: int


class Patch(msgspec.Struct):
    note: str | msgspec.UnsetType = msgspec.UNSET
    words: list[Any] = []


class Column(msgspec.Struct, array_like=True):
    item: Item | None = None


@dataclass
class Guarded:
    word: str

    def __post_init__(self) -> None:
        if self.word.startswith("value:"):
            raise ValueError(f"bad {self.word}")
        if self.word.startswith("key:"):
            raise KeyError(self.word)
        if self.word.startswith("msgspec:"):
            raise msgspec.ValidationError(f"Expected something else than {self.word}")
        if self.word.startswith("silent:"):
            raise Unspeakable
        if self.word.startswith("deep:"):
            raise RecursionError(self.word)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError(CANARY)


@dataclass
class Guards:
    all: list[Guarded]


OldUnion = Union[int, str, None]  # noqa: UP007 - not the same thing as `int | str | None`

ROUND_TRIPS: list[tuple[Any, Any]] = [
    (None, None),
    (bool, True),
    (int, -(2**63) - 1),
    (int, 10**100),
    (float, 0.1),
    (float, -0.0),
    (str, "é\0\n\u2028\ufffe\U0001f600"),
    (OldUnion, None),
    (OldUnion, "1"),
    (int | float, 2.0),
    (int | str | None, "1"),
    (Item | None, Item("a")),
    (list[str], []),
    (tuple[int, ...], (1, 2)),
    (tuple[Item, bytes], (Item("a"), b"\xff")),
    (set[int], {3, 1, 2}),
    (frozenset[Item], frozenset({Item("a"), Item("b", 2)})),
    (dict[str, int], {"a": 1, "": 2}),
    (dict[int, Color], {1: Color.RED}),
    (dict[Color, int], {Color.RED: 1}),
    (dict[date | int, int], {date(2024, 2, 29): 1, 5: 2}),
    (dict[Path, int], {Path("a"): 1}),
    (Color, Color.BLUE),
    (Level, Level.LOW),
    (Literal["a", 1, None], 1),
    (datetime, datetime(2024, 1, 2, 3, 4, 5, 6)),
    (datetime, datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=-3, minutes=30)))),
    (date, date(1, 1, 1)),
    (time, time(23, 59, 59, 999999)),
    (timedelta, timedelta(days=-1, microseconds=7)),
    (timedelta, timedelta.max),
    (UUID, UUID(int=7)),
    (Decimal, Decimal("1.50")),
    (Decimal, Decimal("1E+400")),
    (Path, Path("/tmp/ä")),
    (PurePath, PurePath("a/b")),
    (PurePosixPath, PurePosixPath("a/b")),
    (list[Path | None], [Path("a"), None]),
    (Item, Item("a")),
    (Order, Order([Item("a", 1)], Color.RED, "null nan inf", 1.5, {"any": [1, None]})),
    (Order, Order()),
    (Tree, Tree("a", [Tree("b", [Tree("c")]), Tree("d")])),
    (Slotted, Slotted(_hidden=3)),
    (Box[int], Box(1, [2])),
    (Box[Item], Box(Item("a"), [Item("b")])),
    (Mail, Mail("a", (b"\0\xff",))),
    (Point, Point(1, Item("a"))),
    (list[Point], [Point(1)]),
    (Options, {"depth": 1, "item": Item("a")}),
    (Loose, {}),
    (Circle, Circle()),
    (Circle | Square, Circle(2, Item("a"))),
    (Circle | Square | None, Square(4)),
    (list[Row | int], [Row(1, Item("a")), 5]),
    (Column, Column(Item("a"))),
    (object, {"a": [1, 2.5, None, "x"]}),
    (Stamp, Stamp("a", None)),
    (list[str], ["NaN", "Infinity", "null"]),
    (Patch, Patch(words=["NaN", None])),
    (dict[str, Any], {"nan": None, "inf": 1}),
    (Annotated[int, msgspec.Meta(ge=0, title="count")], 5),
]


@pytest.mark.parametrize(("type_", "value"), ROUND_TRIPS)
def test_a_value_that_fits_comes_back_equal_and_of_its_type(type_: Any, value: Any) -> None:
    codec = Codec(type_, "value")

    back = codec.decode(codec.encode(value, PLENTY))

    assert back == value
    assert type(back) is type(value)


@dataclass
class Everything:
    truth: bool
    whole: int
    real: float
    text: str
    raw: bytes
    moment: datetime
    day: date
    hour: time
    span: timedelta
    uuid: UUID
    amount: Decimal
    color: Color
    word: Literal["a", "b"]
    union: int | str | None
    path: Path
    pair: tuple[int, str]
    many: frozenset[int]
    table: dict[int, list[str]]
    point: Point
    shape: Circle | Square


OFFSETS = st.builds(lambda m: timezone(timedelta(minutes=m)), st.integers(-23 * 60, 23 * 60))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
EVERYTHING = st.builds(
    Everything,
    real=FINITE,
    moment=st.datetimes(timezones=st.none() | OFFSETS),
    hour=st.times(),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    path=st.builds(Path, st.text()),
    point=st.builds(Point, st.integers(), st.builds(Item, st.text(), st.integers())),
    shape=st.builds(Circle, st.integers()) | st.builds(Square, st.integers()),
)


@given(EVERYTHING)
def test_any_value_of_any_supported_type_comes_back_equal(value: Everything) -> None:
    codec = Codec(Everything, "value")

    assert codec.decode(codec.encode(value, PLENTY)) == value


# Types that cannot be stored


@dataclass
class Connected:
    connection: socket.socket


@dataclass
class Dangling:
    item: NoSuchName  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("type_", "reason"),
    [
        (socket.socket, "`socket`"),
        (list[Connected], "`socket`"),
        (Callable[[int], int], "`Callable`"),
        (dict[str, Callable[[], None]], "`Callable`"),
        (complex, "`complex`"),
        (Item | Tree, "more than one dataclass"),
        (Path | str, "custom type"),
        (dict[Item, int], "`DataclassType`"),
        (dict[tuple[int, ...], int], "`VarTupleType`"),
        (dict[int | bool, int], "`BoolType`"),
        (list[dict[None, int]], "`NoneType`"),
        (msgspec.Raw, "`RawType`"),
        (Secretive, "`_token`"),
        (Dangling, "'NoSuchName' is not defined"),
        ("int", "''int'' is not supported"),
    ],
)
def test_a_type_that_json_cannot_hold_is_refused_at_once(type_: Any, reason: str) -> None:
    with pytest.raises(TypeError) as caught:
        Codec(type_, "payload of kind 'x'")

    assert "payload of kind 'x'" in str(caught.value)
    assert reason in str(caught.value)


def test_an_annotation_that_only_a_function_can_see_is_refused_at_once() -> None:
    @dataclass
    class Inner:
        x: int

    @dataclass
    class Outer:
        inner: Inner

    with pytest.raises(TypeError, match=r"Outer.*'Inner' is not defined at the top of its module"):
        Codec(Outer, "payload of kind 'x'")


# Values that do not fit


def refusal(call: Callable[[], object]) -> str:
    """The message of the `PayloadError` that the call must raise, and that hides every canary."""
    with pytest.raises(PayloadError) as caught:
        call()
    shown = [str(caught.value), repr(caught.value), *traceback.format_exception(caught.value)]
    assert CANARY not in "".join(shown)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("type_", "value", "where"),
    [
        (Order, Order([Item("a"), Item(CANARY, CANARY)]), "$.items[1].size: Expected `int`, got"),  # type: ignore[arg-type]
        (Order, Order([Item(5)]), "$.items[0].path: Expected `str`, got `int`"),  # type: ignore[arg-type]
        (Order, Order(color=CANARY), "$.color: Not one of the allowed values"),  # type: ignore[arg-type]
        (Item, {"path": CANARY}, "$: Expected `Item`, got `dict`"),
        (Box[int], {"content": 1}, "$: Expected `Box`, got `dict`"),
        (Mail, {"to": CANARY}, "$: Expected `Mail`, got `dict`"),
        (Square, {"type": "square", "side": 1}, "$: Expected `Square`, got `dict`"),
        (Point, (1, None), "$: Expected `Point`, got `tuple`"),
        (Color, "red", "$: Expected `Color`, got `str`"),
        (Path, "a", "$: Expected `Path`, got `str`"),
        (None, CANARY, "$: Expected `null`, got `str`"),
        (Literal["a", "b"], CANARY, "$: Not one of the allowed values"),
        (dict[str, int], {CANARY: CANARY}, "$[...]: Expected `int`, got `str`"),
        (dict[int, int], {CANARY: 1}, "a key of $: Expected `int`, got `str`"),
        (int, True, "$: Expected `int`, got `bool`"),
        (tuple[int, int], (1, 2, 3), "$: Expected `array` of length 2"),
        (Annotated[str, msgspec.Meta(max_length=3)], CANARY, "$: Expected `str` of length <= 3"),
        (Circle | Square, {"type": CANARY}, "$.type: Not one of the allowed values"),
        (list[Options], [{}], "$[0]: Object missing required field `depth`"),
        # what JSON would spell like a str
        (Item, Item(CANARY.encode()), "$.path: Expected `str`, got `bytes`"),  # type: ignore[arg-type]
        (Item, Item(date(2024, 1, 1)), "$.path: Expected `str`, got `date`"),  # type: ignore[arg-type]
        (Unequal, Unequal(CANARY.encode()), "$.text: Expected `str`, got `bytes`"),  # type: ignore[arg-type]
        (list[UUID], [str(UUID(int=7))], "$[0]: Expected `uuid`, got `str`"),
        (dict[str, int], {1: 2}, "a key of $: Expected `str`, got `int`"),
        # what JSON has no words for
        (Order, Order(extra={"a": [object()]}), "$.extra[...][0]: This `object` cannot be stored"),
        (object, {"a": {1: {None: CANARY}}}, "$[...][...]: This `dict` cannot be stored"),
        (Order, Order(extra=Item), "$.extra: This `type` cannot be stored"),
        (Item, Item("\ud800" + CANARY), "$.path: A lone surrogate cannot be stored"),
        (Path, Path("\udcff" + CANARY), "$: A lone surrogate cannot be stored"),
        (Mail, Mail("\ud800"), "$.to: A lone surrogate cannot be stored"),
        (list[int], [10**5000], "$[0]: This `int` cannot be stored"),
        # unknown fields on the way in
        (Loose, {"depth": 1, CANARY: 2}, "$[...]: Unknown field"),
        (Loose, {"depth": 1, "width": 2}, "$.width: Unknown field"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_path(
    type_: Any, value: Any, where: str
) -> None:
    codec = Codec(type_, "payload of kind 'x'")

    message = refusal(lambda: codec.encode(value, PLENTY))

    assert message.startswith("payload of kind 'x' is not valid")
    assert where in message


@pytest.mark.parametrize(
    ("type_", "value", "arrives"),
    [
        (tuple[int, ...], [1, 2], (1, 2)),
        (list[int], (1, 2), [1, 2]),
        (float, 1, 1.0),
        (Order, Order(items=[{"path": "a"}]), Order([Item("a")])),  # type: ignore[list-item]
        (Item, Item(Path("a")), Item("a")),  # type: ignore[arg-type]
        (object, {1: (2, date(2024, 1, 1))}, {"1": [2, "2024-01-01"]}),
    ],
)
def test_what_json_writes_alike_passes_and_arrives_as_the_type_says(
    type_: Any, value: Any, arrives: Any
) -> None:
    codec = Codec(type_, "value")

    back = codec.decode(codec.encode(value, PLENTY))

    assert back == arrives
    assert type(back) is type(arrives)


NOT_FINITE: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    Decimal("NaN"),
    Decimal("sNaN7"),
    Decimal("-Infinity"),
]
HASHABLE = [number for number in NOT_FINITE if not Decimal(number).is_snan()]


class Limit(enum.Enum):
    NONE = math.inf


@pytest.mark.parametrize("number", NOT_FINITE, ids=str)
@pytest.mark.parametrize(
    ("type_", "wrap", "path"),
    [
        (object, lambda n: n, "$"),
        (float, lambda n: n, "$"),
        (float | None, lambda n: n, "$"),
        (list[object], lambda n: [1.0, [None, (n,)]], "$[1][1][0]"),
        (dict[str, Any], lambda n: {CANARY: n}, "$[...]"),
        (Order, lambda n: Order(weight=n), "$.weight"),
        (Order, lambda n: Order(extra=Box(n)), "$.extra.content"),
        (Order, lambda n: Order(extra=Mail(n)), "$.extra.to"),
        (Order, lambda n: Order(extra=Square(n)), "$.extra.side"),
        (Stamp, lambda n: Stamp("a", n), "$.score"),
        (list[Item], lambda n: [Item("a", n)], "$[0].size"),
    ],
)
def test_nan_and_infinity_are_refused_wherever_they_hide_p3(
    number: Any, type_: Any, wrap: Callable[[Any], object], path: str
) -> None:
    codec = Codec(type_, "result")

    message = refusal(lambda: codec.encode(wrap(number), PLENTY))

    assert message == f"result is not valid at {path}: NaN and infinity cannot be stored as JSON"


@pytest.mark.parametrize("number", HASHABLE, ids=str)
@pytest.mark.parametrize(
    ("type_", "wrap", "path"),
    [
        (dict[Any, int], lambda n: {n: 1}, "$[...]"),
        (dict[float, int] | None, lambda n: {n: 1}, "$[...]"),
        (set[Any], lambda n: {n}, "$[0]"),
    ],
)
def test_nan_and_infinity_are_refused_as_keys_and_members_p3(
    number: Any, type_: Any, wrap: Callable[[Any], object], path: str
) -> None:
    codec = Codec(type_, "result")

    message = refusal(lambda: codec.encode(wrap(number), PLENTY))

    assert message == f"result is not valid at {path}: NaN and infinity cannot be stored as JSON"


@pytest.mark.parametrize(
    ("type_", "value", "path"),
    [
        (dict[str | int, int], {1: 1, "1": 2}, "$"),
        (Any, {"a": [{2: None, "2": None}]}, "$[...][0]"),
    ],
)
def test_keys_that_are_the_same_as_json_are_refused_p3(type_: Any, value: Any, path: str) -> None:
    """One of the two would be gone."""
    codec = Codec(type_, "result")

    message = refusal(lambda: codec.encode(value, PLENTY))

    assert message == f"result is not valid at {path}: Two keys are the same as JSON"


@pytest.mark.parametrize("type_", [datetime, time])
def test_a_time_zone_with_seconds_is_refused_p3(type_: Any) -> None:
    """They would be rounded away: it would arrive as another instant."""
    value = datetime(1900, 1, 1, tzinfo=timezone(timedelta(minutes=19, seconds=32)))
    codec = Codec(list[type_], "payload")

    message = refusal(
        lambda: codec.encode([value if type_ is datetime else value.timetz()], PLENTY)
    )

    assert message.endswith("at $[0]: A time zone with seconds cannot be stored as JSON")


def test_a_member_of_an_enum_that_is_infinite_is_refused_p3() -> None:
    codec = Codec(list[object], "result")

    assert "$[0]: NaN and infinity" in refusal(lambda: codec.encode([Limit.NONE], PLENTY))


def test_a_value_over_the_limit_is_refused_with_both_sizes_p8() -> None:
    codec = Codec(list[str], "payload of kind 'x'")
    value = [CANARY * 10]
    size = len(codec.encode(value, PLENTY))

    message = refusal(lambda: codec.encode(value, size - 1))

    assert message == f"payload of kind 'x' takes {size} bytes, and the limit is {size - 1}"
    assert len(codec.encode(value, size)) == size


def test_a_value_over_the_limit_is_not_even_looked_at_p8() -> None:
    codec = Codec(Order, "payload of kind 'x'")

    message = refusal(lambda: codec.encode(Order(weight=math.nan, color=5), 10))  # type: ignore[arg-type]

    assert "the limit is 10" in message


@pytest.mark.parametrize("how", ["value:", "key:", "msgspec:", "silent:", "deep:"])
def test_what_a_post_init_raises_is_refused_without_its_words_s1(how: str) -> None:
    codec = Codec(Guards, "payload of kind 'x'")
    guarded = Guarded("fine")
    guarded.word = how + CANARY

    encoding = refusal(lambda: codec.encode(Guards([guarded]), PLENTY))
    decoding = refusal(lambda: codec.decode(b'{"all":[{"word":"%s"}]}' % guarded.word.encode()))

    assert encoding == decoding
    assert encoding.startswith("payload of kind 'x' is ")
    if how == "value:":
        assert encoding == "payload of kind 'x' is not valid at $.all[0]"


@dataclass
class Touchy:
    word: str

    def __eq__(self, other: object) -> bool:
        raise LookupError(self.word)


def test_what_comparing_raises_is_refused_without_its_words_s1() -> None:
    codec = Codec(Touchy, "payload")

    assert refusal(lambda: codec.encode(Touchy(CANARY), PLENTY)) == "payload is not valid"


def test_a_value_nested_in_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    codec = Codec(list[Any], "payload")

    assert refusal(lambda: codec.encode(endless, PLENTY)) == "payload is nested too deeply"


def test_an_interrupt_is_no_payload_error() -> None:
    @dataclass
    class Interrupted:
        def __post_init__(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Codec(Interrupted, "payload").decode(b"{}")


# Bytes that do not fit


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not json", "JSON is malformed: invalid character (byte 4)"),
        (b"\xff\x00", "JSON is malformed: invalid character (byte 0)"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"", "Input data was truncated"),
        (b'["hunter2-XYZ', "Input data was truncated"),
        (b'["hunter2-XYZ\xff"]', "is not valid"),
        (b'["hunter2-XYZ"] "hunter2-XYZ"', "JSON is malformed: trailing characters"),
        (b'"\\ud800 hunter2-XYZ"', "JSON is malformed: "),
        (b"NaN", "JSON is malformed"),
        (b"1e999", "Number out of range"),
        (b"1" * 5_000, "Integer value out of range"),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize(
    "decode", [Codec(object, "stored value").decode, decode_plain], ids=["codec", "plain"]
)
def test_bytes_that_are_not_json_are_refused_p1(
    decode: Callable[[bytes], object], data: bytes, reason: str
) -> None:
    message = refusal(lambda: decode(data))

    assert message.startswith("stored value is ")
    assert reason in message


@pytest.mark.parametrize(
    ("type_", "data", "where"),
    [
        (Item, b'{"path": 5}', "$.path: Expected `str`, got `int`"),
        (Item, b"{}", "$: Object missing required field `path`"),
        (Item, b"[" * 100_000, "$: Expected `object`, got `array`"),
        (Order, b'{"color": "hunter2-XYZ"}', "$.color: Not one of the allowed values"),
        (list[Level], b"[7]", "$[0]: Not one of the allowed values"),
        (Literal[1, 2], b"7", "$: Not one of the allowed values"),
        (Circle | Square, b'{"type": "hunter2-XYZ"}', "$.type: Not one of the allowed values"),
        (list[Path], b"[5]", "$[0]: Expected `Path`, got `int`"),
        (dict[Color, int], b'{"hunter2-XYZ": 1}', "a key of $: Not one of the allowed values"),
        (date, b'"hunter2-XYZ"', "$: Invalid RFC3339 encoded date"),
        (UUID, b'"hunter2-XYZ"', "$: Invalid UUID"),
        (bytes, b'"hunter2-XYZ"', "$: Invalid base64 encoded string"),
        (timedelta, b'"P1Y"', "$: Only units 'D', 'H', 'M', and 'S' are supported"),
        (Decimal, b'"hunter2-XYZ"', "$: Invalid decimal string"),
        (Color, b'"x - at `$.hunter2-XYZ`"', "$: Not one of the allowed values"),
    ],
)
def test_bytes_that_do_not_fit_are_refused_with_the_path_p1(
    type_: Any, data: bytes, where: str
) -> None:
    codec = Codec(type_, "payload of kind 'x'", allow_raw=False)

    message = refusal(lambda: codec.decode(data))

    assert message.startswith(f"payload of kind 'x' is not valid at {where}")


@pytest.mark.parametrize(
    ("type_", "data", "path"),
    [
        (Item, b'{"path": "a", "width": 1}', "$.width"),
        (Item, b'{"path": "a", "size": 0, "hunter2-XYZ": 1}', "$[...]"),
        (Item, b'{"path": "a", "%s": 1}' % (b"x" * 101), "$[...]"),
        (Mail, b'{"to": "a", "cc": 1}', "$.cc"),
        (Options, b'{"depth": 1, "width": 1}', "$.width"),
        (Square, b'{"type": "square", "side": 1, "width": 1}', "$.width"),
        (Circle, b'{"line_width": 1}', "$.line_width"),
        (Order, b'{"items": [{"path": "a"}, {"path": "a", "x": 1}]}', "$.items[1].x"),
        (Tree, b'{"name": "a", "children": [{"name": "b", "x": 1}]}', "$.children[0].x"),
        (Box[Item], b'{"content": {"path": "a", "x": 1}}', "$.content.x"),
        (dict[str, Item], b'{"hunter2-XYZ": {"path": "a", "x": 1}}', "$[...].x"),
        (Item | None, b'{"path": "a", "x": 1}', "$.x"),
        (int | list[Item] | str, b'[{"path": "a", "x": 1}]', "$[0].x"),
        (tuple[int, Item], b'[1, {"path": "a", "x": 1}]', "$[1].x"),
        (tuple[Item, ...], b'[{"path": "a", "x": 1}]', "$[0].x"),
        (frozenset[Item], b'[{"path": "a", "x": 1}]', "$[0].x"),
        (Point, b'[1, {"path": "a", "x": 1}]', "$[1].x"),
        (Circle | Square, b'{"type": "square", "side": 1, "lineWidth": 1}', "$.lineWidth"),
        (Circle | Square, b'{"type": "circle", "item": {"path": "a", "x": 1}}', "$.item.x"),
        (Row, b'["Row", 1, null, 5]', "$[3]"),
        (Row | Item, b'["Row", 1, {"path": "a", "x": 1}]', "$[2].x"),
        (Column, b"[null, 5]", "$[1]"),
        (Annotated[Item, msgspec.Meta(title="t")], b'{"path": "a", "x": 1}', "$.x"),
    ],
)
def test_an_unknown_field_is_refused_wherever_it_is(type_: Any, data: bytes, path: str) -> None:
    codec = Codec(type_, "payload of kind 'x'")

    message = refusal(lambda: codec.decode(data))

    assert message == f"payload of kind 'x' is not valid at {path}: Unknown field"


@pytest.mark.parametrize(
    ("type_", "data", "value"),
    [
        (Item, b' {"size": 1, "path": "a"}', Item("a", 1)),
        (Item, b'{"path": "a"}', Item("a")),
        (Item, b'{"path": "a", "path": "b"}', Item("b")),
        (Order, b'{"extra": {"x": {"y": 1}}}', Order(extra={"x": {"y": 1}})),
        (Any | Item, b'{"x": 1}', {"x": 1}),
        (Loose, b"{}", {}),
        (set[Item] | None, b'[{"path": "a"}, {"path": "a"}]', {Item("a")}),
        (Circle, b'{"lineWidth": 5}', Circle(5)),
        (Circle | Square, b'{"lineWidth": 5, "type": "circle"}', Circle(5)),
        (Row, b'["Row", 1]', Row(1)),
        (Cell | Row, b'["Row", 1, {"path": "a"}]', Row(1, Item("a"))),
        (list[Point], b"[[1]]", [Point(1)]),
        (dict[str, Tree] | list[int], b'{"a": {"name": "b"}}', {"a": Tree("b")}),
    ],
)
def test_bytes_that_another_program_wrote_differently_are_read(
    type_: Any, data: bytes, value: object
) -> None:
    codec = Codec(type_, "value")

    assert codec.decode(data) == value


LEAVES = st.none() | st.booleans() | st.integers() | FINITE | st.just(CANARY)
NAMES = st.sampled_from([CANARY, "items", "path", "size", "color", "note", "extra", "type", "side"])
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner, max_size=4)
)


@given(JSON)
def test_no_error_of_decoding_contains_a_value_s1(value: object) -> None:
    data = msgspec.json.encode(value)

    for type_ in (Order, list[Order], Circle | Square, dict[str, Item], list[Point], Literal["a"]):
        codec = Codec(type_, "payload")
        try:
            codec.decode(data)
        except PayloadError:
            refusal(lambda codec=codec: codec.decode(data))  # type: ignore[misc]


@given(JSON, JSON, JSON, JSON)
def test_no_error_of_encoding_contains_a_value_s1(a: Any, b: Any, c: Any, d: Any) -> None:
    codec = Codec(Order, "payload")
    value = Order([Item(a, b)], c, d, b, {CANARY: [a, object()]})

    refusal(lambda: codec.encode(value, PLENTY))


# Raw bytes


def test_a_payload_of_bytes_is_stored_as_it_is() -> None:
    codec = Codec(bytes, "payload of kind 'x'")

    assert codec.raw
    assert codec.encode(b"\xff{", 2) == b"\xff{"
    assert codec.decode(b"\xff{") == b"\xff{"


@pytest.mark.parametrize("value", [bytearray(b"a"), memoryview(b"a"), CANARY])
def test_a_payload_of_bytes_takes_nothing_like_bytes(value: object) -> None:
    message = refusal(lambda: Codec(bytes, "payload").encode(value, PLENTY))

    assert message == f"payload is not valid at $: Expected `bytes`, got `{type(value).__name__}`"


def test_a_payload_of_bytes_has_a_limit_too_p8() -> None:
    message = refusal(lambda: Codec(bytes, "payload").encode(b"abc", 2))

    assert message == "payload takes 3 bytes, and the limit is 2"


@pytest.mark.parametrize("type_", [bytes | None, list[bytes], str])
def test_only_bytes_themselves_are_raw(type_: Any) -> None:
    assert not Codec(type_, "payload").raw


def test_a_result_of_bytes_is_json_when_raw_is_not_allowed() -> None:
    codec = Codec(bytes, "result", allow_raw=False)

    data = codec.encode(b"\xff", PLENTY)

    assert not codec.raw
    assert data == b'"/w=="'
    assert codec.decode(data) == b"\xff"


# Text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain ä \U0001f600\n\t", "plain ä \U0001f600\n\t"),
        ("a\0b", "a\ufffdb"),
        ("\x1b[31mred\x7f\x9b\r", "\ufffd[31mred\ufffd\ufffd\ufffd"),
        ("\ud800 \udfff", "\ufffd \ufffd"),
        ("", ""),
    ],
)
def test_hostile_text_becomes_harmless_p5(text: str, safe: str) -> None:
    assert safe_text(text) == safe


def test_text_is_cut_at_the_limit_and_says_so_p5() -> None:
    assert safe_text("x" * 10_000) == "x" * 10_000
    assert safe_text("x" * 5_000_000) == "x" * 9_999 + "…"
    assert safe_text("\0" * 6, limit=5) == "\ufffd" * 4 + "…"


@given(st.text(st.characters(), max_size=50))
def test_safe_text_is_always_storable_p5(text: str) -> None:
    safe = safe_text(text, limit=20)

    safe.encode()
    assert len(safe) == min(len(text), 20)
    assert all(
        character.isprintable() or ord(character) > 0x9F or character in "\n\t"
        for character in safe
    )


@dataclass
class Noted:
    to: str
    note: str = field(default="", compare=False)


@attrs.define
class NotedByAttrs:
    to: str
    note: str = attrs.field(default="", eq=False)


@pytest.mark.parametrize("type", [Noted, NotedByAttrs])
def test_a_field_that_is_not_compared_is_checked_like_the_others(type: Any) -> None:
    codec = Codec(list[type], "payload")
    good = codec.encode([type("a", "b")], 100)

    with pytest.raises(PayloadError, match=r"\[0\]\.note: Expected `str`, got `bytes`"):
        codec.encode([type("a", b"bytes")], 100)
    assert codec.decode(good) == [type("a", "b")]
