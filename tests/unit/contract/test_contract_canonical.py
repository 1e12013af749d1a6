import math
import struct

import pytest
from contract_samples import json_values
from hypothesis import given
from hypothesis import strategies as st

import contract as c
from contract.canonical import looks_like_float


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


@given(st.integers(0, 2**64 - 1))
def test_every_f64_bit_pattern_survives(pattern):
    value = struct.unpack(">d", pattern.to_bytes(8, "big"))[0]
    assert c.encode_float(value) == f"f64:0x{pattern:016x}"
    assert bits(c.decode_float(c.encode_float(value))) == bits(value)


@given(st.floats(width=32, allow_nan=False))
def test_f32_values_survive_and_others_are_refused(value):
    assert bits(c.decode_float(c.encode_float(value, "f32"))) == bits(value)


@pytest.mark.parametrize(
    "value, fmt, text",
    [
        (0.001, "f64", "f64:0x3f50624dd2f1a9fc"),
        (1.0, "f32", "f32:0x3f800000"),
        (1.0, "bf16", "bf16:0x3f80"),
        (-0.0, "bf16", "bf16:0x8000"),
        (math.inf, "f32", "f32:0x7f800000"),
        (math.nan, "f32", "f32:0x7fc00000"),
    ],
)
def test_known_bit_patterns(value, fmt, text):
    assert c.encode_float(value, fmt) == text
    assert bits(c.decode_float(text)) == bits(value)


@pytest.mark.parametrize("value, fmt", [(0.1, "f32"), (1e300, "f32"), (1.00001, "bf16"), (1.0, "f16")])
def test_inexact_or_unknown_formats_are_refused(value, fmt):
    with pytest.raises(ValueError, match="f32|bf16|f16"):
        c.encode_float(value, fmt)


@pytest.mark.parametrize(
    "text", ["f64:0x3f", "f64:0x3F50624DD2F1A9FC", "f32:0x3f8000000", "0.5", "f64:", "f64:0x" + "g" * 16]
)
def test_only_one_spelling_of_a_bit_pattern(text):
    with pytest.raises(ValueError, match="not a float bit pattern"):
        c.decode_float(text)


def test_what_announces_a_bit_pattern():
    assert looks_like_float("f64:nonsense") and not looks_like_float("f64") and not looks_like_float("fp32")


def test_negative_zero_and_nan_payloads_have_their_own_bytes():
    payload = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    values = [0.0, -0.0, math.nan, -math.nan, payload, math.inf, -math.inf, 0, 1.0, 1, True, "1", None]
    assert len({c.canonical_bytes(value) for value in values}) == len(values)


def test_canonical_bytes_ignore_key_order_and_container_type():
    assert c.canonical_bytes({"b": [1, 2], "a": "é\n"}) == c.canonical_bytes({"a": "é\n", "b": (1, 2)})
    assert c.canonical_bytes({"b": 1, "a": [True, None]}) == b'{"a":[true,null],"b":1}'


@pytest.mark.parametrize("value", [2**53, "\ud800", {1: 2}, object(), {1, 2}, b"x"])
def test_values_without_canonical_bytes_are_refused(value):
    with pytest.raises(ValueError):
        c.canonical_bytes(value)


@given(json_values)
def test_json_values_survive_bytes_except_that_floats_become_bits(value):
    data = c.canonical_bytes(value)
    assert c.canonical_bytes(c.strict_loads(data)) == data


@pytest.mark.parametrize(
    "data, word",
    [
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"x": [{"b": 1, "b": 1}]}', "appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": 1', "malformed"),
        (b"", "malformed"),
        (b'{"a": 1} x', "malformed"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "malformed"),
        (b"[" * 100_000, "deeply"),
    ],
)
def test_ambiguous_or_malformed_json_is_refused(data, word):
    with pytest.raises(c.ContractError, match=word) as caught:
        c.strict_loads(data, source="here")
    assert caught.value.findings[0].entry == "here" and caught.value.rules == ("json",)
