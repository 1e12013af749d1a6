"""The worker that vLLM starts by `worker_cls`: the platform's own, with our sampler, graphs and contract."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.platforms import current_platform

from bridges.vllm import adapter as adapters
from bridges.vllm.graphs import IsoDispatcher, manager
from bridges.vllm.model import IsoForCausalLM
from bridges.vllm.sampler import IsoSampler
from bridges.vllm.tap import Tap
from isojax import precompile
from isojax.errors import ConfigError, Unavailable

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


def coarse(memory: int, block: int) -> int:
    """At most `memory` bytes: a number of blocks of `block` bytes with six significant bits; 3% are lost at most."""
    blocks = memory // block
    step = 1 << max(0, blocks.bit_length() - 6)
    return blocks // step * step * block


class IsoWorker(PlatformWorker):  # type: ignore[misc, valid-type]  # one of two, by platform
    """Methods named iso_* are for `LLM.collective_rpc`; they take and return plain values.

    Runs vLLM's V1 model runner, and on CUDA its V2 runner too. Attributes: `seconds`, what our part of a start took.
    Raises: Unavailable with the V2 runner on CPU.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        self.v2 = bool(vllm_config.use_v2_model_runner)
        if self.v2 and current_platform.is_cpu():
            raise Unavailable("vLLM's V2 model runner needs CUDA; set VLLM_USE_V2_MODEL_RUNNER=0 before the start")
        super().__init__(vllm_config, *args, **kwargs)
        self.adapter: Any = None
        self.seconds: dict[str, float] = {}

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
        """Load the weights, install the contract, replace the sampler and, of the V1 runner, the graphs' dispatcher."""
        super().load_model(**kwargs)
        model, runner = self.iso_model, self.model_runner
        with self._timed("contract"):
            self.adapter = adapters.install(self.vllm_config, model.programs.regions(), model.arch)
        if self.v2:  # its sampler came through the model (bridges.vllm.v2)
            from bridges.vllm.v2 import IsoPromptLogprobs

            runner.prompt_logprobs_worker = IsoPromptLogprobs(runner.max_num_reqs, model.programs)
            return
        mode = self.model_config.logprobs_mode
        model.sampler = runner.sampler = IsoSampler(model.programs, self._sampled, mode)
        runner.cudagraph_dispatcher = IsoDispatcher(self.vllm_config)

    def determine_available_memory(self) -> int:
        """Bytes for the caches, cut to a coarse number of blocks.

        The number of blocks is a shape that attention is compiled for, and what is free differs between starts.
        """
        model = self.iso_model
        if model.arch != "cpu":  # the profiling run computes the largest step, and samples
            sizes = self.vllm_config.scheduler_config
            with self._timed("kernels to profile"):
                programs, rows = model.programs, sizes.max_num_batched_tokens
                programs.prepare([(rows, False)], min(rows, sizes.max_num_seqs), model.idle_shape)
        specs = [layer.get_kv_cache_spec(self.vllm_config) for layer in model.attention]
        return coarse(super().determine_available_memory(), sum(s.page_size_bytes for s in specs))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Bind the caches; of the V2 runner, replace the graphs' manager."""
        super().initialize_from_config(kv_cache_config)
        if self.v2:
            self.model_runner.cudagraph_manager = manager(self.model_runner, self.iso_model.step)

    def compile_or_warm_up_model(self) -> Any:
        """Compile everything that a CUDA graph will hold before the first capture: compiling synchronises."""
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        if sizes:
            most = self.vllm_config.scheduler_config.max_num_seqs
            steps = [(rows, decode) for rows in sizes for decode in (False, True) if rows <= most or not decode]
            with self._timed("kernels"):
                self.iso_model.programs.prepare(steps, most, self.iso_model.cache_shape)
        with self._timed("graphs and warm-up"):
            return super().compile_or_warm_up_model()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] = round(time.perf_counter() - started, 2)

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
        runner = self.model_runner
        if self.v2:
            captured = len(runner.cudagraph_manager.graphs)
        else:
            graphs = getattr(runner.model, "concrete_cudagraph_entries", {})
            captured = sum(entry.cudagraph is not None for entry in graphs.values())
        return {"forwards": self.iso_model.forwards, "graphs": captured}

    def iso_seconds(self) -> dict[str, float]:
        """What our part of the start took: installing the contract, compiling, capturing graphs."""
        return self.seconds

    def iso_kernels(self) -> dict[str, int]:
        """Region calls that the start found kept, and those that it compiled."""
        return precompile.found()
