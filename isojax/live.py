"""What the kernels of this process are, as loaded: a digest over their code and constants in memory.

Files say what was installed, memory what will run: a test, a tuner or a notebook may have replaced a function or a
constant since. Whatever is kept between processes is kept under this digest too, so that it is never taken for code
that is not the one it was made from.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import types
from collections.abc import Iterator, Mapping
from typing import Any

import isojax.pallas_kernels as families
from isojax import schedule
from isojax.region import Region, load_shipped

PLAIN = (int, float, complex, str, bytes, bool, type(None))


def digest() -> str:
    """SHA-256 over the modules of isojax.pallas_kernels, isojax.schedule and the shipped regions. Some milliseconds."""
    found = hashlib.sha256()
    for text in _texts():
        found.update(text.encode() + b"\0")
    return found.hexdigest()


def _texts() -> Iterator[str]:
    for module in (*_modules(), schedule):
        yield module.__name__
        for name, value in sorted(vars(module).items()):
            if name.isupper():
                yield f"{name} = {_value(value)}"
            elif isinstance(value, Region):
                yield from _region(value)
            elif getattr(value, "__module__", None) == module.__name__:
                yield from _code(name, value)


def _region(region: Region) -> Iterator[str]:
    yield f"{region.name} {region.version} {_value(region.constants)}"
    for arch, impl in sorted(region.impl.items()):
        yield f"{arch} {impl.kind} {impl.fn.__module__}"
        yield from _code(getattr(impl.fn, "__qualname__", "?"), impl.fn)


@functools.cache
def _modules() -> list[types.ModuleType]:
    """Every module of the shipped families, imported: which are loaded must not depend on what ran before."""
    load_shipped()
    names = sorted(m.name for m in pkgutil.walk_packages(families.__path__, f"{families.__name__}."))
    return [families, *map(importlib.import_module, names)]


def _code(name: str, value: Any) -> Iterator[str]:
    """Functions, also wrapped ones, and the functions of classes."""
    if isinstance(value, type):
        for key, member in sorted(vars(value).items()):
            yield from _code(f"{name}.{key}", member)
        return
    for wrapped in ("__wrapped__", "__func__", "fget", "func"):
        if not isinstance(value, types.FunctionType) and (inner := getattr(value, wrapped, None)) is not None:
            value = inner
    if isinstance(value, types.FunctionType):
        cells = [_value(c.cell_contents) for c in value.__closure__ or ()]
        yield f"{name} {_value(value.__defaults__)} {_value(value.__kwdefaults__)} {cells} {_body(value.__code__)}"


def _body(code: types.CodeType) -> str:
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, [_value(c) for c in code.co_consts]))


def _value(value: Any) -> str:
    """A text that is the same in every process for plain values; others are named by their type."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, types.CodeType):
        return _body(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_value, value))})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(_value, value)))})"
    if isinstance(value, Mapping):
        return f"dict({', '.join(sorted(f'{_value(k)}: {_value(v)}' for k, v in value.items()))})"
    if isinstance(value, types.FunctionType):
        return "".join(_code(value.__qualname__, value))
    return f"{type(value).__module__}.{type(value).__qualname__}"
