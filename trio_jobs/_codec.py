"""Turns a typed value into the bytes that are stored, and back.

msgspec does the work. This module closes the gaps it leaves: fields nobody declared, NaN
written as null, wrong types that JSON happens to spell the same way, and messages that
repeat what they refuse. An error names fields and types, never a value. Nothing in here
pickles, stores or logs.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final, cast, get_origin
from uuid import UUID

import msgspec
from msgspec import inspect as ms

from ._errors import PayloadError


class Codec:
    """Encodes, decodes and checks the values of one type.

    `what` stands for the value in messages, as in "payload of kind 'resize'". `raw` is true
    for the type `bytes`, which is stored as it is; with `allow_raw=False` it is base64 text
    in JSON, as bytes inside any other type are.

    Raises `TypeError` for a type that JSON cannot hold or whose annotations do not resolve.
    """

    def __init__(self, type: object, what: str, *, allow_raw: bool = True) -> None:
        self.raw = allow_raw and type is bytes
        self._what = what
        self._type: Any = type  # msgspec is declared to want a class; it takes any form
        try:
            self._info = ms.type_info(self._type)
            self._decoder = msgspec.json.Decoder(self._type, dec_hook=_text_to_path)
            types = _types_in(self._info, {}).values()
            for info in types:
                _check_type(info)
        except Exception as error:
            name = getattr(type, "__qualname__", type)
            # An annotation is looked up in its module, not in the function around the class.
            hint = " at the top of its module" if isinstance(error, NameError) else ""
            raise TypeError(f"{what} cannot be of type `{name}`: {error}{hint}") from error
        self._has_fields = any(hasattr(info, "fields") for info in types)
        self._is_compared = all(_is_compared(getattr(info, "cls", None)) for info in types)
        # In JSON a dict looks like a dataclass.
        self._class = bytes if self.raw else _class(self._info)

    def encode(self, value: object, max_bytes: int) -> bytes:
        """The bytes to store; `decode` is sure to take them.

        Some values of another type pass and arrive as the type says: a list for a tuple, an
        int for a float, a dict for a dataclass inside something else.

        Raises `PayloadError` for a value that does not fit or takes more than `max_bytes`.
        """
        try:
            return self._encode(value, max_bytes)
        except Exception as error:
            raise PayloadError(f"{self._what} {_explain(error)}") from None

    def decode(self, data: bytes) -> object:
        """The value these bytes were made from.

        Raises `PayloadError` for bytes that are not JSON or do not fit the type.
        """
        if self.raw:
            return data
        try:
            return self._decode(data)
        except Exception as error:
            raise PayloadError(f"{self._what} {_explain(error)}") from None

    def _encode(self, value: object, max_bytes: int) -> bytes:
        if not isinstance(value, self._class):
            raise _invalid(f"Expected `{self._class.__name__}`, got `{type(value).__name__}`")
        data = cast("bytes", value) if self.raw else _to_json(value)
        if len(data) > max_bytes:
            raise _Refusal(f"takes {len(data)} bytes, and the limit is {max_bytes}")
        if not self.raw:
            self._check(value, data)
        return data

    def _check(self, value: object, data: bytes) -> None:
        """Raise if the data of a value would not come back as one of the type."""
        try:
            back = self._decode(data)
        except Exception:
            _refuse_unstorable(value)  # the null that does not fit may have been NaN
            raise
        if back is value:
            return  # None, or a member of an enum
        # A float that is not finite is written null, or as a key nan or inf; a Decimal NaN,
        # sNaN or Infinity. The search is slow, and most data gives no reason for it.
        if (
            (b"null" in data and _to_plain(back) != _to_plain(value))
            or (b"NaN" in data or b'nan":' in data)
            or (b'Infinity"' in data or b'inf":' in data)
        ):
            _refuse_unstorable(value)
        if back != value or not self._is_compared:
            _refuse_unstorable(value)
            # Maybe only a list for a tuple; but bytes or a date in place of a str are JSON
            # strings too, and would arrive as such.
            msgspec.convert(
                _to_plain(value), self._type, builtin_types=_JSON_STRINGS, dec_hook=_text_to_path
            )

    def _decode(self, data: bytes) -> object:
        value: object = self._decoder.decode(data)
        # msgspec drops unknown fields. The same bytes again mean that nothing was dropped.
        if self._has_fields and _ENCODER.encode(value) != data:
            _refuse_unknown(self._info, msgspec.json.decode(data))
        return value


def decode_plain(data: bytes) -> object:
    """Stored JSON of any type, as dicts, lists, text, numbers, booleans and None.

    Raises `PayloadError` for bytes that are not JSON.
    """
    try:
        return cast("object", msgspec.json.decode(data))
    except Exception as error:
        raise PayloadError(f"stored value {_explain(error)}") from None


def safe_text(text: str, limit: int = 10_000) -> str:
    """Text that can be stored and shown, whatever it was; never raises.

    Control characters (except newline and tab) and lone surrogates become U+FFFD. What is
    longer than `limit` characters is cut and ends in an ellipsis.
    """
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return _UNSAFE_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", text)


_UNSAFE_CHARACTER: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Refusal(Exception):
    """What is wrong with a value, in words that are safe to show: "takes 7 bytes, ..."."""


def _invalid(reason: str, path: str = "$") -> _Refusal:
    return _Refusal(f"is not valid at {path}: {reason}")


def _explain(error: Exception) -> str:
    """What may be said of an error: fields, types and bounds, never a user's own words."""
    match error:
        case _Refusal():
            return str(error)
        case RecursionError():
            return "is nested too deeply"
        case msgspec.DecodeError(args=[str(text)]) if parts := _MESSAGE.fullmatch(text):
            reason, key, path = parts.groups()
            where = f"is not valid at {'a key of ' if key else ''}{path or '$'}"
            if error.__cause__ is not None:
                return where  # out of a `__post_init__` or validator; msgspec added the path
            if reason.startswith(("Invalid value", "Invalid enum value")):
                return f"{where}: Not one of the allowed values"
            if _SAFE_REASON.fullmatch(reason):
                return f"{where}: {reason}"
    return "is not valid"


_MESSAGE: Final = re.compile(r"(.*?)(?: - at (`key` in )?`(\$[^`]*)`)?", re.DOTALL)

# What msgspec says of types, bounds and syntax. The rest of its messages quote what they
# refuse, and a `ValidationError` may come out of the user's own code, with any text.
_SAFE_REASON: Final = re.compile(
    r"Expected `.*"
    r"|Object (missing required|contains unknown) field `\w{1,100}`"
    r"|JSON is malformed: .*|Input data was truncated|Invalid UTF-8 encoded string"
    r"|Invalid (RFC3339 encoded \w+|ISO8601 duration|UUID|decimal string|base64 encoded string)"
    r"|(Integer value|Number|Timestamp|Duration)( is)? out of range *"
    r"|Only units .*",
    re.DOTALL,
)


# What is a string in JSON, but not in Python.
_JSON_STRINGS: Final = (
    *(bytes, bytearray, memoryview, UUID, Decimal),
    *(datetime, date, time, timedelta),
)


def _path_to_text(value: object) -> str:
    if isinstance(value, PurePath):
        return os.fspath(value)
    raise TypeError


def _text_to_path(cls: type, value: object) -> object:
    # What does not fit is left as it is: msgspec then says what it expected, and where.
    return cls(value) if issubclass(cls, PurePath) and isinstance(value, str) else value


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_path_to_text)


def _class(info: ms.Type) -> type:
    """What a value has to be an instance of, if its type is a class of its own."""
    cls = object if isinstance(info, ms.TypedDictType) else getattr(info, "cls", object)
    return get_origin(cls) or cls


def _to_plain(value: object) -> object:
    """The value as JSON has it, but for the types that JSON makes strings of."""
    return cast(
        "object",
        msgspec.to_builtins(value, builtin_types=_JSON_STRINGS, enc_hook=_path_to_text),
    )


def _to_json(value: object) -> bytes:
    try:
        return _ENCODER.encode(value)
    except Exception:
        _refuse_unstorable(value)  # says where; msgspec does not
        raise


def _refuse_unstorable(value: object, path: str = "$") -> None:
    """Raise `_Refusal` if JSON cannot hold a part of the value."""
    parts = _parts(value)
    for step, part in parts or ():
        _refuse_unstorable(part, path + step)
    if isinstance(value, dict):
        value = dict.fromkeys(value)  # None and a tuple are fine as values, not as keys
    elif parts is not None:
        return
    try:
        data = _ENCODER.encode(value)
    except UnicodeEncodeError:
        raise _invalid("A lone surrogate cannot be stored as JSON", path) from None
    except Exception:
        name = type(value).__name__
        raise _invalid(f"This `{name}` cannot be stored as JSON", path) from None
    finite = value.is_finite() if isinstance(value, Decimal) else data != b"null"
    if not finite and value is not None:
        raise _invalid("NaN and infinity cannot be stored as JSON", path)
    if isinstance(value, dict) and len(msgspec.json.decode(data)) < len(value):
        raise _invalid("Two keys are the same as JSON", path)
    offset = value.utcoffset() if isinstance(value, datetime | time) else None
    if offset is not None and offset % timedelta(minutes=1):
        raise _invalid("A time zone with seconds cannot be stored as JSON", path)


def _parts(value: Any) -> Iterable[tuple[str, object]] | None:
    """What a value is made of, each part after its step in a path; None if it is a leaf."""
    if isinstance(value, dict):
        return (("[...]", part) for item in value.items() for part in item)
    if isinstance(value, list | tuple | set | frozenset):
        return ((f"[{index}]", part) for index, part in enumerate(value))
    cls = type(value)
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif issubclass(cls, msgspec.Struct):
        names = list(cls.__struct_fields__)
    elif hasattr(cls, "__attrs_attrs__"):
        names = [field.name for field in cls.__attrs_attrs__]
    else:
        return None
    parts = ((f".{name}", getattr(value, name)) for name in names)
    return (part for part in parts if part[1] is not msgspec.UNSET)


def _is_compared(cls: Any) -> bool:
    """All of its fields tell one value from another."""
    if dataclasses.is_dataclass(cls):
        return all(field.compare for field in dataclasses.fields(cls))
    return all(field.eq for field in getattr(cls, "__attrs_attrs__", ()))


def _types_in(node: object, found: dict[int, ms.Type]) -> dict[int, ms.Type]:
    """Collect a type and all that it is made of by their ids; types can be recursive."""
    if isinstance(node, ms.Field):
        _types_in(node.type, found)
    elif isinstance(node, tuple):
        for part in node:
            _types_in(part, found)
    elif isinstance(node, ms.Type) and id(node) not in found:
        found[id(node)] = node
        for name in node.__struct_fields__:
            _types_in(getattr(node, name), found)
    return found


def _check_type(info: ms.Type) -> None:
    """Raise `TypeError` for what msgspec accepts but does not store as JSON."""
    match info:
        case ms.CustomType(cls=cls) if cls is not object and not issubclass(cls, PurePath):
            raise TypeError(f"type `{cls.__name__}` cannot be stored as JSON")
        case ms.RawType() | ms.ExtType():
            raise TypeError(f"msgspec's `{type(info).__name__}` cannot be stored as JSON")
        case ms.DictType(key_type=key):
            for part in _types_in(key, {}).values():
                if not isinstance(part, _KEY_TYPES):
                    raise TypeError(f"a dict key cannot be of `{type(part).__name__}`")
        case ms.DataclassType(cls=cls, fields=fields):
            private = [field.name for field in fields if field.name.startswith("_")]
            if private and hasattr(get_origin(cls) or cls, "__attrs_attrs__"):
                raise TypeError(f"private attrs field `{private[0]}` would not be stored")


_KEY_TYPES: Final = (
    *(ms.AnyType, ms.CustomType, ms.UnionType, ms.Metadata, ms.EnumType, ms.LiteralType),
    *(ms.StrType, ms.BytesType, ms.UUIDType, ms.IntType, ms.FloatType, ms.DecimalType),
    *(ms.DateTimeType, ms.DateType, ms.TimeType, ms.TimeDeltaType),
)


def _refuse_unknown(info: ms.Type, value: object, path: str = "$") -> None:
    """Raise `_Refusal` for an unknown field in decoded JSON that fits its type otherwise.

    Each member of a union has a look: msgspec allows none but those that are told apart by
    array, object and tag.
    """
    if not isinstance(value, dict | list):
        return
    match info, value:
        case ms.Metadata(type=part), _:
            _refuse_unknown(part, value, path)
        case ms.UnionType(types=parts), _ if not any(type(part) is ms.AnyType for part in parts):
            for part in parts:
                _refuse_unknown(part, value, path)
        case ms.CollectionType(item_type=part), list():
            for index, item in enumerate(value):
                _refuse_unknown(part, item, f"{path}[{index}]")
        case ms.DictType(value_type=part), dict():
            for item in value.values():
                _refuse_unknown(part, item, f"{path}[...]")
        case ms.TupleType(item_types=parts), list():
            for index, (part, item) in enumerate(zip(parts, value, strict=False)):
                _refuse_unknown(part, item, f"{path}[{index}]")
        case ms.NamedTupleType(fields=fields), list():
            _refuse_unknown(ms.TupleType(tuple(field.type for field in fields)), value, path)
        case ms.StructType(fields=fields, array_like=True, tag=tag), list():
            if tag is None or value[0] == tag:
                head = () if tag is None else (ms.AnyType(),)
                parts = (*head, *(field.type for field in fields))
                if len(value) > len(parts):
                    raise _invalid("Unknown field", f"{path}[{len(parts)}]")
                _refuse_unknown(ms.TupleType(parts), value, path)
        case ((ms.StructType() | ms.DataclassType() | ms.TypedDictType()), dict()):
            tag, tag_field = getattr(info, "tag", None), getattr(info, "tag_field", None)
            known = {field.encode_name: field.type for field in info.fields}
            for name, item in value.items() if value.get(tag_field, tag) == tag else ():
                if name in known:
                    _refuse_unknown(known[name], item, f"{path}.{name}")
                elif name != tag_field:
                    # It comes from the data, but a mistyped field is found by its name.
                    shown = f".{name}" if re.fullmatch(r"\w{1,100}", name) else "[...]"
                    raise _invalid("Unknown field", f"{path}{shown}")
