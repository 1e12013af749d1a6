"""Regions: named spans of arithmetic, each one JAX primitive with one implementation per arch.

A region is defined by its signature, and then filled in: a reference (the `cpu` implementation and the oracle), a
kernel (`sm90`), and a vjp. From that come the JAX callable, the torch op, the gate, the bench entry and the contract's
composition entry. See docs/tutorial.md.

    @region("norms.rms", version=1, rows=("x",), constants={"accumulate": "float32"})
    def rms(x: BF16["T D"], weight: BF16["D"], *, eps: float) -> tuple[BF16["T D"], F32["T"]]: ...

    rms.reference(reference.rms)
    rms.kernel("sm90", kernel_sm90.rms)
    rms.vjp(vjp.rms)
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from isojax import _jax_internals as internals
from isojax.errors import IsoError, RegionError, Unsupported

ARCHS = ("cpu", "sm90")
REGISTRY: dict[str, Region] = {}


@dataclass(frozen=True)
class Implementation:
    """What runs for a region on one arch.

    kind: 'kernel' (Pallas, Mosaic GPU), 'reference' (the schedule in jnp, through XLA), or 'xla' (a reference that
    stands in on sm90 for a kernel not written yet: always declared, never a fallback).
    supports: called with the avals and statics before anything runs; raises `Unsupported`.
    """

    arch: str
    kind: str
    fn: Callable[..., Any]
    supports: Callable[..., None] | None = None


class Call(NamedTuple):
    """One call of a region by shapes: operands (ShapeDtypeStruct or None where absent) and statics."""

    args: tuple[Any, ...]
    statics: dict[str, Any]


class Residuals(NamedTuple):
    """What a vjp receives: the region's operands (None where absent) and all of its outputs."""

    args: tuple[Any, ...]
    outs: tuple[Any, ...]


class Region:
    """A named span of arithmetic. Built by `region(...)`; call it like a function on JAX arrays.

    Calling returns the primary outputs (the first `outputs`). The rest are residuals for the vjp, which the region
    always computes, so that scoring and training bind the very same primitive.
    """

    def __init__(
        self,
        name: str,
        signature: Callable[..., Any],
        *,
        version: int,
        rows: Sequence[str],
        constants: Mapping[str, Any],
        outputs: int,
        backward: bool,
        adds: tuple[str, int] | None = None,
    ):
        self.name, self.version, self.outputs, self.is_backward = name, version, outputs, backward
        self.adds = adds
        self.constants = dict(constants)
        self.__doc__ = signature.__doc__
        self.signature = inspect.signature(signature)
        params = self.signature.parameters.values()
        self.operands = tuple(p.name for p in params if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in params)
        self.statics = tuple(p.name for p in params if p.kind is p.KEYWORD_ONLY)
        self.axes = {n: _axes(str(self.signature.parameters[n].annotation)) for n in self.operands}
        unknown = set(rows) - set(self.operands)
        if unknown:
            raise RegionError(f"region {name}: rows {sorted(unknown)} are no operands; operands are {self.operands}")
        if adds is not None and adds[0] not in self.operands:
            raise RegionError(f"region {name}: adds to {adds[0]!r}, which is no operand; operands are {self.operands}")
        self.rows = tuple(rows)
        self.impl: dict[str, Implementation] = {}
        self.backward: Callable[..., tuple[Any, ...]] | None = None
        self.shape_rule: Callable[..., Sequence[Any]] | None = None
        self.canonical: Callable[[], list[Call]] | None = None
        self.cases: Callable[..., Any] | None = None
        self.bench: Callable[..., Any] | None = None
        self.primitive = internals.new_primitive(name, self._abstract_eval, self._run)

    # -- filling in -------------------------------------------------------------------------------------------------
    def reference(self, fn: Callable[..., Any], *, supports: Callable[..., None] | None = None) -> Callable[..., Any]:
        """Set the `cpu` implementation: the same schedule in jnp. It returns all outputs, residuals last."""
        self.impl["cpu"] = Implementation("cpu", "reference", fn, supports)
        return fn

    def kernel(
        self, arch: str, fn: Callable[..., Any], *, supports: Callable[..., None] | None = None, kind: str = "kernel"
    ) -> Callable[..., Any]:
        """Set the implementation for a GPU arch. `kind='xla'` declares a reference run by XLA instead of a kernel."""
        if arch not in ARCHS:
            raise RegionError(f"region {self.name}: arch {arch!r} is unknown; known are {ARCHS}")
        self.impl[arch] = Implementation(arch, kind, fn, supports)
        return fn

    def vjp(self, fn: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Set the backward: `fn(Residuals, cotangents, **statics)` -> one gradient (or None) per operand.

        It is itself made of regions, so that the backward program is covered like the forward one.
        """
        self.backward = fn
        self._callable.cache_clear()
        return fn

    def shapes(self, fn: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """Set the outputs' shapes: `fn(*avals, **statics)`, an aval None where it is absent -> a ShapeDtypeStruct each.

        Without it the reference is traced for every new shape, which takes tens of milliseconds: an engine traces its
        model for dozens of row counts at each start. With it, what the reference would refuse has to be refused by its
        `supports` or by fn. Under a mesh the reference is traced all the same.
        """
        self.shape_rule = fn
        return fn

    def canonical_calls(self, fn: Callable[[], list[Call]]) -> Callable[[], list[Call]]:
        """Set the calls whose lowered modules are hashed into a contract's artifact for this region."""
        self.canonical = fn
        return fn

    def gate_cases(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Set the maker of the gate's operands; see isojax.gates."""
        self.cases = fn
        return fn

    def bench_cases(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Set the maker of benchmark shapes; see isojax.gates.bench."""
        self.bench = fn
        return fn

    # -- calling ----------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **statics: Any) -> Any:
        args, statics = self.bind(args, statics)
        return self._callable(tuple(sorted(statics.items())))(*args)

    def all_outputs(self, *args: Any, **statics: Any) -> tuple[Any, ...]:
        """Like calling, with the residual outputs too and without a vjp."""
        args, statics = self.bind(args, statics)
        return tuple(self.primitive.bind(*internals.auto_insert_reshard(*args), **statics))

    def bind(self, args: tuple[Any, ...], statics: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normalise one call: defaults filled in, absent operands (None) dropped and remembered in `_absent`.

        Raises RegionError where the call does not fit the signature.
        """
        statics = dict(statics)
        absent = statics.pop("_absent", None)
        if absent is None:
            try:
                bound = self.signature.bind(*args, **statics)
            except TypeError as e:
                raise RegionError(f"region {self.name}{self.signature}: {e}") from None
            bound.apply_defaults()
            args, statics = bound.args, dict(bound.kwargs)
            self._check_axes(args)
            absent = tuple(i for i, a in enumerate(args) if a is None)
            args = tuple(a for a in args if a is not None)
        if absent:
            statics["_absent"] = absent
        return args, statics

    def _check_axes(self, args: Sequence[Any]) -> None:
        sizes: dict[str, tuple[int, str]] = {}
        for name, x in zip(self.operands, args, strict=False):
            axes, shape = self.axes[name], self.signature.parameters[name].annotation
            if axes is None or x is None:
                continue
            if len(x.shape) != len(axes):
                raise RegionError(
                    f"region {self.name}: operand {name} has shape {tuple(x.shape)}; it takes {len(axes)} axes, {shape}"
                )
            for axis, size in zip(axes, x.shape, strict=True):
                named = axis.isidentifier() and not axis.startswith("_")  # jaxtyping leaves the others unchecked
                if named and sizes.setdefault(axis, (size, name))[0] != size:
                    other, first = sizes[axis]
                    raise RegionError(
                        f"region {self.name}: operand {name} has shape {tuple(x.shape)}; it takes {shape}, and {axis} "
                        f"is {other} in {first}"
                    )

    def expand(self, args: Sequence[Any], statics: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Undo `bind`: absent operands come back as None."""
        kw = dict(statics)
        full = list(args)
        for i in kw.pop("_absent", ()):
            full.insert(i, None)
        return full, kw

    def implementation(self, arch: str) -> Implementation:
        """The implementation on `arch`; raises Unsupported where there is none."""
        if arch not in self.impl:
            have = ", ".join(self.impl) or "none"
            raise Unsupported(self.name, f"arch {arch}", have, f"define it with region.kernel({arch!r}, ...)")
        return self.impl[arch]

    def check(self, arch: str, avals: Sequence[Any], statics: Mapping[str, Any]) -> None:
        """Raise Unsupported unless the arch's implementation takes these operands."""
        impl = self.implementation(arch)
        if impl.supports is not None:
            full, kw = self.expand(avals, statics)
            impl.supports(*full, **kw)

    def owned(self, statics: Mapping[str, Any]) -> int | None:
        """Position, among the operands that are present, of the one that an output is added to; None where absent."""
        absent = statics.get("_absent", ())
        if self.adds is None or (at := self.operands.index(self.adds[0])) in absent:
            return None
        return at - sum(i < at for i in absent)

    def out_avals(self, avals: Sequence[Any], statics: Mapping[str, Any]) -> tuple[Any, ...]:
        """Shapes and dtypes of all outputs."""
        return self._abstract_eval(*avals, **statics)

    # -- the primitive ----------------------------------------------------------------------------------------------
    def _run(self, arch: str, *args: Any, **statics: Any) -> list[Any]:
        impl = self.implementation(arch)
        self.check(arch, args, statics)
        # XLA must not fuse arithmetic across a region's border: it would contract or reassociate there.
        fenced = impl.kind != "kernel"
        if fenced and args:
            args = jax.lax.optimization_barrier(args)
        full, kw = self.expand(args, statics)
        out = impl.fn(*full, **kw)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        return list(jax.lax.optimization_barrier(out)) if fenced else out

    def _abstract_eval(self, *avals: Any, **statics: Any) -> tuple[Any, ...]:
        # strip weak types so that a Python scalar and an array of its value trace alike
        return self._shapes(tuple(a.strip_weak_type() for a in avals), tuple(sorted(statics.items())))

    @functools.cache  # noqa: B019  regions live as long as the process
    def _shapes(self, avals: tuple[Any, ...], statics: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
        if self.shape_rule is not None and all(a.sharding.mesh.empty for a in avals):
            self.check("cpu", avals, dict(statics))
            full, kw = self.expand(avals, dict(statics))
            return tuple(ShapedArray(o.shape, o.dtype) for o in self.shape_rule(*full, **kw))
        return self.traced_shapes(avals, statics)

    def traced_shapes(self, avals: Sequence[Any], statics: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
        """Shapes and dtypes of all outputs, as the reference has them."""
        run = functools.partial(self._run, "cpu", **dict(statics))
        return tuple(jax.make_jaxpr(run)(*avals).out_avals)

    @functools.cache  # noqa: B019
    def _callable(self, statics: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        kw = dict(statics)

        def primary(outs: Sequence[Any]) -> Any:
            return outs[0] if self.outputs == 1 else tuple(outs[: self.outputs])

        def call(*args: Any) -> Any:
            return primary(self.primitive.bind(*internals.auto_insert_reshard(*args), **kw))

        def forward(*args: Any) -> Any:
            outs = self.primitive.bind(*internals.auto_insert_reshard(*args), **kw)
            return primary(outs), (args, tuple(outs))

        def backward(res: Any, cts: Any) -> tuple[Any, ...]:
            args, outs = res
            full, user = self.expand(args, kw)
            assert self.backward is not None
            grads = self.backward(Residuals(tuple(full), outs), cts, **user)
            if not self.variadic and len(grads) != len(full):
                raise RegionError(f"region {self.name}: its vjp gave {len(grads)} gradients for {len(full)} operands")
            return tuple(g for g, a in zip(grads, full, strict=True) if a is not None)

        call.__name__ = self.name
        if self.backward is None:
            return call
        fn = jax.custom_vjp(call)
        fn.defvjp(forward, backward)
        return fn

    def __repr__(self) -> str:
        return f"<region {self.name} v{self.version}: {', '.join(sorted(self.impl)) or 'empty'}>"


def _axes(annotation: str) -> tuple[str, ...] | None:
    """The axes that a jaxtyping annotation names, or None where it leaves them open."""
    found = re.search(r"""Array, ['"]([^'"]*)['"]""", annotation)
    return None if found is None or "..." in found.group(1) else tuple(found.group(1).split())


def region(
    name: str,
    *,
    version: int = 1,
    rows: Sequence[str] = (),
    constants: Mapping[str, Any] | None = None,
    outputs: int = 1,
    backward: bool = False,
    adds: tuple[str, int] | None = None,
) -> Callable[[Callable[..., Any]], Region]:
    """Define and register a region from its signature: positional operands, keyword-only statics.

    Args:
      name: 'family.part', unique.
      version: raise it whenever the bits change.
      rows: operands with one independent row per token; the gate tests those alone, in batches, at any position.
      constants: what fixes the bits besides operands and statics (leaves, tile heights, rounding points); it goes into
        the contract's numerical policy.
      outputs: how many outputs callers see; further outputs are residuals for the vjp.
      backward: True for regions that only backward programs use.
      adds: (operand, output) of an optional fp32 operand that this output is added to, in one rounding. A launcher in
        torch writes the sum into that operand's own memory; under jax.jit it is a new array.

    Raises: RegionError for a malformed or taken name.
    """

    def define(signature: Callable[..., Any]) -> Region:
        if name.count(".") < 1 or not all(part.isidentifier() for part in name.split(".")):
            raise RegionError(f"region name {name!r}: use family.part, as in norms.rms")
        if name in REGISTRY:
            raise RegionError(f"region {name} is defined twice; raise its version in place, or choose another name")
        r = Region(
            name,
            signature,
            version=version,
            rows=rows,
            constants=constants or {},
            outputs=outputs,
            backward=backward,
            adds=adds,
        )
        REGISTRY[name] = r
        return r

    return define


def lookup(name: str) -> Region:
    """The registered region of that name; raises RegionError with the nearest names."""
    load_shipped()
    if name not in REGISTRY:
        import difflib

        near = difflib.get_close_matches(name, REGISTRY, n=3) or sorted(REGISTRY)
        raise RegionError(f"no region {name!r}; did you mean {', '.join(near)}?")
    return REGISTRY[name]


def forget(name: str) -> None:
    """Remove a region, so that a notebook or a test can define it anew."""
    REGISTRY.pop(name, None)


@functools.cache
def load_shipped() -> None:
    """Import every kernel family, which registers its regions."""
    import importlib
    import pkgutil

    import isojax.pallas_kernels as families

    for info in pkgutil.iter_modules(families.__path__):
        if info.ispkg:
            family = importlib.import_module(f"{families.__name__}.{info.name}")
            for part in pkgutil.iter_modules(family.__path__):
                if part.name.split("_")[0] in ("canonical", "gate", "bench"):  # gate.py, gate_prep.py, ...
                    importlib.import_module(f"{family.__name__}.{part.name}")


def load_modules(names: Sequence[str]) -> None:
    """Import modules that define regions from outside the package, from the working directory too.

    Raises: RegionError where one cannot be imported, with the place of what it raised.
    """
    import importlib
    import sys
    import traceback

    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as e:
            raise RegionError(f"--load {name}: {e}; give an importable module, as in examples.toy_region") from e
        except IsoError:
            raise
        except Exception as e:  # the module's own mistake, not ours: exit code 2, and where to look
            at = traceback.extract_tb(e.__traceback__)[-1]
            raise RegionError(f"--load {name}: {at.filename}:{at.lineno}: {type(e).__name__}: {e}") from e


def by_primitive(primitive: Any) -> Region | None:
    """The region that a traced equation calls, or None."""
    r = REGISTRY.get(primitive.name)
    return r if r is not None and r.primitive is primitive else None
