"""A Mosaic module compiled for sm_90a without a GPU, into something that can be kept: machine and host code.

XLA's ahead-of-time path runs the same passes and the same ptxas as MosaicGpuCompile. Two of Mosaic's own dumps give
what is wanted: the host function's LLVM text, and the cubin, handed to `nvdisasm` in the CUDA root that we name.
Meant for a process that does nothing else (isojax.precompile): the dumps are asked for by environment variables, and
come on the process's standard output.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from isojax import dumps, host_code
from isojax.errors import Unavailable
from isojax.lowering import MOSAIC_CALL, hopper

CATCH = """#!/bin/sh
cat "$3" > "$ISOJAX_CUBIN" && rm "$3" && rmdir "$(dirname "$3")"
"""


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. cubin: an ELF for sm_90a with one kernel, `name`."""

    cubin: bytes
    name: str
    host: host_code.HostCode


def compile_module(
    module: bytes, ins: Sequence[Any], outs: Sequence[Any], aliases: Sequence[tuple[int, int]]
) -> Binary:
    """Compile one kernel of a lowered region.

    module: as in the lowering's custom call. ins, outs: ShapeDtypeStructs; aliases: (result, operand) pairs.
    Raises: Unavailable without the CUDA plug-in and ptxas, or where the dumps are not what is expected.
    """
    call = jax.ffi.ffi_call(
        MOSAIC_CALL, list(outs), has_side_effect=True, input_output_aliases={i: o for o, i in aliases}
    )
    attributes: dict[str, Any] = dict(
        module=module, kernel_hash=hashlib.sha256(module).digest(), use_custom_barrier=False
    )
    where = hopper()
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in ins]
    jitted = jax.jit(lambda *xs: call(*xs, **attributes), out_shardings=where)
    lowered = jitted.trace(*specs).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as folder, _dumps(Path(folder)) as said:
        lowered.compile()
        text = said.read_text(errors="replace")
        caught = Path(folder, "cubin")
        if not caught.exists():
            raise Unavailable("Mosaic dumped no machine code; is nvidia-cuda-nvcc installed?")
        cubin = caught.read_bytes().removesuffix(b"\n")  # Mosaic ends its dump with one
    try:
        host = host_code.parse(text)
    except host_code.NotStraight as e:
        raise Unavailable(f"the kernel's host code cannot be kept: {e}") from e
    return Binary(cubin, kernel_name(cubin), host)


@contextmanager
def _dumps(folder: Path) -> Iterator[Path]:
    """Standard output goes to a file, with Mosaic's dumps; the cubin to another, by a tool that stands for nvdisasm."""
    tool = folder / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text(CATCH)
    tool.chmod(0o755)
    wanted = dict(MOSAIC_GPU_DUMP_HOST_LLVM="1", MOSAIC_GPU_DUMP_SASS="1", MOSAIC_GPU_CUDA_ROOT=str(folder))
    with dumps.caught(folder, **wanted, ISOJAX_CUBIN=str(folder / "cubin")) as said:
        yield said


def kernel_name(cubin: bytes) -> str:
    """The one kernel of a cubin, from the ELF section `.text.<name>`. Raises Unavailable for another count."""
    word = lambda at, n: int.from_bytes(cubin[at : at + n], "little")
    if cubin[:5] != b"\x7fELF\x02":
        raise Unavailable("the dumped machine code is no 64-bit ELF file")
    table, size, count, names = word(0x28, 8), word(0x3A, 2), word(0x3C, 2), word(0x3E, 2)
    strings = word(table + size * names + 0x18, 8)
    found = []
    for i in range(count):
        start = strings + word(table + size * i, 4)
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            found.append(name.removeprefix(".text."))
    if len(found) != 1:
        raise Unavailable(f"the dumped machine code holds kernels {found}; expected one")
    return found[0]
