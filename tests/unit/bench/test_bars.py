"""Bars: what they cover, and when they are met."""

from __future__ import annotations

import pytest

from isojax.bench.bars import BARS, Bar, bar, covering, judge
from isojax.bench.result import Row
from isojax.region import REGISTRY, load_shipped

load_shipped()


def row(ratio=1.0, region="linear.column", at=None, **kw):
    at = {"M": 1024} if at is None else at
    return Row(region=region, case=f"{at} {ratio}", at=at, us=10.0, peer_us=10.0 * ratio, bytes_us=9.0, **kw)


def verdict(title, rows):
    [found] = [v for v in judge(rows) if v.bar.title == title]
    return found


def test_bars_name_regions_that_exist():
    assert {r for b in BARS for r in b.regions} <= set(REGISTRY)


def test_every_benched_region_answers_to_a_bar():
    """But for these, of which no speed is asked: they are shown, with peer and floor."""
    free = {"embed.lookup", "residual.add", "grad.accumulate", "head.logits", "head.logprob_bwd"}
    benched = {n for n, r in REGISTRY.items() if r.bench is not None}
    assert free == benched - {r for b in BARS for r in b.regions}


def test_a_case_answers_to_one_bar():
    names = {r for b in BARS for r in b.regions}
    for at in ({"M": m} for m in (1, 64, 256, 512, 1024, 8192)):
        for name in names:
            assert sum(b.covers(row(region=name, at=at)) for b in BARS) <= 1
    for at in ({"length": 4096}, {"sequences": 64, "context": 2048}):
        assert sum(b.covers(row(region="attn.core", at=at)) for b in BARS) == 1
    assert covering(row(at={"M": 512})) is None


def test_mean_and_each_are_judged_apart():
    title = "linear.column, M >= 1024"
    assert verdict(title, [row(1.1), row(0.94)]).met is True
    low_mean = verdict(title, [row(0.98), row(0.99)])
    assert low_mean.met is False and low_mean.short == 0
    assert low_mean.mean is not None and low_mean.mean < 1
    one_short = verdict(title, [row(1.3), row(0.92)])
    assert one_short.met is False and one_short.short == 1
    assert one_short.worst is not None and one_short.worst.ratio == pytest.approx(0.92)
    assert verdict(title, [row(4.0), row(0.25)]).mean == pytest.approx(1.0)


def test_a_failed_case_is_a_missed_bar_and_no_case_is_no_verdict():
    failed = Row(region="linear.column", case="x", at={"M": 1024}, error="boom")
    found = verdict("linear.column, M >= 1024", [row(1.2), failed])
    assert found.met is False and found.missing == 1 and found.cases == 2
    assert verdict("linear.column, M >= 1024", [failed]).met is False
    assert verdict("linear.column, M >= 1024", []).met is None


def test_bandwidth_bars_look_at_bytes_not_at_the_peer():
    rows = [row(0.1, "norms.rms", {"M": 8192}), row(9.0, "norms.rms", {"M": 64})]
    found = verdict("norms", rows)
    assert found.met is True and found.cases == 1 and found.mean == pytest.approx(0.9)


def test_a_stand_in_for_the_peer_does_not_count():
    title, at = "attention, causal, forward", {"length": 4096}
    assert verdict(title, [row(1.1, "attn.core", at, against="FlashAttention 3")]).met is True
    found = verdict(title, [row(1.1, "attn.core", at, against="torch SDPA")])
    assert found.met is False and found.missing == 1


def test_memory_is_part_of_the_bar():
    title, at = "head.logprob, 8k x vocabulary", {"M": 8192}
    assert verdict(title, [row(1.1, "head.logprob", at, memory=5, peer_memory=100)]).met is True
    assert verdict(title, [row(1.1, "head.logprob", at, memory=6, peer_memory=100)]).met is False
    assert verdict(title, [row(1.1, "head.logprob", at)]).met is False  # not known is not met


def test_one_figure_is_asked_of_the_mean_and_of_each():
    assert bar("x", ["a.b"], "ratio", 0.9) == Bar("x", ("a.b",), "ratio", 0.9, 0.9)
