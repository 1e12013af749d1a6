"""The bridge's parts without an engine: refusals, step buffers, tap, contract, plug-in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import contract as contracts
from bridges.vllm import adapter, environment, supported
from bridges.vllm import step as step_module
from bridges.vllm.engine import buckets, engine_args, graphs
from bridges.vllm.programs import Programs
from bridges.vllm.step import Step
from bridges.vllm.tap import Tap, by_request, digest
from isojax import batch as batches
from isojax import profile
from isojax.batch import bucket
from isojax.errors import ConfigError, InputError, Unavailable
from isojax.pallas_kernels.attn import work


def config(**changes):
    """A vllm_config that runs; changes: 'part.option' -> value."""
    parts = {
        "model_config": dict(
            quantization=None,
            dtype=torch.bfloat16,
            runner_type="generate",
            enable_prompt_embeds=False,
            logprobs_mode="raw_logprobs",
        ),
        "cache_config": dict(cache_dtype="auto", block_size=16),
        "parallel_config": dict(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=False,
            use_ubatching=False,
        ),
    }
    whole = dict(lora_config=None, speculative_config=None, kv_transfer_config=None, additional_config={})
    for name, value in changes.items():
        part, _, option = name.partition("__")
        if option:
            parts[part][option] = value
        else:
            whole[part] = value
    return SimpleNamespace(**whole, **{k: SimpleNamespace(**v) for k, v in parts.items()})


def test_a_plain_configuration_is_supported():
    supported.check(config(), "cpu")
    supported.check(config(model_config__dtype=torch.float32), "cpu")


@pytest.mark.parametrize(
    ("change", "option"),
    [
        (dict(parallel_config__tensor_parallel_size=2), "tensor_parallel_size"),
        (dict(parallel_config__pipeline_parallel_size=2), "pipeline_parallel_size"),
        (dict(parallel_config__data_parallel_size=2), "data_parallel_size"),
        (dict(lora_config=object()), "enable_lora"),
        (dict(speculative_config=object()), "speculative_config"),
        (dict(kv_transfer_config=object()), "kv_transfer_config"),
        (dict(model_config__quantization="fp8"), "quantization"),
        (dict(model_config__logprobs_mode="processed_logprobs"), "logprobs_mode"),
        (dict(model_config__dtype=torch.float16), "dtype"),
        (dict(model_config__runner_type="pooling"), "runner"),
        (dict(cache_config__cache_dtype="fp8"), "kv_cache_dtype"),
        (dict(cache_config__block_size=48), "block_size"),
    ],
)
def test_the_rest_is_refused_by_name(change, option):
    with pytest.raises(ConfigError, match=f"vLLM option {option} = .*allowed"):
        supported.check(config(**change), "cpu")


def test_breakable_graphs_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_BREAKABLE_CUDAGRAPH = 1 .*allowed: 0"):
        supported.check(config(), "cpu")


def test_float32_is_refused_on_a_gpu():
    with pytest.raises(ConfigError, match="vLLM option dtype"):
        supported.check(config(model_config__dtype=torch.float32), "sm90")


def test_short_blocks_are_refused_on_a_gpu():
    supported.check(config(cache_config__block_size=8), "cpu")
    with pytest.raises(ConfigError, match="vLLM option block_size = 8 .*16 at least"):
        supported.check(config(cache_config__block_size=8), "sm90")


# -- step buffers ---------------------------------------------------------------------------------------------------
QUERY, CONTEXT, PAGE, GROUP = [1, 20, 3], [40, 20, 35], 16, 2


def common(padded: int | None = None, requests: int | None = None):
    """CommonAttentionMetadata of one step, padded as vLLM pads for a CUDA graph."""
    n, r = sum(QUERY), len(QUERY)
    table = np.random.default_rng(0).permutation(np.arange(1, 49)).reshape(r, 16).astype(np.int32)
    plain = batches.paged(QUERY, CONTEXT, table, PAGE, GROUP, "cpu", None)
    padded, requests = padded or n, requests or r
    pad = lambda x, size, fill: torch.from_numpy(batches.pad(np.asarray(x), size, fill))
    starts = np.concatenate([[0], np.cumsum(QUERY)]).astype(np.int32)
    metadata = SimpleNamespace(
        num_actual_tokens=padded,
        num_reqs=requests,
        positions=pad(plain.positions[:n].astype(np.int64), padded, 5),
        slot_mapping=pad(plain.slots[:n].astype(np.int64), padded, -1),
        seq_lens_cpu_upper_bound=pad(np.asarray(CONTEXT, np.int32), requests, 0),
        block_table_tensor=pad(table, requests, 0),
        query_start_loc_cpu=pad(starts, requests + 1, n),
        max_query_len=max(QUERY),
    )
    return metadata, plain


def filled(step: Step, metadata: SimpleNamespace):
    """A step's arrays after both halves of what is taken over."""
    a = step.fill(metadata)
    step.take(a, metadata)
    return a


@pytest.mark.parametrize(("padded", "requests"), [(None, None), (32, 8), (32, 5)])
def test_step_buffers_hold_what_the_reference_packs(padded, requests):
    step = Step("cpu", GROUP, rows=128, seqs=8, blocks=16, device=torch.device("cpu"))
    earlier = filled(step, prompt(128))
    for x in (earlier.cu_q, earlier.lens, earlier.work, earlier.table):
        x.fill_(7)  # whatever it held
    metadata, plain = common(padded, requests)
    a = filled(step, metadata)
    n = sum(QUERY)
    assert torch.equal(a.slots, torch.from_numpy(plain.slots))
    assert torch.equal(a.positions[:n], torch.from_numpy(plain.positions[:n]))
    for name in ("cu_q", "lens", "work"):
        assert np.array_equal(getattr(a, name).numpy(), getattr(plain, name)), name
    assert torch.equal(a.table[: len(QUERY)], torch.from_numpy(plain.table[: len(QUERY)]))


def test_a_dummy_batch_of_vllms_stays_in_bounds():
    step = Step("cpu", GROUP, rows=128, seqs=8, blocks=16, device=torch.device("cpu"))
    metadata, _ = common()
    metadata.seq_lens_cpu_upper_bound = torch.ones(len(QUERY), dtype=torch.int32)
    assert filled(step, metadata).lens[: len(QUERY)].tolist() == QUERY


def test_a_replayed_graph_sees_what_vllm_has_written_since():
    """What is captured is `take`: each replay reads vLLM's tensors, where they were, after `fill` has run."""
    step = Step("cpu", GROUP, rows=128, seqs=8, blocks=16, device=torch.device("cpu"))
    captured, live = common(32, 8)[0], 2  # requests of one row each in the second step
    a = filled(step, captured)
    captured.positions[:live], captured.slot_mapping[:live] = torch.tensor([50, 60]), torch.tensor([33, 44])
    captured.slot_mapping[live:] = -1
    captured.block_table_tensor[:live] += 1
    expected = captured.block_table_tensor[:live].clone()
    step.fill(decode(live))
    step.take(a, captured)
    assert a.slots.tolist() == [33, 44] + [0] * (len(a.slots) - live) and a.positions[:live].tolist() == [50, 60]
    assert torch.equal(a.table[:live], expected) and a.lens.tolist() == [20] * live + [0] * (len(a.lens) - live)


def test_step_buffers_never_move():
    step = Step("cpu", GROUP, rows=128, seqs=8, blocks=16, device=torch.device("cpu"))
    before = [x.data_ptr() for x in step.arrays(24)[:-1]]
    metadata, _ = common()
    assert [x.data_ptr() for x in filled(step, metadata)[:-1]] == before
    assert [x.data_ptr() for x in step.idle(24)[:-1]] == before
    assert all(x.is_contiguous() for x in step.arrays(24)[:-1])


def test_host_buffers_stay_on_the_host_whatever_torchs_default_device_is():
    with torch.device("meta"):  # vLLM builds a model under its GPU
        step = Step("cpu", GROUP, rows=128, seqs=8, blocks=16, device=torch.device("cpu"))
    metadata, plain = common()
    a = filled(step, metadata)
    assert all(x.device.type == "cpu" for x in a[:-1]) and np.array_equal(a.work.numpy(), plain.work)


def decode(requests: int):
    """CommonAttentionMetadata of a step with one row in each of `requests` requests of 20 tokens."""
    whole = lambda x, dtype=torch.int32: torch.as_tensor(x, dtype=dtype)
    return SimpleNamespace(
        num_actual_tokens=requests,
        num_reqs=requests,
        positions=whole([19] * requests, torch.int64),
        slot_mapping=whole(range(16, 16 + requests), torch.int64),
        seq_lens_cpu_upper_bound=whole([20] * requests),
        block_table_tensor=torch.ones(requests, 16, dtype=torch.int32),
        query_start_loc_cpu=whole(range(requests + 1)),
        max_query_len=1,
    )


def prompt(rows: int):
    """CommonAttentionMetadata of a step with one request of so many rows."""
    whole = lambda x, dtype=torch.int32: torch.as_tensor(x, dtype=dtype)
    return SimpleNamespace(
        num_actual_tokens=rows,
        num_reqs=1,
        positions=whole(range(7, 7 + rows), torch.int64),
        slot_mapping=whole(range(16, 16 + rows), torch.int64),
        seq_lens_cpu_upper_bound=whole([7 + rows]),
        block_table_tensor=torch.ones(1, 16, dtype=torch.int32),
        query_start_loc_cpu=whole([0, rows]),
        max_query_len=rows,
    )


def test_rows_past_a_steps_own_are_idle_whatever_ran_before():
    step = Step("cpu", GROUP, rows=128, seqs=8, blocks=16, device=torch.device("cpu"))
    for rows in (100, 40):
        filled(step, prompt(rows))
    filled(step, decode(3))
    own, whole = step.arrays(3), step.arrays(128)
    assert own.positions.tolist() == [19] * 3 + [0] * 13 and own.slots.tolist() == [16, 17, 18] + [0] * 13
    assert whole.lens.tolist() == [20] * 3 + [0] * 5 and whole.cu_q.tolist() == [0, 1, 2] + [3] * 6


@pytest.mark.parametrize("live", (1, 66, 70))
def test_a_decode_step_is_laid_out_once_for_so_many_live_requests(live, monkeypatch):
    """vLLM pads a graph's requests: with rows that its metadata counts, and none of their own."""
    step = Step("sm90", GROUP, rows=512, seqs=100, blocks=16, device=torch.device("cpu"))
    padded = decode(70)
    padded.query_start_loc_cpu[live:] = live
    padded.seq_lens_cpu_upper_bound[live:] = 0
    for _ in range(3):
        a = filled(step, padded)
        assert a.cu_q.tolist() == [*range(live), *[live] * (129 - live)]
        assert a.work.tolist() == [[i, 0] for i in range(live)] + [[-1, 0]] * (128 - live)
        assert a.lens.tolist() == [20] * live + [0] * (128 - live)
        monkeypatch.setattr(work, "work_list", None)  # no later step lays it out anew


def test_a_request_without_a_row_may_stand_between_others():
    step = Step("sm90", GROUP, rows=512, seqs=100, blocks=16, device=torch.device("cpu"))
    gap = decode(4)
    gap.query_start_loc_cpu[2:] -= 1
    a = filled(step, gap)
    assert a.cu_q[:6].tolist() == [0, 1, 1, 2, 3, 3] and a.work[:4].tolist() == [[0, 0], [2, 0], [3, 0], [-1, 0]]


def test_a_decode_step_fits_the_graphs_of_both_kinds():
    step = Step("sm90", GROUP, rows=512, seqs=100, blocks=16, device=torch.device("cpu"))
    a = filled(step, decode(70))
    assert (len(a.tokens), a.tile, a.work.tolist()) == (128, 1, [[i, 0] for i in range(70)] + [[-1, 0]] * 58)
    many = step.arrays(70)
    assert many.tile > 1 and many.work.data_ptr() == a.work.data_ptr()
    query, tile = np.ones(70, np.int32), many.tile
    assert np.array_equal(many.work.numpy(), work.work_list(query, tile, len(many.work)))
    assert all(x.data_ptr() % 16 == 0 for x in many[:-1])  # what a TMA descriptor takes
    metadata, _ = common()
    assert filled(step, metadata).tile == tile
    step.decode = False  # a mixed graph is captured with one row a request
    assert filled(step, decode(70)).tile == tile


def test_the_dispatcher_has_graphs_of_both_kinds():
    from vllm.config import CUDAGraphMode

    from bridges.vllm.graphs import IsoDispatcher

    sizes = graphs(200, max_num_seqs=150)["cudagraph_capture_sizes"]
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=200,
        compile_sizes=None,
        cudagraph_specialize_lora=False,
    )
    settings = config(scheduler_config=SimpleNamespace(max_num_seqs=150), compilation_config=compilation)
    settings.num_speculative_tokens = 0
    made = IsoDispatcher(settings)  # type: ignore[arg-type]
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL)
    [(mode, keys)] = made.get_capture_descs()
    assert mode is CUDAGraphMode.FULL
    assert sorted((k.num_tokens, k.uniform) for k in keys) == sorted(
        [(n, False) for n in sizes] + [(n, True) for n in (64, 128, 150)]
    )
    full = lambda n, uniform: made.dispatch(n, uniform)[1]
    assert (full(3, True).num_tokens, full(3, True).uniform) == (64, True)
    assert (full(149, True).num_tokens, full(149, True).uniform) == (150, True)
    assert (full(149, False).num_tokens, full(149, False).uniform) == (150, False)
    assert (full(199, True).num_tokens, full(199, True).uniform) == (200, False)
    assert made.dispatch(3, True, valid_modes={CUDAGraphMode.NONE})[0] is CUDAGraphMode.NONE


def test_buckets_and_graphs():
    assert buckets(200, "cpu") == [16, 32, 48, 64, 96, 128, 192]
    assert buckets(1536, "sm90") == [64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536]
    assert [bucket(n, "sm90") for n in (0, 1, 65, 513, 641, 2049, 8193)] == [64, 64, 128, 640, 768, 2304, 9216]
    made = graphs(200, max_num_seqs=150)
    assert made == {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [64, 128, 150, 192, 200]}
    assert graphs(64, max_num_seqs=100)["cudagraph_capture_sizes"] == [64]


# -- arguments --------------------------------------------------------------------------------------------------------
def test_engine_args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = engine_args("model", "c.json", arch="cpu", max_num_seqs=3, hf_overrides={"rope_theta": 5.0})
    assert args["hf_overrides"] == {"architectures": ["IsoForCausalLM"], "rope_theta": 5.0}
    assert args["worker_cls"] == "bridges.vllm.worker.IsoWorker"
    assert (args["max_num_seqs"], args["enforce_eager"]) == (3, True)
    assert args["additional_config"]["isojax"]["contract"] == str(tmp_path / "c.json")
    gpu = engine_args("model", arch="sm90")
    assert "enforce_eager" not in gpu and gpu["compilation_config"]["cudagraph_mode"] == "FULL"
    assert "compilation_config" not in engine_args("model", arch="sm90", enforce_eager=True)
    with pytest.raises(ConfigError, match="worker_cls"):
        engine_args("model", worker_cls="my.Worker")
    with pytest.raises(ConfigError, match="architectures"):
        engine_args("model", hf_overrides={"architectures": ["LlamaForCausalLM"]})


def test_the_environment_never_overrides_the_user(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    assert environment.prepare("cpu")["VLLM_NO_USAGE_STATS"] == "1"
    import os

    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"


# -- tap ----------------------------------------------------------------------------------------------------------
def test_tap():
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    tap = Tap("digest")
    tap.record(["a-12345678", "b-c-12345678"], [4, 9], rows)
    first, second = tap.take()
    assert by_request([first, second]) == {"a": {4: digest(rows[0].numpy())}, "b-c": {9: second[2]}}
    assert first[2] != second[2]  # the sign of zero counts
    assert tap.take() == []
    with pytest.raises(ValueError, match="twice"):
        by_request([first, (first[0], first[1], second[2])])
    with pytest.raises(InputError, match="tap mode"):
        Tap("all")  # type: ignore[arg-type]


# -- contract -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "dense.json"
    contracts.save(profile.build("dense", "cpu"), path)
    return path


def under(path, **more):
    return config(additional_config={"isojax": {"contract": str(path), **more}})


def test_the_contract_is_optional():
    assert adapter.install(config(), profile.ENGINE, "cpu") is None
    with pytest.raises(ConfigError, match="without a contract"):
        adapter.install(config(additional_config={"isojax": {"identities": {"a": 1}}}), profile.ENGINE, "cpu")
    with pytest.raises(ConfigError, match="contract, identities"):
        adapter.install(config(additional_config={"isojax": {"contarct": "x"}}), profile.ENGINE, "cpu")


def test_the_contract_covers_the_engine(dense):
    installed = adapter.install(under(dense), profile.ENGINE, "cpu")
    assert installed is not None and installed.identities == contracts.load(dense).identities


def test_an_uncovered_region_an_unclaimed_degree_and_other_identities_are_refused(dense):
    with pytest.raises(contracts.AdapterRefusal, match="residual.add"):
        adapter.install(under(dense), [*profile.ENGINE, "residual.add"], "cpu")
    two = under(dense)
    two.parallel_config.tensor_parallel_size = 2
    with pytest.raises(contracts.AdapterRefusal, match="tp"):
        adapter.install(two, profile.ENGINE, "cpu")
    identities = contracts.load(dense).identities
    assert identities is not None
    other = identities.plain() | {"numerical_policy": "0" * 64}
    with pytest.raises(contracts.AdapterRefusal, match="numerical_policy"):
        adapter.install(under(dense, identities=other), profile.ENGINE, "cpu")


# -- vLLM's own classes ---------------------------------------------------------------------------------------------
def test_vllm_takes_the_graph_settings():
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    made = CompilationConfig(**graphs(200, 16))
    assert (made.mode, made.cudagraph_mode) == (CompilationMode.NONE, CUDAGraphMode.FULL)


def test_registration_adds_one_name_and_is_idempotent():
    from vllm import ModelRegistry

    from bridges.vllm.plugin import register

    before = set(ModelRegistry.get_supported_archs())
    register()
    register()
    assert set(ModelRegistry.get_supported_archs()) - before <= {"IsoForCausalLM"}


def test_logits_are_refused_without_our_sampler():
    from bridges.vllm.model import IsoForCausalLM

    with pytest.raises(Unavailable, match="worker_cls='bridges.vllm.worker.IsoWorker'"):
        IsoForCausalLM.compute_logits(SimpleNamespace(sampler=None), torch.zeros(1, 1))  # type: ignore[arg-type]


def test_another_logprobs_mode_is_refused_by_the_sampler():
    from bridges.vllm.sampler import IsoSampler

    with pytest.raises(ConfigError, match="logprobs_mode"):
        IsoSampler(None, None, "processed_logprobs")  # type: ignore[arg-type]


def test_the_v2_runner_is_refused():
    from bridges.vllm.worker import IsoWorker

    with pytest.raises(Unavailable, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        IsoWorker(SimpleNamespace(use_v2_model_runner=True))


def test_free_memory_that_differs_a_little_gives_the_same_number_of_blocks():
    from bridges.vllm.worker import coarse

    block = 3 << 20
    for blocks in (1, 31, 32, 63, 64, 1000, 33333):
        got = coarse(blocks * block + 17, block)
        assert got % block == 0 and 0.968 * blocks <= got // block <= blocks
    assert coarse(40000 * block, block) == coarse(39990 * block + 5, block)


def test_plug():
    from bridges.vllm import plug

    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    assert plug("b", lambda module, x: x + module.in_features)(model) == ["b"]
    assert torch.equal(model["b"](torch.zeros(2)), torch.full((2,), 2.0))
    with pytest.raises(InputError, match="matches 'layers.*'"):
        plug("layers.*", lambda module, x: x)(model)
    model["a"].do_not_compile = False  # pyright: ignore[reportArgumentType]  torch's type: tensors and modules only
    with pytest.raises(Unavailable, match="enforce_eager=True"):
        plug("b", lambda module, x: x)(model)


class _Device:
    """Copies that have been sent, and those that are known to have run."""

    copies = done = 0


class _Event:
    """A CUDA event that counts: `copies` ran when it was recorded."""

    def __init__(self, device: _Device):
        self.device, self.seen = device, 0

    def record(self) -> None:
        self.seen = self.device.copies

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.seen)


def test_a_host_buffer_is_written_again_only_after_its_copy_has_run(monkeypatch):
    device = _Device()
    control = step_module._Control((3, 5), torch.device("cpu"))
    control._hosts = [torch.zeros_like(control._hosts[0]) for _ in range(2 * step_module.HALF)]
    control._parts = [[h.numpy()[:3], h.numpy()[4:9]] for h in control._hosts]
    control._sent = [_Event(device), _Event(device)]  # pyright: ignore
    last: dict[int, int] = {}  # host buffer -> the copy that read it
    for n in range(1, 50):
        first = control.stage()[0]
        if n % 7 == 0:  # a step that fails between the two
            first = control.stage()[0]
        which = next(i for i, p in enumerate(control._parts) if p[0] is first)
        assert last.get(which, 0) <= device.done, "the copy may still run"
        first[0] = n
        device.copies = n  # send copies, and then may record
        control.send()
        assert int(control.views[0][0]) == n
        last[which] = n
    assert len(last) == 2 * step_module.HALF


def test_rows_of_the_head_are_padded_in_their_own_memory_or_in_a_kept_buffer():
    programs = Programs.__new__(Programs)
    programs._room = {}
    whole = torch.arange(64 * 4, dtype=torch.float32).reshape(64, 4)
    assert programs._padded(whole, 64) is whole
    assert programs._padded(whole[:5], 64).data_ptr() == whole.data_ptr() and not programs._room
    with torch.inference_mode():
        first = programs._padded(whole[:5].clone(), 64)
    assert torch.equal(first[:5], whole[:5]) and first.shape == (64, 4)
    second = programs._padded(whole[5:8].clone(), 64)  # also where inference mode is off
    assert second is first and torch.equal(second[:3], whole[5:8])
    assert programs._padded(whole[:5].bfloat16(), 64).dtype is torch.bfloat16 and len(programs._room) == 2
