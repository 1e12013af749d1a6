"""Programs: a function traced into region calls, data movement, integer index arithmetic and collectives.

Whatever else the function does is refused by name and source line, so coverage is complete by construction. The same
Program runs under jax.jit (isojax.runtime) and in torch (bridges.torch_ops).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from isojax import _jax_internals as internals
from isojax import region as region_module
from isojax.errors import Refused

MOVE = frozenset(
    "reshape transpose slice dynamic_slice gather scatter concatenate broadcast_in_dim squeeze expand_dims rev split "
    "stack unstack tile pad select_n copy copy_p pvary pbroadcast reduced_vary_cast_p optimization_barrier "
    "stop_gradient name".split()
)
INDEX = frozenset(
    "add sub mul div rem neg sign abs max min clamp and or xor not shift_left shift_right_logical "
    "shift_right_arithmetic eq ne lt le gt ge iota cumsum convert_element_type reduce_sum reduce_max "
    "reduce_min reduce_or reduce_and".split()
)
COLLECTIVE = frozenset(("all_gather", "all_to_all", "ppermute", "axis_index"))
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "shard_map": "jaxpr",
}
CONST_LIMIT = 4096  # bytes; a larger closed-over array is a captured weight, and would escape the contract


@dataclass
class Step:
    """One equation. kind: region, move, index, collective, scan. Values are ints (variables) or literals."""

    kind: str
    name: str
    params: dict[str, Any]
    ins: list[Any]
    outs: list[int]
    in_avals: list[Any]
    out_avals: list[Any]
    where: str = ""


@dataclass
class Program:
    """A traced function. Flat inputs and outputs are variable numbers; `in_tree`/`out_tree` restore the structure."""

    inputs: list[int]
    outputs: list[Any]
    steps: list[Step]
    consts: dict[int, Any]
    in_avals: list[Any] = field(default_factory=list)
    out_avals: list[Any] = field(default_factory=list)
    in_tree: Any = None
    out_tree: Any = None
    input_names: list[str] = field(default_factory=list)

    def regions(self) -> list[str]:
        """Names of the regions called, in order, with repeats."""
        out: list[str] = []
        for s in self.steps:
            if s.kind == "region":
                out.append(s.name)
            elif s.kind == "scan":
                out += s.params["program"].regions() * s.params["length"]
        return out

    def calls(self) -> list[Step]:
        """The distinct region calls (name, statics, operand shapes): what has to be compiled."""
        seen: dict[Any, Step] = {}
        for s in self.steps:
            if s.kind == "region":
                seen.setdefault(call_key(s), s)
            elif s.kind == "scan":
                for inner in s.params["program"].calls():
                    seen.setdefault(call_key(inner), inner)
        return list(seen.values())


def call_key(step: Step) -> Any:
    """What makes two region calls the same compiled function."""
    avals = tuple((tuple(a.shape), str(a.dtype)) for a in step.in_avals)
    return step.name, tuple(sorted(step.params.items(), key=lambda kv: kv[0])), avals


def rows(x: jax.Array, i: jax.Array) -> jax.Array:
    """x[i] for in-range i: one gather, with no clamping and no negative wrap, the same in JAX and torch."""
    return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)


def put(x: jax.Array, i: jax.Array, v: jax.Array) -> jax.Array:
    """x with rows i replaced by v, for in-range i. With a donated x the executors write in place.

    Repeated indices are allowed only where the value is never read (the null block): which write wins is open.
    """
    return x.at[i].set(v, mode="promise_in_bounds", wrap_negative_indices=False)


def trace(fn: Callable[..., Any], *specs: Any, backward: bool = False) -> Program:
    """Trace `fn(*specs)`; specs are pytrees of jax.ShapeDtypeStruct (or arrays, of which only the shape is used).

    Raises: Refused, naming the first operation that is neither a region nor data movement, and its source line.
    """
    specs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*specs)
    walker = _Walker(backward)
    inputs = [walker.new() for _ in closed.jaxpr.invars]
    outputs = walker.walk(closed.jaxpr, closed.consts, inputs, ())
    flat, in_tree = jax.tree.flatten_with_path(specs)
    return Program(
        inputs,
        outputs,
        _prune(walker.steps, outputs),
        walker.consts,
        [v.aval for v in closed.jaxpr.invars],
        list(closed.out_avals),
        in_tree,
        jax.tree.structure(out_shape),
        [jax.tree_util.keystr(path) for path, _ in flat],
    )


def trace_vjp(fn: Callable[..., Any], *specs: Any, diff: Sequence[int] = (0,)) -> tuple[Program, Program]:
    """(forward, backward) Programs of fn.

    forward: args -> (outputs, residuals); it calls the same regions as `trace(fn, *specs)`.
    backward: (residuals, output cotangents) -> gradients of args[diff].
    """
    specs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    box: dict[str, Any] = {}

    def forward(*args: Any) -> Any:
        def of_diff(*d: Any) -> Any:
            full = list(args)
            for i, x in zip(diff, d, strict=True):
                full[i] = x
            return fn(*full)

        out, pull = jax.vjp(of_diff, *[args[i] for i in diff])
        res, box["tree"] = jax.tree.flatten(pull)
        return out, res

    fwd = trace(forward, *specs)
    out, res = jax.tree.unflatten(fwd.out_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in fwd.out_avals])
    bwd = trace(lambda r, ct: jax.tree.unflatten(box["tree"], r)(ct), res, out, backward=True)
    return fwd, bwd


def accumulating(program: Program) -> tuple[Program, tuple[int, ...]]:
    """(program, outputs): the same Program where each of these outputs is added to a further input of its own shape.

    They are the outputs that come straight from a region which can add to an operand (`Region.adds`) and that nothing
    else reads: gradients of weights, say. The further inputs come last, in the order of the outputs.
    """
    read = Counter(v for s in program.steps for v in s.ins if isinstance(v, int))
    read.update(v for v in program.outputs if isinstance(v, int))
    number = itertools.count(1 + max([*program.inputs, *program.consts, *(o for s in program.steps for o in s.outs)]))
    steps, inputs, avals, added = list(program.steps), list(program.inputs), list(program.in_avals), []
    for k, s in enumerate(steps):
        region = region_module.REGISTRY[s.name] if s.kind == "region" else None
        if region is None or region.adds is None or region.owned(s.params) is not None:
            continue
        operand, output = region.adds
        result = s.outs[output]
        if result not in program.outputs or read[result] != 1:
            continue
        position = region.operands.index(operand)
        params = dict(s.params, _absent=tuple(i for i in s.params["_absent"] if i != position))
        if not params["_absent"]:
            del params["_absent"]
        at, fresh, aval = region.owned(params), next(number), s.out_avals[output]
        put_in = lambda xs, x, at=at: [*xs[:at], x, *xs[at:]]
        steps[k] = replace(s, params=params, ins=put_in(s.ins, fresh), in_avals=put_in(s.in_avals, aval))
        added.append((program.outputs.index(result), fresh, aval))
    added.sort(key=lambda x: x[0])
    inputs += [fresh for _, fresh, _ in added]
    avals += [aval for *_, aval in added]
    made = replace(program, steps=steps, inputs=inputs, in_avals=avals, in_tree=None, input_names=[])
    return made, tuple(i for i, *_ in added)


def _integral(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == jnp.bool_


class _Walker:
    def __init__(self, backward: bool):
        self.backward = backward
        self.counter = itertools.count()
        self.steps: list[Step] = []
        self.consts: dict[int, Any] = {}

    def new(self) -> int:
        return next(self.counter)

    def walk(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], stack: tuple[Any, ...]) -> list[Any]:
        env: dict[Any, Any] = {}

        def read(v: Any) -> Any:
            return v if isinstance(v, internals.Literal) else env[v]

        for v, c in zip(jaxpr.constvars, consts, strict=True):
            env[v] = self.new()
            if getattr(c, "nbytes", 0) > CONST_LIMIT:
                raise Refused(
                    f"a closed-over array of shape {tuple(c.shape)} ({c.nbytes} bytes) escapes the contract; "
                    "pass it as an argument"
                )
            self.consts[env[v]] = c
        env.update(zip(jaxpr.invars, args, strict=True))
        for e in jaxpr.eqns:
            ins = [read(v) for v in e.invars]
            name = e.primitive.name
            if name in CALLS and region_module.by_primitive(e.primitive) is None:
                sub, sub_consts = internals.sub_jaxpr(e, CALLS[name])
                env.update(zip(e.outvars, self.walk(sub, sub_consts, ins, (*stack, e)), strict=True))
                continue
            kind, name, params = self.classify(e, ins, stack)
            outs = [self.new() for _ in e.outvars]
            env.update(zip(e.outvars, outs, strict=True))
            in_avals, out_avals = [v.aval for v in e.invars], [v.aval for v in e.outvars]
            self.steps.append(Step(kind, name, params, ins, outs, in_avals, out_avals, where(e, stack)))
        return [read(v) for v in jaxpr.outvars]

    def classify(self, e: Any, ins: list[Any], stack: tuple[Any, ...]) -> tuple[str, str, dict[str, Any]]:
        name, params = e.primitive.name, e.params
        avals = [v.aval for v in (*e.invars, *e.outvars)]
        if region_module.by_primitive(e.primitive) is not None:
            return "region", name, params
        if name == "scan" and not params["jaxpr"].effects:
            body = params["jaxpr"]
            inner = _Walker(self.backward)
            fresh = [inner.new() for _ in body.jaxpr.invars]
            outs = inner.walk(body.jaxpr, body.consts, fresh, (*stack, e))
            program = Program(fresh, outs, _prune(inner.steps, outs), inner.consts, [v.aval for v in body.jaxpr.invars])
            return "scan", name, dict(params, program=program)
        if name in MOVE:
            if name in ("gather", "scatter") and params["mode"] != jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS:
                raise Refused(
                    f"{name} at {where(e, stack)}: out-of-range indices differ between JAX and torch; "
                    "use isojax.program.rows and put"
                )
            return "move", name, params
        if name in INDEX and all(map(_integral, avals)):
            return "index", name, params
        if name in COLLECTIVE:
            return "collective", name, params
        if name == "convert_element_type" and isinstance(ins[0], internals.Literal):
            return "move", name, params  # a constant: folded when compiled
        if name == "add_any" and self.backward:
            raise Refused(
                f"two gradients meet at {where(e, stack)} and JAX would add them in its own order; "
                "use isojax.program.fan where a value is read more than once"
            )
        why = "changes a floating dtype" if name == "convert_element_type" else "is arithmetic"
        raise Refused(f"{name} at {where(e, stack)} {why} outside a region; no contract covers it")


def _prune(steps: list[Step], outputs: Sequence[Any]) -> list[Step]:
    """Drop what no output needs. Runs after every step was checked: dead arithmetic is refused too."""
    live = {v for v in outputs if isinstance(v, int)}
    kept = []
    for s in reversed(steps):
        if s.kind == "collective" or any(o in live for o in s.outs):
            live |= {v for v in s.ins if isinstance(v, int)}
            kept.append(s)
    return kept[::-1]


def where(eqn: Any, stack: tuple[Any, ...] = ()) -> str:
    """The user's source line of an equation.

    jnp functions are jitted and cached, and the inner equation carries the line of their first caller: so step out of
    library callees before looking for a user frame.
    """
    for call in reversed(stack):
        key = CALLS.get(call.primitive.name, "jaxpr")
        source = internals.func_source(internals.sub_jaxpr(call, key)[0])
        if not any(d in source for d in ("/jax/", "/flax/")):
            break
        eqn = call
    for f in internals.user_frames(eqn):
        if "/flax/" not in f.file_name and f.file_name not in (__file__, region_module.__file__):
            return f"{f.file_name}:{f.start_line}"
    return "an unknown line"


def fan(x: jax.Array, n: int) -> tuple[jax.Array, ...]:
    """x, n times. Its backward is one `grad.accumulate` region: fp32 sum in order of use, one rounding."""
    return _fan(n)(x)


@functools.cache
def _fan(n: int) -> Callable[..., Any]:
    def copy(x: jax.Array) -> tuple[jax.Array, ...]:
        return (x,) * n

    def backward(_: Any, cts: tuple[jax.Array, ...]) -> tuple[jax.Array]:
        return (region_module.lookup("grad.accumulate")(*cts),)

    f = jax.custom_vjp(copy)
    f.defvjp(lambda x: (copy(x), None), backward)
    return f
