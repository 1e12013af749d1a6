"""Program -> one straight-line Python function over torch tensors.

A value may exist in several forms: `v` the torch tensor, `r` what regions take (a JAX array on cpu, the contiguous
tensor on a GPU), `l` an int64 copy of an index. A form is made where it is first needed and dropped after its last use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch

from bridges.torch_ops import backend as backends
from bridges.torch_ops import rules
from bridges.torch_ops.collectives import COLLECTIVES, Groups
from bridges.torch_ops.dtypes import tensor_of, to_torch
from bridges.torch_ops.indices import shared
from bridges.torch_ops.inplace import last_uses, plan_writes
from isojax import _jax_internals as internals
from isojax.errors import InputError, Refused
from isojax.program import Program, Step
from isojax.region import lookup

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
_serial = itertools.count()


class Compiled:
    """A Program in torch: call it with the flat inputs, get the tuple of flat outputs.

    No gradient flows through it (see autograd.layer_function). Outputs may be views of inputs where the Program only
    moves data; donated inputs are written in place and come back as outputs.

    Attributes:
      program, arch, device, donate: as given.
      source: the generated Python.
      strided_operands: how many region operands of the last call had to be copied because they were not contiguous.
    """

    def __init__(self, program: Program, arch: str, device: torch.device, donate: tuple[int, ...], groups: Groups):
        self.program, self.arch, self.device, self.donate = program, arch, device, donate
        self.strided_operands = 0
        index = device.index
        self._here = (lambda x: x.is_cpu) if device.type == "cpu" else (lambda x: x.get_device() == index)
        self._expected = [(tuple(a.shape), to_torch(a.dtype)) for a in _local_avals(program)]
        self._checked: tuple[int, ...] = ()
        program = shared(program)
        code = _Code(program, backends.make(arch, device, self._count), groups, plan_writes(program, donate), True)
        self._run, self.source, self._calls = code.function, code.source, code.calls

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Raises: InputError for inputs that do not fit the Program, among them an int64 outside int32."""
        self.strided_operands = 0
        if torch.is_inference_mode_enabled():  # an engine's step: what no_grad costs would show
            return self._run(*self._enter(args))
        with torch.no_grad():
            return self._run(*self._enter(args))

    @contextmanager
    def wrapped(self, wrap: Callable[[Step, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Inside, each region call runs as `wrap(step, fn)`, to be timed or looked at; not those in a scan's body."""
        scope = self._run.__globals__
        plain = {name: scope[name] for name in self._calls}
        scope.update({name: wrap(step, plain[name]) for name, step in self._calls.items()})
        try:
            yield
        finally:
            scope.update(plain)

    def tree(self, *args: Any) -> Any:
        """Call with the traced function's own pytrees of tensors, and get its output pytree."""
        flat, tree = jax.tree.flatten(args)
        if tree != self.program.in_tree:
            raise InputError(f"arguments have structure {tree}; the Program was traced with {self.program.in_tree}")
        return jax.tree.unflatten(self.program.out_tree, self(*flat))

    def _count(self) -> None:
        self.strided_operands += 1

    def _enter(self, args: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(args) != len(self._expected):
            raise InputError(f"{len(args)} inputs given; the Program takes {len(self._expected)}")
        here, mended = self._here, None
        for i, (x, (shape, dtype)) in enumerate(zip(args, self._expected, strict=True)):
            if x.dtype is not dtype or x.shape != shape or not here(x):
                mended = list(args) if mended is None else mended
                mended[i] = self._mend(i, x)
        if self.donate:
            self._check_donated(args)
        return args if mended is None else mended

    def _mend(self, i: int, x: torch.Tensor) -> torch.Tensor:
        shape, dtype = self._expected[i]
        if tuple(x.shape) == shape and self._here(x):
            if dtype is torch.int32 and x.dtype is torch.int64 and i not in self.donate:
                return narrow(x, self._name(i))
        raise InputError(
            f"{self._name(i)}: given {x.dtype} {tuple(x.shape)} on {x.device}; "
            f"the Program takes {dtype} {shape} on {self.device}"
        )

    def _name(self, i: int) -> str:
        names = self.program.input_names
        return f"input {i} ({names[i]})" if i < len(names) else f"input {i}"

    def _check_donated(self, args: Sequence[torch.Tensor]) -> None:
        pointers = tuple(args[i].data_ptr() for i in self.donate)
        if pointers == self._checked:
            return
        for i in self.donate:
            if not args[i].is_contiguous():
                raise InputError(f"{self._name(i)} is donated but not contiguous: strides {args[i].stride()}")
            start, size = args[i].data_ptr(), args[i].nbytes
            for k, other in enumerate(args):
                if k != i and size and other.nbytes and start < other.data_ptr() + other.nbytes:
                    if other.data_ptr() < start + size:
                        raise InputError(f"{self._name(i)} is donated but shares memory with {self._name(k)}")
        self._checked = pointers


def compile_program(
    program: Program,
    *,
    arch: str,
    donate: Sequence[int] = (),
    groups: Groups | None = None,
    device: torch.device | str | None = None,
) -> Compiled:
    """Compile a Program for torch. Everything is built here: regions are compiled, kernels loaded.

    Args:
      program: from isojax.program.trace or trace_vjp.
      arch: 'cpu' or 'sm90'.
      donate: flat inputs whose memory `put`s may write; see inplace.plan_writes.
      groups: process group of each named axis that the Program's collectives use.
      device: where inputs live; by default the CPU, or the current CUDA device.

    Raises: Refused (a write that cannot be proved safe, movement that torch would do otherwise), Unsupported (a region
    on this arch), Unavailable (no such device, no process group).
    """
    return Compiled(program, arch, backends.resolve(arch, device), tuple(donate), groups or {})


def prepare(programs: Sequence[Program], arch: str, device: torch.device | str | None = None) -> None:
    """Compile the kernels of several Programs ahead, at once and from kept files; on cpu nothing is to be done.

    compile_program then finds them. Raises: as compile_program.
    """
    if arch == "cpu":
        return
    from bridges.torch_ops import cuda

    where = backends.resolve(arch, device)
    calls = [(lookup(s.name), s.in_avals, s.params) for p in programs for s in p.calls()]
    cuda.prepare([c for c in calls if c[0].implementation(arch).kind == "kernel"], where)


def narrow(x: torch.Tensor, what: str = "input") -> torch.Tensor:
    """int64 -> int32, never truncating. On CUDA the check is an assertion on the device: it needs no wait for the GPU.

    Raises: InputError (cpu).
    """
    fits = ((x >= INT32_MIN) & (x <= INT32_MAX)).all()
    if x.is_cuda:
        torch.ops.aten._assert_async.msg(fits, f"{what}: an int64 value lies outside int32")
    elif not fits:
        raise InputError(f"{what}: int64 values {x.min().item()} to {x.max().item()} do not fit int32")
    return x.to(torch.int32)


def _local_avals(program: Program) -> list[Any]:
    # Inside shard_map a rank holds its part of an input: the first step that reads it knows the local shape.
    first: dict[int, Any] = {}
    for s in program.steps:
        for v, a in zip(s.ins, s.in_avals, strict=True):
            if isinstance(v, int):
                first.setdefault(v, a)
    return [first.get(v, a) for v, a in zip(program.inputs, program.in_avals, strict=True)]


@dataclass(frozen=True)
class _Folded:
    """A constant that a Program computes from a literal; stands where a literal may."""

    val: Any
    aval: Any


class _Code:
    """Code generation for one Program or one scan body."""

    def __init__(self, program: Program, backend: Any, groups: Groups, writes: frozenset[int], entry: bool):
        self.program, self.backend, self.groups, self.writes, self.entry = program, backend, groups, writes, entry
        self.globals: dict[str, Any] = {"enter": backend.enter, "leave": backend.leave, "long": torch.Tensor.long}
        self.globals["enter_input"] = backend.enter_input if entry else backend.enter
        self.lines: list[str] = []
        self.calls: dict[str, Step] = {}  # regions, by the name of their function
        self.names: dict[tuple[int, str], str] = {(v, "v"): f"v{v}" for v in program.inputs}
        self.constant = set(program.consts)
        self.folded: dict[Any, _Folded] = {}
        for v, c in program.consts.items():
            aval = jax.typeof(c)
            self._constant(v, tensor_of(c, to_torch(aval.dtype), backend.device))
        last = last_uses(program)
        self._drop(-1, program.inputs, last)
        for k, s in enumerate(program.steps):
            self._step(k, s)
            self._drop(k, dict.fromkeys([*(v for v in s.ins if isinstance(v, int)), *s.outs]), last)
        outputs = "".join(f"{self._output(i, v)}, " for i, v in enumerate(program.outputs))
        args = ", ".join(f"v{v}" for v in program.inputs)
        self.source = "\n".join(
            [f"def program({args}):", *(f"    {x}" for x in self.lines), f"    return ({outputs})\n"]
        )
        exec(compile(self.source, f"<isojax program {next(_serial)}>", "exec"), self.globals)
        self.function: Callable[..., tuple[Any, ...]] = self.globals["program"]

    def _constant(self, v: int, value: torch.Tensor) -> None:
        self.globals[f"v{v}"] = value
        self.names[v, "v"] = f"v{v}"
        self.constant.add(v)

    def _folded(self, v: Any) -> Any:
        return self.folded.get(v, v) if isinstance(v, int) else v

    def _drop(self, k: int, values: Any, last: dict[int, int]) -> None:
        dead = [v for v in values if v not in self.constant and last.get(v, -1) <= k]
        names = [self.names.pop((v, form)) for v in dead for form in "vrl" if (v, form) in self.names]
        if names:
            self.lines.append(f"del {', '.join(dict.fromkeys(names))}")

    def _use(self, v: int, form: str) -> str:
        if (v, form) not in self.names:
            if form == "v":
                text = f"leave({self._use(v, 'r')})"
            elif form == "l":
                text = f"long({self._use(v, 'v')})"
            else:
                text = f"{'enter_input' if v in self.program.inputs else 'enter'}({self._use(v, 'v')})"
            name = f"{form}{v}"
            if v in self.constant:  # made once, now
                self.globals[name] = eval(text, self.globals)
            else:
                self.lines.append(f"{name} = {text}")
            self.names[v, form] = name
        return self.names[v, form]

    def _operand(self, k: int, s: Step, i: int, form: str) -> str:
        v = s.ins[i]
        if isinstance(v, int):
            return self._use(v, form)
        name = f"c{k}_{i}"  # a literal becomes a tensor once, not per call
        value = torch.tensor(
            internals.literal_value(v), dtype=to_torch(s.in_avals[i].dtype), device=self.backend.device
        )
        self.globals[name] = self.backend.enter(value) if form == "r" else value
        return name

    def _output(self, i: int, v: Any) -> str:
        v = self._folded(v)
        if isinstance(v, int):
            return self._use(v, "v")
        name = f"o{i}"
        self.globals[name] = torch.tensor(
            internals.literal_value(v), dtype=to_torch(v.aval.dtype), device=self.backend.device
        )
        return name

    def _step(self, k: int, s: Step) -> None:
        s = replace(s, ins=[self._folded(v) for v in s.ins])
        if s.name == "convert_element_type" and not isinstance(s.ins[0], int):
            value = np.asarray(internals.literal_value(s.ins[0])).astype(s.out_avals[0].dtype)
            self.folded[s.outs[0]] = _Folded(value, s.out_avals[0])
            return
        if s.kind == "region":
            fn = self.backend.region(lookup(s.name), s.in_avals, s.params)
            self.calls[f"f{k}"] = s
            args = [self._operand(k, s, i, "r") for i in range(len(s.ins))]
            self._emit(k, fn, args, s.outs, "r", tuple_result=True)
            return
        if s.name == "iota" or s.name == "axis_index":
            make = rules.iota(s, self.backend.device) if s.name == "iota" else self._collective(s)
            self._constant(s.outs[0], make())
            return
        if s.kind == "scan":
            fn, several = self._scan(s), True
        elif s.kind == "collective":
            fn, several = self._collective(s), len(s.outs) > 1
        elif s.name == "scatter":
            fn, several = rules.scatter(s, k in self.writes), False
        elif s.name in rules.RULES:
            fn = rules.RULES[s.name](s, self.backend.device)
            several = len(s.outs) > 1 or s.name in ("split", "unstack")
        else:
            raise Refused(f"{s.name} at {s.where}: torch has no rule for it")
        forms = ["l" if s.name == "scatter" and i == 1 else "v" for i in range(len(s.ins))]
        args = [self._operand(k, s, i, f) for i, f in enumerate(forms)]
        self._emit(k, fn, args, s.outs, "v", tuple_result=several)

    def _emit(self, k: int, fn: Any, args: list[str], outs: list[int], form: str, *, tuple_result: bool) -> None:
        self.globals[f"f{k}"] = fn
        names = [f"{form}{o}" for o in outs]
        self.lines.append(f"{', '.join(names)}{',' if tuple_result else ''} = f{k}({', '.join(args)})")
        for o, name in zip(outs, names, strict=True):
            self.names[o, form] = name
            if form == "r" and not self.backend.converts:
                self.names[o, "v"] = name

    def _collective(self, s: Step) -> Callable[..., Any]:
        if s.name not in COLLECTIVES:
            raise Refused(f"{s.name} at {s.where}: torch has no rule for it")
        return COLLECTIVES[s.name](s, self.backend.device, self.groups)

    def _scan(self, s: Step) -> Callable[..., Any]:
        body = _Code(s.params["program"], self.backend, self.groups, frozenset(), False).function
        n_consts, n_carry = internals.scan_operands(s.params, len(s.ins))
        n, backwards = s.params["length"], s.params["reverse"]
        stacked = [(tuple(a.shape), to_torch(a.dtype)) for a in s.out_avals[n_carry:]]
        device, order = self.backend.device, range(n - 1, -1, -1) if backwards else range(n)

        def scan(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            consts, carry, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
            ys: list[Any] = [None] * n
            for i in order:
                outs = body(*consts, *carry, *[x[i] for x in xs])
                carry, ys[i] = outs[:n_carry], outs[n_carry:]
            if not n:
                return (*carry, *[torch.empty(shape, dtype=dtype, device=device) for shape, dtype in stacked])
            return (*carry, *[torch.stack(y) for y in zip(*ys, strict=True)])

        return scan


__all__ = ["Compiled", "compile_program", "narrow", "prepare"]
