"""The report: JSON there and back, sections, and what the pages say."""

from __future__ import annotations

import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from isojax import cli, doctor
from isojax.bench import html, kernels, markdown, plot
from isojax.bench.compile import Job
from isojax.bench.result import Machine, Report, Row, load
from isojax.bench.sections import sections, state
from isojax.errors import InputError

MACHINE = Machine(
    gpu="NVIDIA H200", driver="580.1", cuda="13.0", date="2026-11-29T20:00:00+00:00", versions={"jax": "0.11.2"},
    copy_bytes_per_us=4.2e6, matmul_flops_per_us=7e8, clocks_before={"clocks.sm": "1980 MHz"},
)  # fmt: skip


def made(region, ratio, **place):
    name = " ".join(str(v) for v in place.values())
    return Row(region=region, case=name, us=20.0, peer_us=20.0 * ratio, bytes_us=10.0, flops_us=5.0, **place)


@pytest.fixture
def report():
    rows = [
        made("linear.column", r, model=m, part="qkv", at={"M": n})
        for m, r in (("Qwen3-8B", 1.05), ("MiMo-7B", 0.9))
        for n in (64, 1024, 4096)
    ]
    rows += [made("attn.core", 1.0, model="Qwen3-8B", at={"sequences": s, "context": 1024}) for s in (1, 64)]
    rows += [made("attn.core", 0.5, model="Qwen3-8B", at={"length": 2048})]
    rows += [made("toy.scale", 3.0), Row(region="norms.rms", case="M64", at={"M": 64}, error="Unsupported: a | b <c>")]
    return Report(machine=MACHINE, seconds={"compile": 1.0, "measure": 2.0}, rows=tuple(rows))


def test_json_there_and_back(report, tmp_path):
    report.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == report
    plain = json.loads((tmp_path / "r.json").read_text())
    assert plain["schema"] == "isojax.bench.kernels/1"
    assert plain["rows"][0]["ratio"] == pytest.approx(1.05) and plain["rows"][0]["floor_us"] == 10.0


@pytest.mark.parametrize("change", [{"schema": "isojax.bench.kernels/2"}, {"rows": [{"region": 1}]}, {"machine": None}])
def test_foreign_files_are_refused(report, tmp_path, change):
    report.save(tmp_path / "r.json")
    plain = json.loads((tmp_path / "r.json").read_text()) | change
    (tmp_path / "r.json").write_text(json.dumps(plain))
    with pytest.raises(InputError, match=next(iter(change))):
        load(tmp_path / "r.json")
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(InputError, match="JSON"):
        load(tmp_path / "r.json")


@pytest.mark.parametrize(
    "change",
    [
        {"us": 0.0}, {"us": -1.0}, {"us": math.nan}, {"peer_us": 0.0}, {"peer_us": math.inf}, {"at": {"M": 0}},
        {"us": None}, {"error": "a time and an error"}, {"bytes_us": -1.0},
    ],
)  # fmt: skip
def test_edited_figures_are_refused(report, tmp_path, change):
    report.save(tmp_path / "r.json")
    plain = json.loads((tmp_path / "r.json").read_text())
    plain["rows"][0] |= change
    (tmp_path / "r.json").write_text(json.dumps(plain))
    with pytest.raises(InputError, match="rows.0.*isojax bench kernels --json"):
        load(tmp_path / "r.json")


def test_a_file_says_what_it_is(report, tmp_path):
    report.save(tmp_path / "r.json")
    plain = json.loads((tmp_path / "r.json").read_text())
    (tmp_path / "r.json").write_text(json.dumps({k: v for k, v in plain.items() if k != "schema"}))
    with pytest.raises(InputError, match="it has no schema"):
        load(tmp_path / "r.json")


def test_a_run_that_did_not_end_is_called_so(report):
    assert "UNFINISHED" not in markdown.render(report)
    partial = report.model_copy(update={"seconds": {"compile": 1.0}})
    assert f"UNFINISHED: the run ended after {len(report.rows)} cases" in markdown.render(partial)


def test_a_region_of_any_name_stays_in_its_folder(report):
    [section] = sections([made("../up", 1.0, at={"M": 1})])[0]
    assert "/" not in section.slug


def test_sections_have_a_line_per_model_and_decode_a_table_per_model(report):
    found, loose = sections(report.rows)
    assert [s.title for s in found] == [
        "linear.column, rows M",
        "attn.core, Qwen3-8B, context",
        "attn.core, sequence length",
        "norms.rms, rows M",
    ]
    assert list(found[0].lines) == ["Qwen3-8B qkv", "MiMo-7B qkv"] and found[0].sizes == (64, 1024, 4096)
    assert list(found[1].lines) == ["1 seq", "64 seq"]
    assert [r.name for r in loose] == ["toy.scale/"]
    assert [state(r) for r in found[0].lines["MiMo-7B qkv"].values()] == ["met", "missed", "missed"]


def test_two_cases_in_one_place_are_refused(report):
    with pytest.raises(ValueError, match="one place"):
        sections([*report.rows, report.rows[0]])


def test_markdown(report):
    text = markdown.render(report)
    assert "| linear.column, M >= 1024 | >= 1.00 of the peer, none < 0.93 | 4 | 0.972 |" in text
    assert "| MiMo-7B qkv | 0.90 (20.0, 50%) | **0.90** (20.0, 50%) | **0.90** (20.0, 50%) |" in text
    assert "NVIDIA H200" in text and "clocks.sm 1980 MHz" in text and "`norms.rms/M64`: Unsupported: a | b <c>" in text


def test_markdown_renews_the_marked_part_only(report, tmp_path):
    page, plots = tmp_path / "page.md", tmp_path / "plots"
    page.write_text(f"before\n{markdown.BEGIN}\nstale words\n{markdown.END}\nafter\n")
    markdown.write(report, page, plots)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale words" not in text
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == 4 and all((tmp_path / link).exists() for link in links)
    page.write_text("somebody's page")
    with pytest.raises(InputError, match="begin"):
        markdown.write(report, page)
    assert page.read_text() == "somebody's page"


def test_plots_are_well_formed_and_hold_every_point(report):
    for section in sections(report.rows)[0]:
        tree = ElementTree.fromstring(plot.svg(section))
        points = [e for e in tree.iter() if e.tag.endswith("circle")]
        assert len(points) == sum(
            section.value(r) is not None for line in section.lines.values() for r in line.values()
        )


def test_html_is_one_file_with_everything(report, tmp_path):
    html.write(report, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text.count("<svg") == 4 and "a | b &lt;c&gt;" in text and "<c>" not in text
    assert not re.search(r'(src|href)="', text)


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["isojax", "bench", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code
        return code, capsys.readouterr()

    return run


def test_kernels_command_without_the_gpu_part(report, tmp_path, monkeypatch, command):
    seen = {}

    def run(chosen, device, progress, modules, workers, keep):
        seen.update(chosen=[f"{r.name}/{c.name}" for r, c in chosen], device=str(device), workers=workers)
        progress("compile", 1, 1)
        keep(report.model_copy(update={"rows": report.rows[:1]}))
        seen["kept"] = len(load(file).rows)
        return report

    file = tmp_path / "r.json"
    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(doctor, "require_sm90", lambda *_: None)
    args = ("kernels", "mlp.swiglu", "--match", "MiMo.*M64 ", "--workers", 3)
    code, _ = command(*args, "--json", file, "--html", tmp_path / "r.html", "--markdown", tmp_path / "r.md")
    assert code == 1  # a case failed
    assert seen == dict(chosen=["mlp.swiglu/MiMo-7B M64 F11008"], device="cuda:0", workers=3, kept=1)
    assert load(file) == report and (tmp_path / "r.html").exists() and (tmp_path / "r.md").exists()
    code, out = command(*args, "--json", "-")
    assert json.loads(out.out)["schema"] == "isojax.bench.kernels/1"
    assert command("kernels", "no.region")[0] == 2
    seen.clear()
    (tmp_path / "mine.md").write_text("somebody's page")
    for bad in (
        ["--match", "("], ["--json", tmp_path / "no" / "r.json"], ["--markdown", tmp_path / "mine.md"],
        ["--html", tmp_path], ["--plots", file, "--markdown", tmp_path / "new.md"],
    ):  # fmt: skip
        code, out = command(*args[:2], *bad)
        assert code == 2 and str(bad[1]) in out.err
    assert not seen  # refused before anything ran


def test_strict_wants_a_run_that_judged_something(report, tmp_path, command):
    file = tmp_path / "r.json"
    good = report.model_copy(update={"rows": report.rows[1:2]})
    good.save(file)
    assert command("show", file, "--strict")[0] == 0
    good.model_copy(update={"seconds": {"compile": 1.0}}).save(file)
    code, out = command("show", file, "--strict")
    assert code == 1 and "the run ended after 1 cases" in out.err
    report.model_copy(update={"rows": report.rows[-2:-1]}).save(file)  # toy.scale: no bar is for it
    assert command("show", file)[0] == 0
    code, out = command("show", file, "--strict")
    assert code == 1 and "no case that ran answers to a bar" in out.err


def test_dry_command(monkeypatch, command):
    monkeypatch.setattr(kernels, "compiled", lambda chosen, *_: ({c.name: 2 for _, c in chosen}, {}))
    code, out = command("kernels", "mlp.swiglu", "--match", "MiMo.*M64 ", "--dry")
    assert code == 0 and "1 of 1 cases lowered, 2 kernels" in out.out
    monkeypatch.setattr(kernels, "compiled", lambda *_: ({}, {Job("mlp.swiglu", "x"): "boom"}))
    code, out = command("kernels", "--dry", "--json", "r.json")
    assert code == 2 and "nothing for --json" in out.err
    code, out = command("kernels", "mlp.swiglu", "--match", "MiMo.*M64 ", "--dry")
    assert code == 1 and "mlp.swiglu/x: boom" in out.err


def test_show_command(report, tmp_path, command):
    file = tmp_path / "r.json"
    report.save(file)
    code, out = command("show", file, "--html", tmp_path / "r.html")
    assert code == 1 and "linear.column/Qwen3-8B" in out.out and "missed" in out.out  # 1: a case failed
    assert (tmp_path / "r.html").exists()
    report.model_copy(update={"rows": report.rows[:-1]}).save(file)
    assert command("show", file, "--brief")[0] == 0
    code, out = command("show", file, "--brief", "--strict")
    assert code == 1 and "missed: linear.column, M >= 1024" in out.err
    code, out = command("show", file, "--plots", tmp_path)
    assert code == 2 and "--markdown" in out.err
    assert command("show", tmp_path / "none.json")[0] == 2
    report.model_copy(update={"rows": (report.rows[0], report.rows[0])}).save(file)
    code, out = command("show", file)
    assert code == 2 and not out.out and "one place" in out.err
