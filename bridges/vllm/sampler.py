"""vLLM's sampler with the log-probabilities of head.logprob_rows, the region that the trainer is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

from bridges.vllm.programs import Programs
from bridges.vllm.tap import Tap
from isojax.errors import ConfigError

RAW = "raw_logprobs"


class IsoSampler(Sampler):
    """Raw log-probabilities, sampled and of the prompt, at temperature 1 whatever the request's temperature is.

    which: gives (request ids, positions of their last tokens) of the rows now sampled; asked only while a tap is on.
    Raises: ConfigError for another logprobs mode.
    """

    def __init__(self, programs: Programs, which: Callable[[], tuple[Sequence[str], Sequence[int]]], mode: str = RAW):
        check_mode(mode)
        super().__init__(mode)  # type: ignore[arg-type]
        self.programs, self.which = programs, which
        self.tap: Tap | None = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.programs.logprobs(logits)

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        check_mode(logprobs_mode_override or RAW)
        if self.tap is not None:
            self.tap.record(*self.which(), self.compute_logprobs(logits))
        return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)


def check_mode(mode: str) -> None:
    """Raises ConfigError for a logprobs mode that is not covered."""
    if mode != RAW:
        raise ConfigError(
            f"logprobs_mode = {mode!r} is not supported by IsoForCausalLM; allowed: {RAW}; omit the option"
        )
