"""The worker that vLLM starts by `worker_cls`: the platform's own, with our sampler and our contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform

from bridges.vllm import adapter as adapters
from bridges.vllm.model import IsoForCausalLM
from bridges.vllm.sampler import IsoSampler
from bridges.vllm.tap import Tap
from isojax.errors import ConfigError, Unavailable

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class IsoWorker(PlatformWorker):  # type: ignore[misc, valid-type]  # one of two, by platform
    """Methods named iso_* are for `LLM.collective_rpc`; they take and return plain values.

    Raises: Unavailable with the V2 model runner, whose sampler on CUDA is another one.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        if vllm_config.use_v2_model_runner:
            raise Unavailable("IsoWorker runs vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0 before the start")
        super().__init__(vllm_config, *args, **kwargs)
        self.adapter: Any = None

    @property
    def iso_model(self) -> IsoForCausalLM:
        model = self.model_runner.get_model()
        if not isinstance(model, IsoForCausalLM):
            raise ConfigError(
                f"IsoWorker was given {type(model).__name__}, not IsoForCausalLM; use engine_args, or pass "
                "hf_overrides={'architectures': ['IsoForCausalLM']}; for a stock model leave worker_cls out"
            )
        return model

    def load_model(self, **kwargs: Any) -> None:
        """Load the weights, install the contract, replace the sampler."""
        super().load_model(**kwargs)
        model = self.iso_model
        self.adapter = adapters.install(self.vllm_config, model.programs.regions(), model.arch)
        model.sampler = self.model_runner.sampler = IsoSampler(
            model.programs, self._sampled, self.model_config.logprobs_mode
        )

    def compile_or_warm_up_model(self) -> Any:
        """Compile every bucket that a CUDA graph will hold before the first capture: compiling synchronises."""
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        for rows in sizes:
            self._warm_up(rows)
        return super().compile_or_warm_up_model()

    def _warm_up(self, rows: int) -> None:
        from vllm.config import CUDAGraphMode

        runner = self.model_runner
        _, last = runner._dummy_run(
            rows, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=True, skip_eplb=True
        )
        self.iso_model.programs.logprobs(self.iso_model.compute_logits(last))

    def _sampled(self) -> tuple[list[str], list[int]]:
        runner = self.model_runner
        ids = list(runner.input_batch.req_ids)
        return ids, (runner.optimistic_seq_lens_cpu[: len(ids)] - 1).tolist()

    # -- remote calls -----------------------------------------------------------------------------------------------
    def iso_tap(self, mode: str | None) -> None:
        """Start recording rows at the sampler ('digest' or 'rows'), or stop (None); see bridges.vllm.tap."""
        self.model_runner.sampler.tap = None if mode is None else Tap(mode)  # type: ignore[arg-type]

    def iso_take(self) -> list[tuple[str, int, Any]]:
        """The rows recorded since the last call. Raises Unavailable where no tap is on."""
        tap = self.model_runner.sampler.tap
        if tap is None:
            raise Unavailable("no tap is on; call collective_rpc('iso_tap', args=('digest',)) first")
        return tap.take()

    def iso_identities(self) -> dict[str, Any] | None:
        """The installed contract's identities, or None without a contract."""
        return None if self.adapter is None else self.adapter.identities.plain()

    def iso_handshake(self, other: Mapping[str, Any], runtime: str = "megatron") -> None:
        """Compare identities with the trainer's. Raises AdapterRefusal where they differ."""
        if self.adapter is None:
            raise Unavailable("this engine has no contract; start it with engine_args(..., contract=path)")
        self.adapter.handshake(other, other_runtime=runtime)

    def iso_counts(self) -> dict[str, int]:
        """forwards: steps computed by Python; graphs: CUDA graphs captured."""
        graphs = getattr(self.model_runner.model, "concrete_cudagraph_entries", {})
        captured = sum(entry.cudagraph is not None for entry in graphs.values())
        return {"forwards": self.iso_model.forwards, "graphs": captured}
