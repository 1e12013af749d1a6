"""Lowering on any host: a region's Mosaic module, its fingerprint, and an ahead-of-time sm_90a compile.

Lowering needs no GPU, so anyone can recompute the artifact that a contract names.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from isojax import dumps
from isojax.errors import Unavailable
from isojax.region import Region

MOSAIC_CALL = "mosaic_gpu_v2"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one compiled kernel. Registers are per thread, spills in bytes."""

    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int


def jitted(region: Region, statics: dict[str, Any]) -> Any:
    """jax.jit of one region's primitive with bound statics: the unit that is lowered, launched and hashed."""
    return jax.jit(lambda *args: region.primitive.bind(*args, **statics))


def lower(region: Region, avals: Any, statics: dict[str, Any], platform: str) -> Any:
    """jax.stages.Lowered of one region call for 'cuda' or 'cpu'; needs no device of that platform."""
    return jitted(region, statics).trace(*avals).lower(lowering_platforms=(platform,))


def mosaic_modules(lowered: Any) -> list[bytes]:
    """The serialized Mosaic module of each kernel in a lowered function, in order."""
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    module, found = lowered.compiler_ir(), []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == MOSAIC_CALL:
            found.append(op.attributes["mhlo.backend_config"]["module"].value_bytes)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return found


def canonical_asm(module: bytes) -> str:
    """Text of a Mosaic module without locations and without the name counter that depends on lowering order."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    context = mlir.make_ir_context()
    mgpu.dialect.register_dialect(context)  # pyright: ignore[reportPrivateImportUsage]
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown(context):
        m = ir.Module.parse(module)
        if "mosaic_gpu.dump_basename" in m.operation.attributes:
            del m.operation.attributes["mosaic_gpu.dump_basename"]
        return str(m.operation.get_asm(enable_debug_info=False))


def fingerprint(region: Region, avals: Any, statics: dict[str, Any], arch: str) -> str:
    """SHA-256 of the lowered implementation of one region call: equal in every process, file and call site.

    sm90: the Mosaic modules (of a declared XLA stand-in, its StableHLO). cpu: the StableHLO of the reference.
    """
    from isojax import tuning

    platform = {"cpu": "cpu", "sm90": "cuda"}[arch]
    with tuning.defaults():  # a machine's table moves no identity
        lowered = lower(region, avals, statics, platform)
    digest = hashlib.sha256()
    modules = mosaic_modules(lowered) if arch == "sm90" else []
    for text in [canonical_asm(m) for m in modules] or [_stablehlo(lowered)]:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _stablehlo(lowered: Any) -> str:
    text = lowered.compiler_ir().operation.get_asm(enable_debug_info=False)
    return re.sub(r"module @\S+", "module", text, count=1)  # the name counts lowerings


@functools.cache
def hopper() -> Any:
    """A compile-only H200, from the CUDA plug-in and a target description; no device is opened."""
    from jax.experimental import topologies

    target = Path(__file__).with_name("h200.txtpb").read_text()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="h200", topology="1x1x1", target_config=target
        )
    except Exception as e:
        raise Unavailable(
            f"no ahead-of-time compiler for sm_90a ({e}); install the dev group (jax-cuda13-plugin, nvidia-cuda-nvcc)"
        ) from e
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compile_sm90(fn: Callable[..., Any], *avals: Any) -> list[Resources]:
    """Compile fn(*avals) for sm_90a without a GPU and report every Mosaic kernel's registers and spills.

    Raises: Unavailable without the CUDA plug-in and ptxas.
    """
    return resources(dumped("PTXAS", fn, *avals))


def dumped(what: str, fn: Callable[..., Any], *avals: Any) -> str:
    """What Mosaic tells of the kernels of fn(*avals) while it compiles them for sm_90a: "PTXAS" or "PTX".

    Raises: Unavailable without the CUDA plug-in and ptxas.
    """
    here = hopper()
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in avals]
    lowered = jax.jit(fn, out_shardings=here).trace(*specs).lower(lowering_platforms=("cuda",))
    wanted = {f"MOSAIC_GPU_DUMP_{what}": "1"}
    with tempfile.TemporaryDirectory() as folder, dumps.caught(Path(folder), **wanted) as said:
        lowered.compile()
        return said.read_text(errors="replace")


def resources(said: str) -> list[Resources]:
    """Of each kernel in what ptxas said, in order; -1 where it did not say."""

    def one(name: str, text: str) -> Resources:
        number = lambda pattern: int(m.group(1)) if (m := re.search(pattern, text)) else -1
        spills = number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads")
        return Resources(name, number(r"Used (\d+) registers"), *spills)

    _, *parts = re.split(r"Compiling entry function '(\w+)'", said)
    return [one(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
