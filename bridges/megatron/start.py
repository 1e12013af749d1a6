"""One process, one rank: what Megatron-Core needs before a model can be built."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bridges.megatron import cpu
from isojax.errors import Unavailable

VERSION = "0.19.2"


def megatron() -> None:
    """Check that the Megatron-Core this bridge is written against is here. Raises Unavailable."""
    try:
        from megatron.core import __version__ as found
    except ImportError as e:
        raise Unavailable(f"megatron-core is not installed ({e}); run `uv sync --extra megatron`") from e
    if found.split("+")[0] != VERSION:
        raise Unavailable(f"megatron-core {found} is installed; this bridge is written against {VERSION}")


def single(seed: int = 1234) -> None:
    """A world of one process (gloo, or nccl on CUDA), with no port and no environment variable. Idempotent.

    Does nothing where torch.distributed and Megatron's groups are already initialised. Raises Unavailable.
    """
    cpu.install()
    megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()  # somebody ended the world that its groups belonged to
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Undo `single`."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
