"""What a compiled Mosaic kernel's host function does, read off its LLVM text: TMA descriptors, then one launch.

The function is straight-line code over constants and the operands' addresses, so a few instructions are enough to
follow it. What it does can then be done without its machine code (bridges.torch_ops.driver), and be kept in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

INIT, LAUNCH = "mosaic_gpu_init_tma_desc", "mosaic_gpu_launch_kernel"
_SIZES = {"ptr": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 1, "float": 4, "double": 8, "bfloat": 2, "half": 2}


class Address(NamedTuple):
    """`offset` bytes into an operand's memory."""

    operand: int
    offset: int


@dataclass(frozen=True)
class Descriptor:
    """One TMA descriptor at byte `at` of the descriptor area; the rest are mosaic_gpu_init_tma_desc's arguments."""

    at: int
    base: Address
    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int
    window: tuple[int, ...]


@dataclass(frozen=True)
class HostCode:
    """A launch. params: per kernel parameter an operand's address, or ('area', bytes) for the descriptors by value.

    dims: grid x y z, cluster x y z (0 where there is none), block x y z.
    """

    area: int
    descriptors: tuple[Descriptor, ...]
    dims: tuple[int, ...]
    smem: int
    pdl: int
    params: tuple[Address | int, ...]


class NotStraight(ValueError):
    """The text holds an instruction that is not known here."""


def parse(text: str) -> HostCode:
    """The host function in the LLVM module `text` (MOSAIC_GPU_DUMP_HOST_LLVM). Raises NotStraight."""
    bodies = re.findall(r"^define i32 @(?!_mlir_ciface_)\S+\(ptr %0, ptr %1, ptr %2\) \{\n(.*?)^\}", text, re.M | re.S)
    if len(bodies) != 1:
        raise NotStraight(f"{len(bodies)} host functions; expected 1")
    run = _Run()
    for line in bodies[0].splitlines():
        try:
            run.step(line.strip())
        except (LookupError, TypeError, AttributeError) as e:  # a value that is not what its use takes it for
            raise NotStraight(f"instruction {line.strip()!r}: {e!r}") from e
    if run.launch is None:
        raise NotStraight("no launch")
    return run.launch


class _Slot(NamedTuple):
    """`offset` bytes into the memory of an alloca."""

    alloca: int
    offset: int


class _Entry(NamedTuple):
    """Where the array of operands' addresses holds that of one operand."""

    operand: int


class _Area(NamedTuple):
    """The value of `size` bytes loaded from an alloca."""

    alloca: int
    size: int


class _Run:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {"%0": "function", "%1": "stream", "%2": "operands"}
        self.memory: dict[_Slot, Any] = {}
        self.sizes: list[int] = []
        self.descriptors: list[Descriptor] = []
        self.area: int | None = None
        self.taken = False  # whether the descriptors' bytes have been loaded, for the launch
        self.launch: HostCode | None = None

    def step(self, line: str) -> None:
        name, _, code = line.rpartition(" = ") if re.match(r"%\d+ = ", line) else ("", "", line)
        op, _, rest = code.partition(" ")
        do = getattr(self, f"_{op}", None)
        if do is None:
            raise NotStraight(f"instruction {line!r}")
        result = do(rest)
        if name:
            self.values[name] = result

    def _value(self, text: str) -> Any:
        """The value of '<type> <name or number>'."""
        word = text.strip().rsplit(" ", 1)[-1]
        if word in ("undef", "poison"):
            return {}
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        if word in ("true", "false"):
            return int(word == "true")
        if word not in self.values:
            raise NotStraight(f"value {text!r}")
        return self.values[word]

    # -- instructions -------------------------------------------------------------------------------------------------
    def _load(self, rest: str) -> Any:
        kind, source = _split(rest)[:2]
        at: Any = self._value(source)
        if isinstance(at, _Entry):
            return Address(at.operand, 0)
        if at == "operands":
            return Address(0, 0)
        if kind.startswith("[") and isinstance(at, _Slot) and at.offset == 0:
            self.taken = True
            return _Area(at.alloca, _size(kind))
        return self.memory[at]

    def _store(self, rest: str) -> None:
        what, to = _split(rest)[:2]
        self.memory[self._value(to)] = self._value(what)

    def _alloca(self, rest: str) -> _Slot:
        parts = _split(rest)
        count = next((self._value(p) for p in parts[1:] if p.startswith(("i64 ", "i32 "))), 1)
        self.sizes.append(_size(parts[0]) * count)
        return _Slot(len(self.sizes) - 1, 0)

    def _getelementptr(self, rest: str) -> Any:
        parts = _split(rest.removeprefix("inbounds "))
        kind, base, indices = parts[0], self._value(parts[1]), [self._value(p) for p in parts[2:]]
        if len(indices) == 2 and kind.startswith("{"):
            if indices[0]:
                raise NotStraight(rest)
            offset = sum(_padded(m) for m in _split(kind[1:-1])[: indices[1]])
        elif len(indices) == 1:
            offset = indices[0] * _size(kind)
        else:
            raise NotStraight(rest)
        if base == "operands" and offset % 8 == 0:
            return _Entry(offset // 8)
        if isinstance(base, Address | _Slot):
            return base._replace(offset=base.offset + offset)
        raise NotStraight(rest)

    def _insertvalue(self, rest: str) -> dict[tuple[int, ...], Any]:
        into, what, *path = _split(rest)
        return {**self._value(into), tuple(map(int, path)): self._value(what)}

    def _extractvalue(self, rest: str) -> Any:
        source, *path = _split(rest)
        return self._value(source)[tuple(map(int, path))]

    def _ptrtoint(self, rest: str) -> Any:
        return self._value(rest.rpartition(" to ")[0])

    _inttoptr = _ptrtoint

    def _ret(self, rest: str) -> None:
        pass

    def _call(self, rest: str) -> Any:
        found = re.fullmatch(r"\S+ @(\w+)\((.*)\)", rest)
        if found is None:
            raise NotStraight(rest)
        args = [self._value(a) for a in _split(found[2])]
        if found[1] == INIT:
            at, base, element, rank, sizes, strides, swizzle, window = args
            if not isinstance(at, _Slot) or not isinstance(base, Address) or self.area not in (None, at.alloca):
                raise NotStraight(rest)
            if self.taken:
                raise NotStraight(f"a descriptor made after they were read: {rest}")
            self.area = at.alloca
            read = lambda a: tuple(self.memory[a._replace(offset=a.offset + 8 * i)] for i in range(rank))
            self.descriptors.append(
                Descriptor(at.offset, base, element, read(sizes), read(strides), swizzle, read(window))
            )
        elif found[1] == LAUNCH and args[0] == "function" and args[12] == "stream" and self.launch is None:
            self.launch = HostCode(
                0 if self.area is None else self.sizes[self.area],
                tuple(self.descriptors),
                tuple(args[1:10]),
                args[10],
                args[11],
                tuple(self._params(args[13])),
            )
        else:
            raise NotStraight(rest)

    def _params(self, array: _Slot) -> list[Address | int]:
        out: list[Address | int] = []
        for i in range(self.sizes[array.alloca] // 8):
            value = self.memory[self.memory[array._replace(offset=array.offset + 8 * i)]]
            if isinstance(value, _Area) and value.alloca == self.area:
                value = value.size
            elif not isinstance(value, Address):
                raise NotStraight(f"kernel parameter {i} is {value!r}")
            out.append(value)
        return out


def _split(text: str) -> list[str]:
    """The parts between the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def _size(kind: str) -> int:
    """Bytes of a type."""
    if kind in _SIZES:
        return _SIZES[kind]
    if found := re.fullmatch(r"\[(\d+) x (.*)\]", kind):
        return int(found[1]) * _size(found[2])
    if kind.startswith("{"):
        return sum(map(_padded, _split(kind[1:-1])))
    raise NotStraight(f"type {kind!r}")


def _padded(kind: str) -> int:
    """Bytes between a member of a struct and the next: members only need to be told apart, so all are padded to 8."""
    return -(-_size(kind) // 8) * 8
