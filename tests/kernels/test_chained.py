"""The rules of programmatic dependent launch (isojax.pallas_kernels.chained), held by the code that ptxas gets."""

from __future__ import annotations

import functools
import re

import pytest

from isojax.lowering import dumped, jitted
from isojax.pallas_kernels import chained
from isojax.region import REGISTRY, Region, load_shipped

load_shipped()
REGIONS = sorted(n for n, r in REGISTRY.items() if n.split(".")[0] != "toy" and r.bench and r.implementation("sm90"))
GLOBAL = re.compile(r"^\s*(?:@\S+ )?(?:ld\.global|st\.global|red\.|atom\.|cp\.async|cp\.reduce)\S*", re.M)
# What starts before its own wait on purpose, with the reason beside its code: attn.core's fold, and embed's rows.
EARLY = {"attn.core": 1, "embed.lookup_bwd": 1}


def entries(ptx: str) -> list[str]:
    """The text of each kernel."""
    return re.split(r"^\.visible \.entry ", ptx, flags=re.M)[1:]


def broken(text: str) -> str:
    """The first thing that a kernel does too early, or ''."""
    wait, start = text.find("griddepcontrol.wait"), text.find("griddepcontrol.launch_dependents")
    if wait < 0:
        return "never waits"
    if 0 <= start < wait:
        return "lets the next one start before it waits"
    touched = [m.group().strip() for m in GLOBAL.finditer(text, 0, wait)]
    return next((t for t in touched if ".prefetch." not in t), "")


def smallest(region: Region):
    """The smallest bench case of each kind: rows of a batch, causal attention, decode."""
    assert region.bench is not None
    cases = sorted(region.bench(), key=lambda c: -c.bytes - c.flops)
    return [c.bound(region) for c in {frozenset(c.at): c for c in cases}.values()]


@pytest.mark.parametrize("name", REGIONS)
def test_kernels_wait_before_they_touch_memory(name):
    region = REGISTRY[name]
    texts = [t for args, kw in smallest(region) for t in entries(dumped("PTX", jitted(region, kw), *args))]
    found = [broken(t) for t in texts]
    assert found and sum(bool(f) for f in found) == EARLY.get(name, 0), found
    assert "never waits" not in found


def test_a_kernel_that_does_not_wait_is_found(monkeypatch):
    region = REGISTRY["norms.rms"]
    [(args, statics)] = smallest(region)
    monkeypatch.setattr(chained, "begin", lambda: None)
    [text] = entries(dumped("PTX", functools.partial(region.implementation("sm90").fn, **statics), *args))
    assert broken(text) == "never waits"
    early = "ld.global.v4.u32 {%r1}, [%rd1];\n griddepcontrol.wait;"
    assert broken(early) == "ld.global.v4.u32"
    assert broken("griddepcontrol.launch_dependents; griddepcontrol.wait;").startswith("lets")
