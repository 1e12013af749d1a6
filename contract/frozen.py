"""Immutable mappings for the free parts of a contract. Each kind says which values it takes.

pydantic's `frozen` stops at attributes: a dict inside a frozen model can still be edited under a digest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from pydantic_core import core_schema

from contract.canonical import INT_LIMIT, canonical_bytes, decode_float, encode_float, looks_like_float


class FrozenMap(Mapping[str, Any]):
    """String keys to JSON values; lists become tuples, objects FrozenMaps. Raises ValueError for anything else.

    Equality and hash go by canonical bytes: Python's own says True == 1 and 0.0 == -0.0, digests do not.
    """

    __slots__ = ("_items", "_bytes")

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = {_key(key): self._freeze(key, value) for key, value in sorted((items or {}).items(), key=_by_key)}
        self._bytes = canonical_bytes(self._items)

    @classmethod
    def _freeze(cls, key: str, value: Any) -> Any:
        if isinstance(value, FrozenMap) or type(value) is dict:
            return FrozenMap(value)
        if type(value) is float:
            if not math.isfinite(value):
                raise ValueError(f"{key} is {value!r}, which JSON cannot hold; write {encode_float(value)!r}")
            return value
        return _freeze_plain(key, value, cls._freeze)

    def plain(self) -> dict[str, Any]:
        """A new plain dict of dicts and lists, as JSON would load it."""
        return {key: _thaw(value) for key, value in self._items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self._bytes == other._bytes
        if not isinstance(other, Mapping):
            return NotImplemented
        try:
            return self._bytes == canonical_bytes(other)
        except ValueError:  # not a JSON value, so equal to none
            return False

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plain()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plain(),)

    @classmethod
    def _coerce(cls, value: Any) -> Self:
        if type(value) is cls:
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"an object is needed, not {type(value).__name__}")
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._coerce,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.plain()),
        )


class Constants(FrozenMap):
    """Pinned constants: ints, strings, bools, None and lists of these; floats only as bit patterns."""

    __slots__ = ()

    @classmethod
    def _freeze(cls, key: str, value: Any) -> Any:
        if type(value) is float:
            raise ValueError(
                f"{key} is the float {value!r}; decimal text has many readings, write {encode_float(value)!r} "
                "(Constants.of does it)"
            )
        if isinstance(value, Mapping):
            raise ValueError(f"{key} is an object; constants are flat, so that a difference has a name: use more keys")
        value = _freeze_plain(key, value, cls._freeze)
        if type(value) is str and looks_like_float(value):
            _decode(key, value)
        return value

    @classmethod
    def of(cls, constants: Mapping[str, Any]) -> Self:
        """From Python values: floats (in lists too) become f64 bit patterns. Raises ValueError for other types."""
        return cls({key: _float_bits(value) for key, value in constants.items()})


class Toolchain(FrozenMap):
    """Package name -> version, for packages that can change bits."""

    __slots__ = ()

    @classmethod
    def _freeze(cls, key: str, value: Any) -> str:
        if type(value) is not str or not value.strip():
            raise ValueError(f"{key} is {value!r}; a version is a string such as '0.11.2'")
        return value


class Bounds(FrozenMap):
    """Statistic -> bound, a finite bit pattern that is not negative."""

    __slots__ = ()

    @classmethod
    def _freeze(cls, key: str, value: Any) -> str:
        if type(value) is not str:
            raise ValueError(f"{key} is {value!r}; a bound is a float bit pattern, see canonical.encode_float")
        bound = _decode(key, value)
        if not math.isfinite(bound) or math.copysign(1.0, bound) < 0:
            raise ValueError(f"{key} is {bound!r}; a bound is finite and not negative")
        return value


def _by_key(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _key(key: Any) -> str:
    if type(key) is not str or not key:
        raise ValueError(f"key {key!r} is not a non-empty string")
    return key


def _freeze_plain(key: str, value: Any, freeze: Callable[[str, Any], Any]) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if abs(value) > INT_LIMIT:
            raise ValueError(f"{key} is {value}; JSON integers end at 2**53 - 1, write it as a string")
        return value
    if type(value) in (list, tuple):
        return tuple(freeze(f"{key}[{index}]", item) for index, item in enumerate(value))
    raise ValueError(f"{key} has type {type(value).__name__}, which JSON does not have")


def _decode(key: str, text: str) -> float:
    try:
        return decode_float(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _float_bits(value: Any) -> Any:
    if type(value) is float:
        return encode_float(value)
    if type(value) in (list, tuple):
        return tuple(_float_bits(item) for item in value)
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, FrozenMap):
        return value.plain()
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value
