"""Run by test_torch_region_op in a process of its own: region ops under torch.compile, whole graph, any row count."""

import torch
import torch._dynamo.backends.debugging as backends

from bridges.torch_ops import region_op

torch.manual_seed(0)
rms, column = region_op("norms.rms"), region_op("linear.column")
w, m = torch.randn(64).bfloat16().requires_grad_(), torch.randn(96, 64).bfloat16().requires_grad_()


def model(x, w, m):
    return column(rms(x * 1, w, eps=1e-6), m)


for backend in ("eager", "aot_eager"):
    torch._dynamo.reset()
    graphs = []

    def keep(module, inputs, backend=backend, graphs=graphs):
        graphs.append(module.code)
        return getattr(backends, backend)(module, inputs)

    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=True)
    for rows in (5, 21, 64):
        x = torch.randn(rows, 64).bfloat16().requires_grad_()
        found = []
        for f in (model, compiled):
            y = f(x, w, m)
            found.append([y.detach(), *torch.autograd.grad(y.float().sum(), (x, w, m))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (backend, rows)
    assert len(graphs) == 1, "a symbolic row count must not recompile"
    assert "isojax.norms_rms" in graphs[0] and "isojax.linear_column" in graphs[0], graphs[0]
    print(backend, "equal")
