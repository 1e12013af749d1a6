"""Views of an index that a Program makes many times over, each made once.

Every layer that writes a cache reshapes the same slots. torch takes a 64-bit index, so each of those views would cost a
kernel that widens it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from bridges.torch_ops.inplace import VIEWS
from isojax.program import Program


def shared(program: Program) -> Program:
    """The same Program, where a view of an integer value that equals an earlier one is that one."""
    first: dict[Any, int] = {}
    same: dict[int, int] = {}
    of = lambda v: same.get(v, v) if isinstance(v, int) else v
    steps = []
    for s in program.steps:
        s = replace(s, ins=[of(v) for v in s.ins])
        if s.name in VIEWS and len(s.ins) == len(s.outs) == 1 and isinstance(s.ins[0], int):
            aval = s.out_avals[0]
            if jnp.issubdtype(aval.dtype, jnp.integer):
                key = s.name, s.ins[0], aval.shape, aval.dtype, repr(s.params)
                same[s.outs[0]] = first.setdefault(key, s.outs[0])
                if same[s.outs[0]] != s.outs[0]:
                    continue
        steps.append(s)
    return replace(program, steps=steps, outputs=[of(v) for v in program.outputs])
