"""The only module that touches JAX's private names. jax is pinned in pyproject.toml because of it.

Everything here was checked against jax 0.11.2; another version fails at import rather than half-working.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
from jax._src import core, dispatch, source_info_util
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

if jax.__version__ != "0.11.2":
    raise ImportError(
        f"isojax is written against jax 0.11.2; found {jax.__version__}. Install jax==0.11.2 jaxlib==0.11.2"
    )

Literal = core.Literal
ClosedJaxpr = core.ClosedJaxpr
auto_insert_reshard = core.auto_insert_reshard
PLATFORMS = {"cpu": "cpu", "cuda": "sm90"}  # XLA platform -> arch


def new_primitive(name: str, abstract_eval: Any, run: Any) -> core.Primitive:
    """One primitive with several results; `run(arch, *args, **statics)` is its body on each platform.

    Lowered with inline=False: a model that calls a region forty times carries one copy of its kernel.
    """
    p = core.Primitive(name)
    p.multiple_results = True
    p.def_impl(partial(dispatch.apply_primitive, p))
    p.def_abstract_eval(abstract_eval)
    for platform, arch in PLATFORMS.items():
        rule = mlir.lower_fun(partial(run, arch), multiple_results=True)
        mlir.register_lowering(p, rule, platform=platform, inline=False)
    return p


def sub_jaxpr(eqn: Any, key: str) -> tuple[Any, Any]:
    """(jaxpr, consts) of the jaxpr-valued parameter `key` of a call-like equation."""
    sub = eqn.params[key]
    return (sub.jaxpr, sub.consts) if isinstance(sub, core.ClosedJaxpr) else (sub, ())


def func_source(jaxpr: Any) -> str:
    """File and line where the traced function of a jaxpr was defined, or ''."""
    info = getattr(jaxpr, "debug_info", None)
    return (info.func_src_info or "") if info is not None else ""


def user_frames(eqn: Any) -> list[Any]:
    return list(source_info_util.user_frames(eqn.source_info.traceback))


def literal_value(v: Any) -> Any:
    """A literal's Python scalar (jax 0.11 keeps typed scalars)."""
    import numpy as np

    return np.asarray(v.val).item()


def interpreting() -> bool:
    """Whether kernels traced now run in Mosaic's GPU interpreter (plgpu.force_gpu_interpret_mode)."""
    from jax._src import config

    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def array_of_capsule(capsule: Any) -> jax.Array:
    """CPU array over a DLPack capsule's memory. jax.dlpack.from_dlpack does the same at ten times the cost."""
    return _jax.dlpack_managed_tensor_to_buffer(capsule, cpu_device(), None, None, 1)


def capsule_of_array(a: jax.Array) -> Any:
    """DLPack capsule of a ready CPU array; it shares the memory and keeps it alive."""
    return _jax.buffer_to_dlpack_managed_tensor(a)


@cache
def cpu_device() -> Any:
    """The host's JAX device, also where the default backend is a GPU."""
    return jax.local_devices(backend="cpu")[0]


def scan_operands(params: Any, n: int) -> tuple[int, int]:
    """(constants, carries) among the n operands of a scan equation; the rest are scanned over."""
    consts, carry, _ = params["ft_in"].update([0] * n).unpack()
    return len(list(consts)), len(list(carry))


@cache
def _barrier_address() -> core.Primitive:
    """Pallas keeps barriers out of reach of inline code; this hands out one's SMEM address as an int32."""
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import llvm  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.pallas.mosaic_gpu import core as gpu_core
    from jax._src.pallas.mosaic_gpu import lowering, primitives
    from jax.experimental.mosaic import gpu as mgpu

    p = core.Primitive("barrier_address")

    @p.def_effectful_abstract_eval
    def _(barrier, *args, **params):
        del barrier, args, params
        return core.ShapedArray((), "int32"), {gpu_core._memory_effect}

    @lowering.register_lowering_rule(p, mgpu.LoweringSemantics.Warpgroup)
    def _(ctx, barrier, *leaves, tree):
        index = primitives._get_barrier_base_index(ctx.avals_in[0], tree.unflatten(leaves))
        ref = (barrier if index is None else barrier[index]).barrier_ref
        return llvm.ptrtoint(ir.IntegerType.get_signless(32), ref.get_ptr())

    return p


def barrier_address(barrier: Any) -> jax.Array:
    """SMEM address of a plgpu.Barrier (or of one of an array of them), for inline code in the same kernel."""
    from jax._src import tree_util
    from jax._src.state import primitives as state

    ref, transforms = state.get_ref_and_transforms(barrier, None, "barrier_address")
    leaves, tree = tree_util.tree_flatten(transforms)
    return _barrier_address().bind(ref, *leaves, tree=tree)
