"""Kept files, host code, ahead-of-time binaries and the driver's launcher: all without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import aot, host_code, kernel_plan, live, plan_file, precompile, schedule, store
from isojax.errors import Unavailable
from isojax.host_code import Address
from isojax.region import lookup

B, SHAPE = jnp.bfloat16, jax.ShapeDtypeStruct


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- files ----------------------------------------------------------------------------------------------------------
def test_a_file_comes_back_only_whole_and_under_its_own_key(folder):
    key, other = store.key_of("a", 1), store.key_of("a", 2)
    assert store.get(key) is None
    store.put(key, b"payload\nwith lines")
    assert store.get(key) == b"payload\nwith lines"
    path = folder / key[:2] / key
    whole = path.read_bytes()
    foreign = folder / other[:2] / other
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(whole)  # a file under another's name
    assert store.get(other) is None
    for broken in (whole[:-1], whole[:20], b"", whole + b"x", whole[:-3] + b"xes", b"\x00" * 100):
        path.write_bytes(broken)
        assert store.get(key) is None
    store.put(key, b"anew")
    assert store.get(key) == b"anew"
    assert not list(folder.rglob(".new-*"))


def test_keys_tell_parts_apart():
    assert store.key_of("ab", "c") != store.key_of("a", "bc")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ISOJAX_CACHE", str(tmp_path / "file"))
    for key in "ab":
        store.put(store.key_of(key), b"x")
    assert not store.writable()
    [said] = caplog.messages  # of hundreds of kernels: once a process
    assert said.startswith(f"cannot keep files in {tmp_path / 'file'}") and "set ISOJAX_CACHE" in said
    monkeypatch.setattr(precompile, "_Worker", None)  # none is started: what it made would be lost
    assert precompile.ahead([precompile.Call("toy.a", (), ())], "now") == {}


def test_a_folder_is_needed_only_where_none_is_named(tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store.Path, "home", homeless)
    monkeypatch.setenv("ISOJAX_CACHE", str(tmp_path))
    assert store.folder() == tmp_path
    monkeypatch.delenv("ISOJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "isojax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(Unavailable, match="set ISOJAX_CACHE"):
        store.folder()


# -- what a kept thing follows from ---------------------------------------------------------------------------------
def test_a_replaced_constant_or_function_is_another_state(monkeypatch):
    from isojax.pallas_kernels.linear import kernel_sm90

    before = live.digest()
    assert live.digest() == before
    with monkeypatch.context() as m:
        m.setattr(schedule, "KV_TILE", schedule.KV_TILE * 2)
        assert live.digest() != before
    with monkeypatch.context() as m:
        m.setattr(kernel_sm90, "row", lambda x, weight, *, leaves: x)
        assert live.digest() != before
    region = lookup("norms.rms")
    old = region.impl["sm90"]
    try:
        region.kernel("sm90", lambda x, weight, **kw: x)
        assert live.digest() != before
        assert not precompile.keepable(region)
    finally:
        region.impl["sm90"] = old
    assert live.digest() == before and precompile.keepable(region)


def test_settings_that_change_what_is_traced_are_another_state(monkeypatch):
    before = precompile.state()
    with jax.enable_x64(True):
        assert precompile.state() != before
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/elsewhere")
    assert precompile.state() != before


def test_every_process_finds_the_same_state():
    code = "from isojax import precompile; print(precompile.state())"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert made.stdout.strip() == precompile.state(), made.stderr[-500:]


# -- host code --------------------------------------------------------------------------------------------------------
TEXT = """
declare i32 @mosaic_gpu_launch_kernel(ptr, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr)

define i32 @k_mosaic_gpu(ptr %0, ptr %1, ptr %2) {
  %4 = load ptr, ptr %2, align 8
  %5 = getelementptr ptr, ptr %2, i32 1
  %6 = load ptr, ptr %5, align 8
  %7 = insertvalue { ptr, ptr, i64 } undef, ptr %6, 1
  %8 = extractvalue { ptr, ptr, i64 } %7, 1
  %9 = alloca [128 x i8], i64 1, align 64
  %10 = ptrtoint ptr %8 to i64
  %11 = inttoptr i64 %10 to ptr
  %12 = getelementptr bfloat, ptr %11, i64 3
  %13 = alloca [2 x i64], align 8
  store i64 64, ptr %13, align 4
  %14 = getelementptr i64, ptr %13, i32 1
  store i64 1, ptr %14, align 4
  call void @mosaic_gpu_init_tma_desc(ptr %9, ptr %12, i64 7, i64 2, ptr %13, ptr %13, i64 128, ptr %13)
  %15 = load [128 x i8], ptr %9, align 1
  %16 = alloca { ptr, [128 x i8] }, align 8
  %17 = alloca [2 x i64], align 8
  %18 = getelementptr { ptr, [128 x i8] }, ptr %16, i32 0, i32 0
  store ptr %4, ptr %18, align 8
  %19 = getelementptr i64, ptr %17, i32 0
  store ptr %18, ptr %19, align 8
  %20 = getelementptr { ptr, [128 x i8] }, ptr %16, i32 0, i32 1
  store [128 x i8] %15, ptr %20, align 1
  %21 = getelementptr i64, ptr %17, i32 1
  store ptr %20, ptr %21, align 8
  %22 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 5, i32 1, i32 1, i32 2, i32 1, i32 1, i32 256, i32 1, i32 1, \
i32 4096, i32 1, ptr %1, ptr %17)
  ret i32 %22
}

define i32 @_mlir_ciface_k_mosaic_gpu(ptr %0, ptr %1, ptr %2) {
  %4 = call i32 @k_mosaic_gpu(ptr %0, ptr %1, ptr %2)
  ret i32 %4
}
"""


def test_host_code_is_followed():
    host = host_code.parse(TEXT)
    [d] = host.descriptors
    assert (d.at, d.base, d.element, d.sizes, d.strides, d.swizzle) == (0, Address(1, 6), 7, (64, 1), (64, 1), 128)
    assert (host.area, host.dims, host.smem, host.pdl) == (128, (5, 1, 1, 2, 1, 1, 256, 1, 1), 4096, 1)
    assert host.params == (Address(0, 0), 128)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ptrtoint ptr", "frobnicate ptr"),
        ("i64 128, ptr %13)", "i64 %99, ptr %13)"),
        ("ret i32 %22", "br label %23"),
        ("%5 = getelementptr ptr, ptr %2, i32 1", "%5 = getelementptr i32, ptr %2, i32 1"),  # half an address
        ("store i64 64, ptr %13", "store i64 64, ptr %17"),  # a size that nobody stored
        ("extractvalue { ptr, ptr, i64 } %7, 1", "extractvalue { ptr, ptr, i64 } %7, 0"),
        ("  %16 = alloca", TEXT[TEXT.index("  call void") : TEXT.index("  %15")] + "  %16 = alloca"),  # too late
    ],
)
def test_host_code_that_is_not_known_is_refused(old, new):
    assert old in TEXT
    with pytest.raises(host_code.NotStraight):
        host_code.parse(TEXT.replace(old, new))


# -- compiled calls ---------------------------------------------------------------------------------------------------
ROWS = SHAPE((64, 128), B)
CALLS = [
    ("norms.add_rms", (ROWS, ROWS, SHAPE((128,), B)), dict(eps=1e-6, zero_centered=False)),
    ("linear.row", (SHAPE((64, 1024), B), SHAPE((64, 1024), B)), dict(leaves=8)),
]


@pytest.mark.parametrize(("name", "avals", "statics"), CALLS)
def test_a_kept_plan_is_the_plan_with_machine_code(folder, name, avals, statics):
    pytest.importorskip("jax_plugins.xla_cuda13")
    region = lookup(name)
    bound, kw = region.bind(avals, statics)
    call, now = precompile.Call.of(region, bound, kw), precompile.state()
    assert precompile.kept(call, now) is None
    try:
        made = precompile.make(call)
    except Unavailable as e:
        pytest.skip(str(e))
    kept = precompile.kept(call, now)
    plain = kernel_plan.kernel_plan(region, bound, kw)
    assert kept is not None
    assert kept == made and kept.buffers == plain.buffers and kept.returns == plain.returns
    for ours, theirs in zip(kept.launches(), plain.launches(), strict=True):
        assert isinstance(ours.module, aot.Binary) and ours.module.cubin[:4] == b"\x7fELF"
        assert (ours.operands, ours.outs, ours.aliases) == (theirs.operands, theirs.outs, theirs.aliases)
        pointers = range(len(theirs.operands) + len(theirs.outs))
        used = [p for p in ours.module.host.params if isinstance(p, Address)]
        assert {p.operand for p in used} | {d.base.operand for d in ours.module.host.descriptors} == set(pointers)
    assert precompile.kept(call, "another state") is None
    with pytest.raises(TypeError, match="compiled"):
        plan_file.dump(plain)


def test_workers_make_what_is_missing(folder):
    pytest.importorskip("jax_plugins.xla_cuda13")
    name, avals, statics = CALLS[0]
    bound, kw = lookup(name).bind(avals, statics)
    good, now = precompile.Call.of(lookup(name), bound, kw), precompile.state()
    bad = precompile.Call("norms.nowhere", (), ())
    failed = precompile.ahead([good, bad, good], now, workers=1)
    assert list(failed) == [bad] and "norms.nowhere" in failed[bad]
    assert precompile.kept(good, now) is not None
    assert precompile.ahead([good], now) == {}
    assert "other kernels or settings" in precompile.ahead([good], "another state", workers=1)[good]


def test_a_process_knows_what_it_found_kept(folder, monkeypatch):
    monkeypatch.setattr(precompile, "_found", {})
    assert precompile.found() == dict(kept=0, compiled=0)
    calls = [precompile.Call(f"toy.{name}", (), ()) for name in "abc"]
    store.put(calls[0].key("now"), b"x")
    worker = SimpleNamespace(ended=False, close=lambda: None)
    worker.do = lambda call, now: store.put(call.key(now), b"x") or ""
    monkeypatch.setattr(precompile, "_Worker", lambda: worker)
    precompile.ahead(calls, "now")
    precompile.ahead(calls, "now")  # what it has made itself is not found
    assert precompile.found() == dict(kept=1, compiled=2)


def test_a_worker_that_ends_or_hangs_fails_one_call_only(folder, monkeypatch, caplog):
    """The program in place of a worker answers ok, but for the call named toy.dies, and the one named toy.hangs."""
    program = """
import base64, os, sys, time
with os.fdopen(int(sys.argv[1]), "w") as answers:
    for line in sys.stdin:
        call = base64.b64decode(line)  # not unpickled: that imports JAX, which takes long on a busy machine
        if b"toy.dies" in call:
            os._exit(3)
        if b"toy.hangs" in call:
            time.sleep(60)
        print("ok", file=answers, flush=True)
"""
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda c, **kw: popen([c[0], "-c", program, c[-1]], **kw))
    monkeypatch.setattr(precompile, "SECONDS", 20)
    call = lambda name: precompile.Call(f"toy.{name}", (), ())
    calls = [call("a"), call("dies"), call("hangs"), call("b"), call("c")]
    failed = precompile.ahead(calls, "now", workers=1)
    assert failed == {
        call("dies"): "the worker ended (3)",
        call("hangs"): "the worker took over 20 s and was ended (-9)",
    }
    assert "2 of 5 calls were not compiled ahead" in caplog.text


def test_an_interrupt_leaves_the_calls_that_wait(folder, monkeypatch):
    """The thread that waits is interrupted; what its workers were not at yet is not begun."""
    done = []

    class Worker:
        ended = False

        def do(self, call, now):
            done.append(call)
            interrupted.wait(10)
            return ""

        def close(self):
            pass

    class Threads(precompile.ThreadPoolExecutor):
        def map(self, *args):
            super().map(*args)
            while not done:
                time.sleep(0.01)
            raise KeyboardInterrupt

        def __exit__(self, *args):
            interrupted.set()
            return super().__exit__(*args)

    interrupted = threading.Event()
    monkeypatch.setattr(precompile, "_Worker", Worker)
    monkeypatch.setattr(precompile, "ThreadPoolExecutor", Threads)
    with pytest.raises(KeyboardInterrupt):
        precompile.ahead([precompile.Call(f"toy.{i}", (), ()) for i in range(9)], "now", workers=1)
    assert len(done) == 1


# -- launching --------------------------------------------------------------------------------------------------------
def test_the_driver_follows_the_host_code():
    from bridges.torch_ops import driver

    seen = []

    def init(at, base, element, rank, sizes, strides, swizzle, window):
        seen.append((at.value % 64, base, element, list(sizes)[:rank], list(strides), swizzle, list(window)))

    def start(function, *rest):
        *dims, smem, pdl, stream, params = rest
        first = ctypes.c_uint64.from_address(params[0]).value
        seen.append((function, tuple(dims), smem, pdl, stream, first, params[1] % 64))

    runtime = SimpleNamespace(mosaic_gpu_init_tma_desc=init, mosaic_gpu_launch_kernel=start)
    launch = driver.launcher(aot.Binary(b"", "k", host_code.parse(TEXT)), "function", runtime)
    launch(77, (ctypes.c_void_p * 2)(1000, 2000))
    assert seen == [
        (0, 2006, 7, [64, 1], [64, 1], 128, [64, 1]),
        ("function", (5, 1, 1, 2, 1, 1, 256, 1, 1), 4096, 1, 77, 1000, 0),
    ]


def test_constants_and_fills_survive_a_file():
    ops = (
        kernel_plan.Fill(0, float("-inf")),
        kernel_plan.Constant(1, np.arange(6, dtype=np.int32).reshape(2, 3), True),
        kernel_plan.View(2, 1, 4),
        kernel_plan.Copy(3, 0),
        kernel_plan.Allocate(4),
    )
    buffers = tuple(kernel_plan.Buffer((2, 3), "int32") for _ in range(5))
    plan = kernel_plan.KernelPlan("a.b", 0, buffers, ops, (1, 2))
    back = plan_file.load(plan_file.dump(plan))
    assert back.ops[0] == ops[0] and back.ops[2:] == ops[2:] and back.buffers == buffers and back.returns == (1, 2)
    constant = back.ops[1]
    assert isinstance(constant, kernel_plan.Constant)
    assert np.array_equal(constant.data, ops[1].data) and constant.fresh and constant.data.dtype == np.int32


# -- fingerprints ------------------------------------------------------------------------------------------------------
def test_a_contracts_artifacts_are_kept_under_the_state_that_they_follow_from(folder, monkeypatch):
    from isojax import lowering, profile

    counted = []
    real = lowering.fingerprint
    monkeypatch.setattr(lowering, "fingerprint", lambda *a: counted.append(a[0].name) or real(*a))
    artifact = profile.artifact.__wrapped__  # without the process's own memory
    now = precompile.state()
    first = artifact("residual.add", "cpu", now)
    calls = len(counted)
    assert calls and artifact("residual.add", "cpu", now) == first and len(counted) == calls
    assert artifact("residual.add", "cpu") == first and len(counted) == 2 * calls  # no state: lowered anew
    monkeypatch.setattr(schedule, "KV_TILE", schedule.KV_TILE * 2)
    assert precompile.state() != now
    artifact("residual.add", "cpu", precompile.state())
    assert len(counted) == 3 * calls
