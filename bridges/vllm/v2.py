"""What vLLM's V2 model runner takes from a model: its sampler and its prompt log-probabilities, ours here.

Imported where that runner runs: it needs Triton and CUDA. Both classes hand vLLM the rows of head.logprob_rows where it
asks for "logits", so that it picks, orders and ranks the region's own values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler

from bridges.vllm.programs import Programs
from bridges.vllm.sampler import check_mode
from bridges.vllm.tap import Tap


class IsoModelState(DefaultModelState):
    """Raises, when the sampler is made: ConfigError for a logprobs mode other than raw_logprobs."""

    def custom_sampler(self, sampler: Sampler) -> tuple[Any, Any]:
        check_mode(sampler.logprobs_mode)
        own = IsoGpuSampler(
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.model_config.get_vocab_size(),
            device=self.device,
            req_states=sampler.req_states,
            logprobs_mode="processed_logits",
            use_fp64_gumbel=sampler.use_fp64_gumbel,
        )
        model: Any = self.model
        own.programs, model.sampler = model.programs, own
        return own, None


class IsoGpuSampler(Sampler):
    """vLLM's sampler; log-probabilities of the unprocessed logits, at temperature 1, computed where a request asks."""

    programs: Programs
    tap: Tap | None = None

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        if self.tap is not None:
            last = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs] - 1
            self.tap.record(input_batch.req_ids, last.tolist(), self.programs.logprobs(logits))
        return super().__call__(logits, input_batch)

    def sample(self, logits: torch.Tensor, *args: Any, return_logprobs: bool = False) -> Any:
        # before the parent: it applies bias, penalties and temperature to the logits in place
        rows = self.programs.logprobs(logits) if return_logprobs else None
        sampled, processed = super().sample(logits, *args, return_logprobs=return_logprobs)
        return sampled, processed if rows is None else rows


class IsoPromptLogprobs(PromptLogprobsWorker):
    """Log-probabilities of prompt tokens, of full-vocabulary rows taken a chunk at a time."""

    def __init__(self, max_num_reqs: int, programs: Programs):
        super().__init__(max_num_reqs, logprobs_mode="raw_logits")
        self.programs = programs

    def compute_prompt_logprobs(self, logits_fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        rows = lambda hidden: self.programs.logprobs(logits_fn(hidden))
        return super().compute_prompt_logprobs(rows, *args, **kwargs)
