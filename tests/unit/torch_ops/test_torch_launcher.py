"""The CUDA launcher without a GPU: plans read off real lowerings, launches recorded by a stub."""

from __future__ import annotations

import ctypes

import jax.numpy as jnp
import pytest
import torch

from bridges.torch_ops import cuda, xla
from bridges.torch_ops.cuda import Launcher
from isojax.errors import InputError, Unavailable, Unsupported
from isojax.kernel_plan import Copy, Fill, Launch, kernel_plan

from .torch_ops_toys import F32, Spec, counted, overwritten, scaled, toy

CPU = torch.device("cpu")
X = Spec((2, 128), F32)
BYTES = 256 * 4


class Stub:
    """Stands in for compiler, stream and GPU: each kernel is a Python function of the memory it is given."""

    def __init__(self, *kernels):
        self.kernels, self.loaded, self.log, self.result = list(kernels), [], [], 0

    def load(self, module, device):
        i = len(self.loaded)
        self.loaded.append(module)

        @cuda._LAUNCH  # through C, as the real one is
        def host_launch(function, stream, buffers):
            pointers = list(ctypes.cast(buffers, ctypes.POINTER(ctypes.c_void_p))[: self.sizes[i]])
            self.log.append((function - 4096, stream, pointers))
            try:
                self.kernels[i](*[ctypes.cast(p, ctypes.POINTER(ctypes.c_float)) for p in pointers])
            except Exception as e:  # ctypes would only print it
                self.log.append(e)
            return self.result

        return cuda._checked(ctypes.c_void_p(4096 + i), host_launch)

    def launcher(self, plan):
        self.sizes = [len(op.operands) + len(op.outs) for op in plan.launches()]
        return Launcher(plan, CPU, load=self.load, stream=lambda index: 77)


def multiply(x, by, out):
    for i in range(256):
        out[i] = x[i] * by[0]


def move(x, y, out):
    assert ctypes.addressof(x.contents) == ctypes.addressof(out.contents), "aliased: one buffer"
    for i in range(256):
        out[i] = y[i]


def two_kernels(x):
    by = jnp.full((1,), 2.0, F32)
    return scaled(scaled(x.reshape(-1), by), jnp.asarray([3.0, 9.0], F32)).reshape(2, 128)


def test_two_kernels_in_order_with_constants_and_reshapes():
    region = toy("two", two_kernels, lambda x: x * 2 * 3)
    plan = kernel_plan(region, [X], {})
    assert [type(op).__name__ for op in plan.ops].count("Launch") == 2
    stub = Stub(multiply, multiply)
    launcher = stub.launcher(plan)
    assert len(stub.loaded) == 2 and not stub.log, "compiled when built, launched when called"
    x = torch.randn(2, 128)
    (y,) = launcher(x)
    assert y.shape == (2, 128) and torch.equal(y, x * 2 * 3)
    (first, stream, a), (second, _, b) = stub.log
    assert (first, second, stream) == (0, 1, 77)
    assert a[0] == x.data_ptr() and a[2] == b[0], "the second kernel reads what the first wrote"
    assert a[1] != b[1] and launcher(x)[0].data_ptr() != y.data_ptr()


def test_a_launch_that_the_driver_refuses_is_an_error():
    stub = Stub(multiply, multiply)
    launcher = stub.launcher(kernel_plan(toy("refused", two_kernels, lambda x: x * 2 * 3), [X], {}))
    stub.result = 1
    with pytest.raises(Unavailable, match="CUDA error 1"):
        launcher(torch.randn(2, 128))
    assert len(stub.log) == 1, "nothing is launched after it"


def test_an_operand_that_a_kernel_overwrites_is_copied_first():
    region = toy(
        "over", lambda x: overwritten(x.reshape(-1), scaled(x.reshape(-1), x.reshape(-1)[:1])), lambda x: x.reshape(-1)
    )
    plan = kernel_plan(region, [X], {})
    assert sum(isinstance(op, Copy) for op in plan.ops) == 1
    stub = Stub(multiply, move)
    x = torch.randn(2, 128)
    before = x.clone()
    (y,) = stub.launcher(plan)(x)
    assert torch.equal(x, before), "regions are functions: their operands do not change"
    assert torch.equal(y, (before * before[0, 0]).reshape(-1))


def test_a_value_read_again_is_not_overwritten():
    def kernel(x):
        a = scaled(x.reshape(-1), jnp.full((1,), 2.0, F32))
        return overwritten(a, scaled(a, jnp.full((1,), 5.0, F32))), a

    region = toy("again", kernel, lambda x: (x.reshape(-1), x.reshape(-1)))
    plan = kernel_plan(region, [X], {})
    assert sum(isinstance(op, Copy) for op in plan.ops) == 1
    x = torch.randn(2, 128)
    written, a = Stub(multiply, multiply, move).launcher(plan)(x)
    assert torch.equal(a, (x * 2).reshape(-1)) and torch.equal(written, (x * 10).reshape(-1))


def test_scratch_that_a_kernel_writes_is_zeroed_for_every_call():
    region = toy("counted", lambda x: counted(x.reshape(-1)), lambda x: x.reshape(-1))
    plan = kernel_plan(region, [X], {})
    [launch] = plan.launches()
    assert launch.aliases and any(isinstance(op, Fill) and op.fresh and op.value == 0 for op in plan.ops)
    seen = []

    def arrive(x, arrived, out, arrived_again):
        counts = ctypes.cast(arrived, ctypes.POINTER(ctypes.c_int32))
        seen.append((counts[0], counts[1]))
        counts[0], counts[1] = 9, 9
        assert ctypes.addressof(arrived.contents) == ctypes.addressof(arrived_again.contents)

    launcher = Stub(arrive).launcher(plan)
    launcher(torch.zeros(2, 128))
    launcher(torch.zeros(2, 128))
    assert seen == [(0, 0), (0, 0)], "a real zeroed buffer of full size, each time"


def test_constants_that_a_kernel_writes_are_made_anew():
    region = toy("zeros", lambda x: overwritten(jnp.zeros((256,), F32), x.reshape(-1)), lambda x: x.reshape(-1))
    plan = kernel_plan(region, [X], {})
    launcher = Stub(move).launcher(plan)
    a, b = launcher(torch.ones(2, 128))[0], launcher(torch.full((2, 128), 2.0))[0]
    assert a.eq(1).all() and b.eq(2).all() and a.data_ptr() != b.data_ptr()


def test_results_never_share_memory_with_operands_or_each_other():
    def kernel(x):
        y = scaled(x.reshape(-1), jnp.full((1,), 2.0, F32))
        return y, y, x.reshape(-1)

    region = toy("shared", kernel, lambda x: (x.reshape(-1),) * 3)
    x = torch.randn(2, 128)
    a, b, c = Stub(multiply).launcher(kernel_plan(region, [X], {}))(x)
    assert len({a.data_ptr(), b.data_ptr(), c.data_ptr(), x.data_ptr()}) == 4
    assert torch.equal(a, b) and torch.equal(c, x.reshape(-1))


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: x.double(),
        lambda x: x.reshape(4, 64),
        lambda x: torch.zeros(128, 2).t(),
        lambda x: torch.zeros(257)[1:].reshape(2, 128),
    ],
    ids=["dtype", "shape", "strided", "misaligned"],
)
def test_operands_are_checked_before_anything_is_launched(bad):
    stub = Stub(multiply, multiply)
    launcher = stub.launcher(kernel_plan(toy("two", two_kernels, lambda x: x * 6), [X], {}))
    with pytest.raises(InputError, match="region toy.two, operand 0"):
        launcher(bad(torch.zeros(2, 128)))
    assert not stub.log


def test_work_left_to_xla_is_refused():
    region = toy("left", lambda x: scaled(jnp.sin(x).reshape(-1), jnp.full((1,), 2.0, F32)), lambda x: x.reshape(-1))
    with pytest.raises(Unsupported, match="toy.left: given stablehlo.sine between its kernels"):
        kernel_plan(region, [X], {})
    with pytest.raises(Unsupported, match="of kind 'xla'"):
        kernel_plan(toy("stand_in", jnp.sin, jnp.sin, kind="xla"), [X], {})


def test_leading_rows_are_a_view():
    region = toy("lead", lambda x: scaled(x.reshape(-1)[128:], jnp.full((1,), 2.0, F32)), lambda x: x.reshape(-1)[128:])
    plan = kernel_plan(region, [X], {})

    def half(x, by, out):
        for i in range(128):
            out[i] = x[i] * by[0]

    x = torch.randn(2, 128)
    assert torch.equal(Stub(half).launcher(plan)(x)[0], x[1] * 2)


def test_capture_before_compiling_is_a_clear_error(monkeypatch):
    region = toy("two", two_kernels, lambda x: x * 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unavailable, match=r"toy.two on float32\[2, 128\] is not compiled yet.*before the capture"):
        cuda.region_function(region, [X], {}, torch.device("cuda:0"))


def test_xla_stand_ins_need_a_cuda_backend():
    with pytest.raises(Unavailable, match="JAX_PLATFORMS=cuda,cpu"):
        xla.region_function(toy("stand_in", jnp.sin, jnp.sin, kind="xla"), [X], {}, torch.device("cuda:0"))


def test_plans_hold_one_launch_per_kernel():
    plan = kernel_plan(toy("two", two_kernels, lambda x: x * 6), [X], {})
    first, second = plan.launches()
    assert isinstance(first, Launch) and first.module and second.operands[0] == first.outs[0]
    assert plan.buffers[first.outs[0]].shape == (256,)
