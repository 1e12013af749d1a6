"""Run a region's gates on one arch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isojax import region as regions
from isojax.errors import RegionError, Unavailable
from isojax.gates import rowgate
from isojax.gates.case import Case, Context, GateBroken, GateResult
from isojax.region import Region

Execute = Callable[..., tuple[np.ndarray, ...]]  # (region, args, statics) -> all outputs


def device(arch: str) -> Any:
    """The JAX device that runs `arch`. Raises Unavailable for sm90 without a GPU that JAX can see."""
    if arch == "cpu":
        return jax.devices("cpu")[0]
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as e:
        raise Unavailable(
            f"gates on {arch} need a GPU in JAX ({str(e).splitlines()[0]}); install the gpu extra, and do not set "
            "JAX_PLATFORMS=cpu"
        ) from None


class Jitted:
    """Execute through jax.jit on one device, each (region, statics) traced once and compiled once per shape."""

    def __init__(self, arch: str):
        self.device, self.cache = device(arch), {}

    def __call__(self, region: Region, args: Sequence[Any], statics: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        fn = lambda *a, **kw: region.all_outputs(*a, **kw)
        return self.function(region.name, fn, args, statics)

    def function(
        self, name: Any, fn: Callable[..., Any], args: Sequence[Any], statics: Mapping[str, Any]
    ) -> tuple[np.ndarray, ...]:
        """Any jnp function, cached by `name`, on the same device."""
        absent = tuple(i for i, a in enumerate(args) if a is None)
        key = (name, len(args), absent, tuple(sorted(statics.items())))
        if key not in self.cache:

            def call(*present):
                it = iter(present)
                return fn(*[None if i in absent else next(it) for i in range(len(args))], **statics)

            # XLA on a GPU would drop a rounding that an altered implementation writes, and with it the alteration
            self.cache[key] = jax.jit(call, compiler_options={"xla_allow_excess_precision": False})
        out = self.cache[key](*[jax.device_put(a, self.device) for a in args if a is not None])
        return tuple(np.asarray(o) for o in (out if isinstance(out, (tuple, list)) else (out,)))


def cases(name: str, rng: np.random.Generator, rows: int) -> list[Any]:
    """The region's Cases and custom gates. Raises RegionError where it has none."""
    region = regions.lookup(name)
    if region.cases is None:
        raise RegionError(f"region {name} has no gate; define one with @region.gate_cases")
    made = region.cases(rng, rows)
    return list(made) if isinstance(made, (list, tuple)) and not isinstance(made, Case) else [made]


def run_gate(
    name: str, arch: str = "cpu", quick: bool = False, *, execute: Execute | None = None, seed: int = 0
) -> list[GateResult]:
    """Results of all gates of a region, negative controls first. See `each_gate`."""
    return list(each_gate(name, arch, quick, execute=execute, seed=seed))


def each_gate(
    name: str, arch: str = "cpu", quick: bool = False, *, execute: Execute | None = None, seed: int = 0
) -> Iterator[GateResult]:
    """Run a region's gates one after another; each result as it comes.

    arch: 'cpu' (the reference) or 'sm90' (the kernel, through jax.jit on a GPU). quick: batches up to 65 rows only.
    execute: runs a region in place of jax.jit, for instance the interpreter or a runtime's launcher.

    Raises: GateBroken where a negative control passed, Unavailable where the arch cannot run here, RegionError where
    the region is unknown or has no gate.
    """
    region, jitted = regions.lookup(name), Jitted(arch if execute is None else "cpu")
    batches = rowgate.QUICK_BATCHES if quick else rowgate.BATCHES
    rng = np.random.default_rng(seed)
    context = Context(arch, quick, rng, execute or jitted)
    for item in cases(name, rng, max(batches)):
        if isinstance(item, Case):
            yield _row_case(region, item, arch, context.execute, jitted, batches, seed)
        else:
            label, gate = item
            result = gate(context)
            if not result.negative_control_caught:
                raise GateBroken(f"{name}/{label}: a negative control passed; {result.detail}")
            yield result


def _row_case(
    region: Region, case: Case, arch: str, execute: Execute, jitted: Jitted, batches: Sequence[int], seed: int
) -> GateResult:
    name, tile = f"{region.name}/{case.name}", rowgate.TILE[arch]
    if not region.rows:
        raise RegionError(f"region {region.name} has no row operands; its gate has to be a custom one")
    run = lambda args: execute(region, args, case.statics)
    altered = rowgate.controls(region, case, run, tile)
    if (deviant := case.altered) is not None:
        altered["altered arithmetic"] = lambda args: jitted.function(deviant, deviant, args, case.statics)
    for control, fn in altered.items():
        if not rowgate.check(region, case, fn, tile, batches, seed, first_only=True).differing:
            raise GateBroken(f"{name}: the gate did not catch its negative control '{control}'")
    diff = rowgate.check(region, case, run, tile, batches, seed)
    return GateResult(name, diff.checked, diff.differing, True, diff.first or f"caught: {', '.join(altered)}")


def gated() -> list[str]:
    """Names of the registered regions that have gates."""
    regions.load_shipped()
    return sorted(n for n, r in regions.REGISTRY.items() if r.cases is not None)
