"""One policy step under Megatron's own DistributedDataParallel and optimizer, timed phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from bridges.megatron import cpu
from bridges.megatron.bench.workload import MicroBatch

PHASES = ("layers_forward", "head_forward", "head_backward", "layers_backward", "optimizer")
CLIP = 0.2  # of the policy ratio (Schulman et al., arXiv 1707.06347)


def policy_loss(logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """PPO's clipped surrogate, mean over the tokens that were sampled."""
    ratio = torch.exp(logprobs - batch.old)
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    return -(gain * batch.mask).sum() / batch.mask.sum()


class Marks:
    """Points in time: CUDA events on the current stream, or the host's clock where there is no GPU."""

    def __init__(self, device: torch.device):
        self.cuda, self.points = device.type == "cuda", []

    def mark(self) -> None:
        if not self.cuda:
            self.points.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.points.append(event)

    def milliseconds(self) -> list[float]:
        """Between one point and the next; waits for the last."""
        if not self.cuda:
            return [(b - a) * 1e3 for a, b in zip(self.points, self.points[1:], strict=False)]
        self.points[-1].synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.points, self.points[1:], strict=False)]


class Result(NamedTuple):
    """phases in ms; host_ms: how long the host took to issue forward and backward, where the device takes no longer the
    step is bound by the host; loss; grad_norm, NaN where gradients are not clipped."""

    phases: dict[str, float]
    host_ms: float
    loss: float
    grad_norm: float


class Trainer:
    """A GPTModel under DDP with fp32 gradients and Adam with fp32 main parameters.

    On CPU Megatron's bf16 optimizer does not exist: models are float32 there, and gradients are not clipped.
    """

    def __init__(self, model: GPTModel, device: torch.device):
        self.model, self.device = model, device
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.ddp = DistributedDataParallel(model.config, ddp, model)
        bf16 = model.config.bf16
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-6,
            weight_decay=0.01,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            clip_grad=1.0 if device.type == "cuda" else 0.0,
        )
        with cpu.optimizer_devices():
            self.optimizer = get_megatron_optimizer(options, [self.ddp])

    def loss(self, batch: MicroBatch) -> torch.Tensor:
        """The policy loss of one micro-batch, with its graph."""
        return policy_loss(self.logprobs(batch), batch)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the labels, [1, T] fp32, with their graph."""
        unread = torch.zeros_like(batch.tokens)  # positions come from the packing
        return -self.ddp(batch.tokens, unread, None, labels=batch.labels, packed_seq_params=batch.packing).float()

    def step(self, batch: MicroBatch) -> Result:
        """One optimizer step on one micro-batch."""
        marks = Marks(self.device)
        handles = [self.model.decoder.register_forward_hook(self._head_begins(marks.mark))]
        with cpu.optimizer_devices():
            marks.mark()
            begun = time.perf_counter()
            loss = self.loss(batch)
            marks.mark()
            loss.backward()
            host = (time.perf_counter() - begun) * 1e3
            marks.mark()
            finalize_model_grads([self.ddp])
            stepped = self.optimizer.step()
            assert stepped is not None and stepped[0], "the optimizer skipped its step"
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            marks.mark()
        for handle in handles:
            handle.remove()
        norm = float(stepped[1]) if stepped[1] is not None else float("nan")
        return Result(dict(zip(PHASES, marks.milliseconds(), strict=True)), host, loss.item(), norm)

    @staticmethod
    def _head_begins(mark: Callable[[], None]) -> Callable[..., None]:
        """Marks the end of the layers' forward, and when its gradient is there: the end of the head's backward."""

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            mark()
            output.register_hook(lambda grad: mark())

        return hook
