"""Canonical bytes: one spelling per value, so that a digest is a function of the value alone.

RFC 8785 fixes key order, escapes and integers. It prints floats in decimal, folds -0.0 into 0 and has no NaN, so here
a float becomes its bit pattern (`f64:0x3f50624dd2f1a9fc`) before it is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import rfc8785

from contract.errors import ContractError, Finding

FloatFormat = Literal["f64", "f32", "bf16"]

INT_LIMIT = 2**53 - 1  # beyond it JSON readers that use doubles disagree, and RFC 8785 refuses

_DIGITS = {"f64": 16, "f32": 8, "bf16": 4}
_FLOAT_BITS = re.compile(r"(f64|f32|bf16):0x([0-9a-f]+)")


def encode_float(value: float, fmt: FloatFormat = "f64") -> str:
    """The bit pattern of `value`. NaN payloads, signed zeros and infinities each have their own.

    Raises ValueError where `fmt` cannot hold `value` exactly: a contract never rounds.
    """
    if fmt not in _DIGITS:
        raise ValueError(f"float format {fmt!r} is not one of {', '.join(_DIGITS)}")
    wide = struct.pack(">d", value)
    if fmt == "f64":
        return f"f64:0x{wide.hex()}"
    try:
        narrow = struct.pack(">f", value)
    except OverflowError:
        raise ValueError(f"{value!r} is outside the range of {fmt}; write it as f64") from None
    exact = struct.pack(">d", struct.unpack(">f", narrow)[0]) == wide
    if fmt == "bf16":
        exact, narrow = exact and narrow[2:] == b"\0\0", narrow[:2]
    if not exact:
        raise ValueError(f"{value!r} is not exact in {fmt}; round it first, or write it as f64")
    return f"{fmt}:0x{narrow.hex()}"


def decode_float(text: str) -> float:
    """The value of a bit pattern. Raises ValueError unless `text` is the one spelling of it."""
    match = _FLOAT_BITS.fullmatch(text)
    if match is None or len(match[2]) != _DIGITS[match[1]]:
        spellings = "f64:0x with 16, f32:0x with 8 or bf16:0x with 4 lower-case hex digits"
        raise ValueError(f"{text!r} is not a float bit pattern: {spellings}")
    bits = bytes.fromhex(match[2])
    if match[1] == "f64":
        return struct.unpack(">d", bits)[0]
    return struct.unpack(">f", bits.ljust(4, b"\0"))[0]


def looks_like_float(text: str) -> bool:
    """Whether `text` announces a bit pattern, well formed or not."""
    return text.split(":", 1)[0] in _DIGITS and ":" in text


def canonical_bytes(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON-like value (mappings, sequences, strings, ints, bools, None), floats as bit patterns.

    A float and the string of its bit pattern are the same value and give the same bytes. Raises ValueError for an
    integer beyond 2**53 - 1, a lone surrogate, a key that is no string, or any other type.
    """
    return rfc8785.dumps(_with_float_bits(value))


def digest(value: Any) -> str:
    """SHA-256 of the canonical bytes, in hex."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def _with_float_bits(value: Any) -> Any:
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, Mapping):
        return {key: _with_float_bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_float_bits(item) for item in value]
    return value


def strict_loads(data: bytes | str, *, source: str = "JSON text") -> Any:
    """Parse JSON that has exactly one reading: UTF-8, no key twice, no NaN or Infinity, no number out of range.

    Raises ContractError naming `source`. (Python's json keeps the last of two equal keys, so an edited file could
    show a reviewer one value and the runtime another.)
    """

    def refuse(given: str, allowed: str, mend: str) -> NoReturn:
        raise ContractError([Finding(source, "json", given, allowed, mend)])

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                refuse(f"key {key!r} appears twice in one object", "each key once", "remove one of the two")
            seen[key] = value
        return seen

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            refuse(f"number {text}", "finite numbers", "write its bit pattern, as canonical.encode_float gives it")
        return value

    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=pairs, parse_constant=number, parse_float=number)
    except ContractError:
        raise
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 at byte {error.start}", "UTF-8", "save the file as UTF-8")
    except RecursionError:
        refuse("nested too deeply to read", "a contract's few levels", "restore the file from where it was sealed")
    except ValueError as error:
        refuse(f"malformed: {error}", "well-formed JSON", "restore the file from where it was sealed")
