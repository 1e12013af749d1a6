"""What every kernel test needs: Mosaic's GPU interpreter with race detection, and the sm_90a compile without a GPU.

Test modules beside this one use `from harness import ...`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.lowering import Resources, compile_sm90

REPO = Path(__file__).parents[2]
CALLBACKS: Any = gpu_callbacks  # a name that it does not export is replaced in it


class _Races:
    """Collects the race detector of every kernel that is interpreted (JAX keeps the last one only)."""

    def __enter__(self):
        self.states, self.original = [], CALLBACKS.GPURaceDetectionState

        def record(*args, **kwargs):
            self.states.append(self.original(*args, **kwargs))
            return self.states[-1]

        CALLBACKS.GPURaceDetectionState = record
        return self

    def __exit__(self, *_):
        CALLBACKS.GPURaceDetectionState = self.original


def interpret(region, args, statics=None) -> tuple[np.ndarray, ...]:
    """All outputs of the region's sm90 kernel on CPU, as `interpreted`; args may hold None."""
    args, bound = region.bind(tuple(args), dict(statics or {}))
    region.check("sm90", args, bound)
    impl = region.implementation("sm90")
    assert impl.kind == "kernel", f"{region.name} has only a declared stand-in on sm90"
    full, kw = region.expand(range(len(args)), bound)

    def call(*operands):
        return impl.fn(*[None if i is None else operands[i] for i in full], **kw)

    return interpreted(call, *args)


def interpreted(call, *args) -> tuple[np.ndarray, ...]:
    """The outputs of a function that launches kernels, by Mosaic's GPU interpreter.

    Uninitialised memory reads as NaN, out-of-bounds accesses raise, and a data race fails the test.
    """
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with _Races() as races, plgpu.force_gpu_interpret_mode(params):
        out = jax.block_until_ready(jax.jit(call)(*[jnp.asarray(a) for a in args]))
    assert races.states, "nothing ran in the interpreter"
    assert not any(s.races_found for s in races.states), "data race"
    return tuple(np.asarray(o) for o in (out if isinstance(out, (tuple, list)) else (out,)))


def reference(region, args, statics=None) -> tuple[np.ndarray, ...]:
    """All outputs of the region's reference schedule, as the `cpu` arch runs it."""
    statics = dict(statics or {})
    out = jax.jit(lambda *a: region.all_outputs(*_refill(args, a), **statics))(*[a for a in args if a is not None])
    return tuple(np.asarray(o) for o in out)


def _refill(args, present):
    it = iter(present)
    return [None if a is None else next(it) for a in args]


def compiles(region, avals, statics=None) -> list[Resources]:
    """Compile the region's sm90 kernel for sm_90a without a GPU; fails on a spill. avals: arrays, specs or None."""
    avals, bound = region.bind(tuple(avals), dict(statics or {}))
    region.check("sm90", avals, bound)
    found = compile_sm90(lambda *a: region.primitive.bind(*a, **bound), *avals)
    assert found, f"{region.name}: no Mosaic kernel was compiled"
    for r in found:
        assert r.registers > 0, f"{region.name}: ptxas reported nothing for {r.kernel}"
        assert (r.spill_stores, r.spill_loads) == (0, 0), f"{region.name}: {r}"
    return found


def spec(shape, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an operand; bfloat16 unless said otherwise."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in representable values between two arrays of one floating dtype, elementwise; no NaN allowed."""
    assert got.dtype == want.dtype and got.shape == want.shape
    assert not (np.isnan(got.astype(np.float64)).any() or np.isnan(want.astype(np.float64)).any()), "NaN"
    kind = {2: np.int16, 4: np.int32}[got.dtype.itemsize]

    def ordered(a):
        bits = a.view(kind).astype(np.int64)
        return np.where(bits < 0, -(bits & np.iinfo(kind).max), bits)  # -0.0 and 0.0 both at 0

    return np.abs(ordered(got) - ordered(want))


def fingerprint_elsewhere(name: str, avals, statics=None, arch: str = "sm90", seed: str = "7") -> str:
    """The fingerprint of one region call computed in a fresh process with another PYTHONHASHSEED."""
    shapes = [None if a is None else (tuple(a.shape), str(jnp.dtype(a.dtype))) for a in avals]
    code = (
        "import jax, jax.numpy as jnp; from isojax.lowering import fingerprint; from isojax.region import lookup\n"
        f"r = lookup({name!r}); shapes = {shapes!r}\n"
        "avals = tuple(None if s is None else jax.ShapeDtypeStruct(s[0], jnp.dtype(s[1])) for s in shapes)\n"
        f"avals, statics = r.bind(avals, {dict(statics or {})!r})\n"
        f"print(fingerprint(r, avals, statics, {arch!r}))"
    )
    env = dict(os.environ, PYTHONHASHSEED=seed, JAX_PLATFORMS="cpu")
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]
