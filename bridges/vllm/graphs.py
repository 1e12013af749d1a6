"""FULL CUDA graphs for decode steps and for all others: vLLM has no such mode, since its mixed steps are piecewise.

A decode graph holds the decode kernels of attn.core, a mixed graph the many-row ones; the bits are the same.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from bridges.vllm.step import Step


class FullTwice:
    """Stands where vLLM asks a CUDAGraphMode: decode steps FULL, mixed steps FULL, each with graphs of its own."""

    def decode_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode.FULL

    def mixed_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode.FULL

    def separate_routine(self) -> bool:
        return True

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        return mode is CUDAGraphMode.FULL

    def has_full_cudagraphs(self) -> bool:
        return True

    def has_piecewise_cudagraphs(self) -> bool:
        return False


class IsoDispatcher(CudagraphDispatcher):
    """Of the V1 runner: a graph key per bucket and kind of step."""

    def initialize_cudagraph_keys(self, cudagraph_mode: Any, uniform_decode_query_len: int = 1) -> None:
        mode = FullTwice() if cudagraph_mode is CUDAGraphMode.FULL else cudagraph_mode
        super().initialize_cudagraph_keys(mode, uniform_decode_query_len)  # type: ignore[arg-type]

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, *args: Any, **kwargs: Any) -> Any:
        """A decode step that no decode graph holds runs the mixed one."""
        mode, key = super().dispatch(num_tokens, uniform_decode, *args, **kwargs)
        if uniform_decode and mode is CUDAGraphMode.NONE:
            return super().dispatch(num_tokens, False, *args, **kwargs)
        return mode, key


def manager(runner: Any, step: Step) -> Any:
    """The V2 runner's graph manager, made anew with both kinds of graphs. Nothing may be captured yet.

    Imported where it is used: the V2 runner needs Triton and CUDA.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    class Announce(CudaGraphManager):
        """Says which kind is captured: a mixed dummy batch has one row in each request too."""

        def capture(self, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
            def create(desc: Any, warmup: bool) -> Any:
                step.decode = desc.uniform_token_count == 1
                return create_forward_fn(desc, warmup)

            try:
                super().capture(create, *args, **kwargs)
            finally:
                step.decode = None

    class IsoGraphManager(ModelCudaGraphManager, Announce):
        pass

    old = runner.cudagraph_manager
    mode: Any = FullTwice() if old.cudagraph_mode is CUDAGraphMode.FULL else old.cudagraph_mode
    return IsoGraphManager(runner.vllm_config, runner.device, mode, old.decode_query_len, runner.lora_capture_cases)
