"""Which `put`s of a Program may write into a donated input, and the proof that nobody sees the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isojax.errors import Refused
from isojax.program import Program, Step

# Steps whose torch form may return the operand itself or a view of it.
VIEWS = frozenset(
    "reshape transpose slice squeeze expand_dims broadcast_in_dim split unstack dynamic_slice convert_element_type "
    "copy copy_p pvary pbroadcast reduced_vary_cast_p optimization_barrier stop_gradient name".split()
)
FOREVER = 1 << 60


def last_uses(program: Program) -> dict[int, int]:
    """Variable -> index of the last step that reads it; FOREVER for outputs."""
    last = {v: k for k, s in enumerate(program.steps) for v in s.ins if isinstance(v, int)}
    return last | {v: FOREVER for v in program.outputs if isinstance(v, int)}


def _roots_of_outs(s: Step, roots: dict[int, frozenset[int]]) -> list[frozenset[int]]:
    of = lambda v: roots.get(v, frozenset()) if isinstance(v, int) else frozenset()
    if s.name == "optimization_barrier":
        return [of(v) for v in s.ins]
    if s.kind == "scan" or s.name in VIEWS:  # a scan may hand an operand through as its carry
        every = frozenset().union(*map(of, s.ins))
        return [every] * len(s.outs)
    return [frozenset()] * len(s.outs)


def plan_writes(program: Program, donate: Sequence[int]) -> frozenset[int]:
    """Indices of the steps that write in place into the donated flat inputs.

    A value's roots are the inputs whose memory it may share. A `put` into a value rooted in one donated input is done
    in place if no value that shares this memory, except its own result, is read at or after the step.

    Raises: Refused, naming the step, where that cannot be shown, or where a donated input is never written.
    """
    donated = {program.inputs[i]: i for i in donate}
    roots: dict[int, frozenset[int]] = {v: frozenset((v,)) for v in program.inputs}
    last, planned, written = last_uses(program), set(), set()
    for k, s in enumerate(program.steps):
        target = s.ins[0] if s.name == "scatter" else None
        buffers: Any = roots.get(target, frozenset()) if isinstance(target, int) else frozenset()
        outs = _roots_of_outs(s, roots)
        if buffers & donated.keys():
            what = f"the write at {s.where} into donated input {', '.join(str(donated.get(b, b)) for b in buffers)}"
            if len(buffers) > 1:
                raise Refused(f"{what} cannot be done in place: its target may be any of several inputs")
            if any(isinstance(v, int) and roots.get(v, frozenset()) & buffers for v in s.ins[1:]):
                raise Refused(f"{what} reads the buffer it writes; copy the rows with isojax.program.rows first")
            late = [v for v, r in roots.items() if r & buffers and last.get(v, -1) > k]
            if late:
                raise Refused(
                    f"{what} cannot be done in place: the buffer is still read {_reader(program, late[0], last)}; "
                    "read the result of the write instead, or do not donate the input"
                )
            planned.add(k)
            written |= buffers
            outs = [buffers]
        roots.update(zip(s.outs, outs, strict=True))
    for v, i in donated.items():
        if v not in written:
            raise Refused(f"input {i} is donated but no put writes into it")
    return frozenset(planned)


def _reader(program: Program, v: int, last: dict[int, int]) -> str:
    return "by the caller, as an output" if last[v] == FOREVER else f"at {program.steps[last[v]].where}"
