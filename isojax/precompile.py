"""Region calls compiled ahead, in several processes, into files that later starts read (isojax.store).

A file is named by everything that its contents follow from: the call, this package's sources, the toolchain. Regions of
other packages are not kept, since their sources are not known here; they are compiled where they are launched.

As a program it is a worker: jobs come on standard input, one pickle in base64 a line, answers go to the descriptor
whose number it is given.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import select
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from isojax import live, store, tuning
from isojax.errors import Unavailable
from isojax.kernel_plan import KernelPlan, Launch
from isojax.region import Region, lookup

log = logging.getLogger(__name__)
TOOLCHAIN = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "numpy")
WORKERS = 15
SECONDS = 600  # that one call may take
_found: dict[Call, bool] = {}  # every call that `ahead` was asked for -> whether it was kept already
_made: dict[bytes, Any] = {}  # module -> Binary: in one process Mosaic compiles a module, and dumps it, only once


@dataclass(frozen=True)
class Call:
    """One region call by shapes, in plain values. statics: as bound, sorted."""

    region: str
    avals: tuple[tuple[tuple[int, ...], str], ...]
    statics: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, region: Region, avals: Sequence[Any], statics: Mapping[str, Any]) -> Call:
        shapes = tuple((tuple(map(int, a.shape)), str(a.dtype)) for a in avals)
        return cls(region.name, shapes, tuple(sorted(statics.items())))

    def key(self, state: str) -> str:
        """Of the file that keeps this call, made in a process of this `state`."""
        tuned = tuning.digest()  # another kind of GPU has another table
        return store.key_of("sm90 plan", self.region, self.avals, self.statics, tuned, state)


def state() -> str:
    """What every kept thing follows from besides its own name: code as installed and as loaded, toolchain, settings."""
    set_so = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, os.environ.get("XLA_FLAGS", "")
    return store.key_of(sources(), live.digest(), toolchain(), set_so)


@functools.cache
def sources() -> str:
    """SHA-256 over this package's files that a kernel may follow from: code and tables."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".json", ".txtpb")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def toolchain() -> str:
    """Versions of what lowers and compiles, and which ptxas there is outside of Python packages."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    tools = {p for p in (shutil.which("ptxas"), "/usr/local/cuda/bin/ptxas") if p and os.path.exists(p)}
    stats = [(p, os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in sorted(tools)]
    return repr([*((n, found.get(n)) for n in TOOLCHAIN), *stats, platform.python_version(), platform.machine()])


def kept(call: Call, now: str) -> KernelPlan | None:
    """The compiled plan of a call that some process of the state `now` has made, or None."""
    from isojax import plan_file

    data = store.get(call.key(now))
    return None if data is None else plan_file.load(data)


def keepable(region: Region, arch: str = "sm90") -> bool:
    """Whether a region's implementation is this package's own, so that `state` covers it."""
    fn = region.implementation(arch).fn
    return str(getattr(fn, "__module__", "")).startswith("isojax.pallas_kernels.")


def make(call: Call) -> KernelPlan:
    """Lower and compile a call here, and keep it. Raises Unsupported, Unavailable."""
    from isojax import aot, plan_file
    from isojax.kernel_plan import kernel_plan

    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in call.avals]
    now = state()
    plan = kernel_plan(lookup(call.region), avals, dict(call.statics))
    shape_of = lambda i: jax.ShapeDtypeStruct(plan.buffers[i].shape, jnp.dtype(plan.buffers[i].dtype))

    def compiled(op: Any) -> Any:
        if not isinstance(op, Launch):
            return op
        ins, outs = [shape_of(i) for i in op.operands], [shape_of(i) for i in op.outs]
        if op.module not in _made:
            _made[op.module] = aot.compile_module(op.module, ins, outs, op.aliases)
        return replace(op, module=_made[op.module])

    plan = replace(plan, ops=tuple(map(compiled, plan.ops)))
    store.put(call.key(now), plan_file.dump(plan))
    return plan


# -- several at once --------------------------------------------------------------------------------------------------
def ahead(calls: Iterable[Call], now: str, workers: int | None = None) -> dict[Call, str]:
    """Make every call that is not kept yet, in worker processes. Returns what failed, and why.

    now: this process's `state`. A worker whose own differs (kernels or settings replaced in this process) refuses.

    A failure is logged, and is no error: such a call is compiled where it is launched, and raises there if it must.
    """
    wanted = dict.fromkeys(calls)
    missing = [c for c in wanted if store.get(c.key(now)) is None]
    for c in wanted:
        _found.setdefault(c, c not in missing)
    n = min(workers or min(WORKERS, len(os.sched_getaffinity(0))), len(missing))
    if not n or not store.writable():  # what a worker could not keep would be compiled for nothing
        return {}
    failed: dict[Call, str] = {}
    left = deque(sorted(missing, key=_cost, reverse=True))

    def work(_: int) -> None:
        worker = _Worker()
        try:
            while left:
                try:
                    call = left.popleft()
                except IndexError:  # another thread took the last
                    break
                if why := worker.do(call, now):
                    failed[call] = why
                if worker.ended and left:  # what one call broke is not the next one's
                    worker.close()
                    worker = _Worker()
        finally:
            worker.close()

    with ThreadPoolExecutor(n) as threads:
        try:
            list(threads.map(work, range(n)))
        finally:
            left.clear()  # interrupted: the threads end with the call that each is at
    if failed:
        call, why = next(iter(failed.items()))
        log.warning("%d of %d calls were not compiled ahead; one is %s: %s", len(failed), len(missing), call, why)
    return failed


def found() -> dict[str, int]:
    """How many calls this process has found kept, and how many had to be compiled: whether its start was a warm one."""
    kept = sum(_found.values())
    return dict(kept=kept, compiled=len(_found) - kept)


def _cost(call: Call) -> int:
    """Long jobs first: attention lowers for seconds, everything else for less."""
    return ("attn" in call.region) * 2 + ("head" in call.region)


class _Worker:
    """One process that makes calls, one at a time. Attributes: `ended`, whether it has."""

    def __init__(self) -> None:
        self.ended = False
        answer, theirs = os.pipe()
        env = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "isojax.precompile", str(theirs)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(theirs,), env=env
        )
        os.close(theirs)
        self._answers = os.fdopen(answer)

    def do(self, call: Call, now: str) -> str:
        """'' or why it failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(base64.b64encode(pickle.dumps((call, now))) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and its answer says so
        late = not select.select([self._answers], [], [], SECONDS)[0]
        if late:
            self._process.kill()
        line = self._answers.readline()
        self.ended = not line
        if self.ended:
            return f"the worker {f'took over {SECONDS} s and was ' if late else ''}ended ({self._process.wait()})"
        return line.strip().removeprefix("ok")

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it has ended already, and said so
        self._process.wait()
        self._answers.close()


def main() -> None:
    """A worker's loop."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin.buffer:
            call, now = pickle.loads(base64.b64decode(line))
            try:
                if state() != now:
                    raise Unavailable("the process that asks runs other kernels or settings than those installed here")
                make(call)
                said = "ok"
            except Exception as e:
                said = f"{type(e).__name__}: {e}".replace("\n", " ")
            print(said, file=answers, flush=True)


if __name__ == "__main__":
    import isojax.precompile as here  # not __main__: a Call is pickled under the module's own name

    here.main()
