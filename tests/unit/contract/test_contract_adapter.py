import pytest
from contract_samples import ALL_CASES, DEGREES, ENGINE, entry, impl, native_sample, sample, sha, unsealed, views

import contract as c

DOC = sample()
ENGINE_REGIONS = ("head.logprob_rows", "head.sample", "linear.row", "norms.rms")
TRAINER_REGIONS = ("head.logprob", "linear.row", "norms.rms")


def engine(doc: c.Contract = DOC, changes: dict[str, c.RegionView] | None = None) -> c.Adapter:
    return c.Adapter("vllm", doc, registry_view={**views(doc), **(changes or {})})


def installed() -> c.Adapter:
    adapter = engine()
    adapter.install(ENGINE, ENGINE_REGIONS, DEGREES)
    return adapter


def refusal(call) -> c.AdapterRefusal:
    with pytest.raises(c.AdapterRefusal) as caught:
        call()
    for finding in caught.value.findings:
        assert all((finding.entry, finding.rule, finding.given, finding.allowed, finding.mend)), finding
    return caught.value


def test_install_of_what_the_contract_names():
    adapter = engine()
    done = adapter.install(ENGINE, ENGINE_REGIONS, DEGREES)
    assert done.numerical_policy == adapter.identities.numerical_policy and done.unused == ()
    assert ("norms.rms", "engine_decode") in done.regions
    assert [record.event for record in adapter.ledger.records] == ["install"]
    assert c.Adapter("megatron", DOC, registry_view=views(DOC)).install(("trainer_fwd",), TRAINER_REGIONS, DEGREES)


def test_install_by_case_and_region_views():
    doc = sample(composition=(entry("linear.row"), entry("norms.rms")))
    plain = {name: view for key, view in views(doc).items() for name in [key.split("@")[0]]}
    adapter = c.Adapter("jax", doc, registry_view=plain)
    done = adapter.install(ENGINE, {"engine_decode": ["norms.rms"], "engine_prefill": iter(["linear.row"])}, DEGREES)
    assert done.regions == (("linear.row", "engine_prefill"), ("norms.rms", "engine_decode"))
    assert done.unused == (("linear.row", "engine_decode"), ("norms.rms", "engine_prefill"))


def test_an_invalid_contract_is_not_held():
    with pytest.raises(c.ContractError):
        c.Adapter("vllm", unsealed(), registry_view={})


def test_unknown_case():
    fewer = sample(cases=tuple(c.CASES[id] for id in ENGINE), composition=(entry("norms.rms", ENGINE),))
    for case in ("trainer_fwd", "decode"):
        error = refusal(lambda: engine(fewer).install((case,), ("norms.rms",), DEGREES))  # noqa: B023
        assert error.rules == ("case",) and case in str(error) and "engine_decode" in str(error)


def test_region_that_the_contract_does_not_cover():
    error = refusal(lambda: installed().install(("engine_decode",), (*ENGINE_REGIONS, "gdn.core"), DEGREES))
    assert error.rules == ("coverage",) and "gdn.core [engine_decode]" in str(error)


def test_region_not_covered_in_this_case():
    error = refusal(lambda: engine().install(("trainer_fwd",), ("head.sample",), DEGREES))
    assert error.rules == ("coverage",) and "engine_decode, engine_prefill" in str(error)


def test_region_that_the_runtime_lacks():
    adapter = c.Adapter("vllm", DOC, registry_view={})
    error = refusal(lambda: adapter.install(("engine_decode",), ("norms.rms",), DEGREES))
    assert error.rules == ("coverage",) and "no implementation" in str(error)


HELD = next(held for region, _, held in DOC.owners() if region == "norms.rms")


@pytest.mark.parametrize(
    "change, field",
    [
        ({"implementation": impl("other")}, "implementation.id"),
        ({"implementation": impl("norms.rms", 2)}, "implementation.version"),
        ({"constants": {**HELD.constants, "row_tile": 128}}, "constants.row_tile"),
        ({"constants": {**HELD.constants, "fused": 1}}, "constants.fused"),
        ({"constants": {**HELD.constants, "eps": 1.0000001e-6}}, "constants.eps"),
        ({"constants": {"eps": 1e-6, "fused": True}}, "constants.row_tile"),
        ({"constants": {**HELD.constants, "more": None}}, "constants.more"),
        ({"artifact": sha("other")}, "artifact"),
        ({"artifact": None}, "artifact"),
        ({"toolchain": {"jax": "0.11.2", "jaxlib": "0.11.3"}}, "toolchain.jaxlib"),
        ({"toolchain": {"jax": "0.11.2"}}, "toolchain.jaxlib"),
        ({"toolchain": {**DOC.toolchain, "triton": "3"}}, "toolchain.triton"),
    ],
)
def test_live_arithmetic_that_differs(change, field):
    same = {
        "implementation": HELD.impl,
        "constants": HELD.constants,
        "artifact": HELD.artifact,
        "toolchain": DOC.toolchain,
    }
    key = "norms.rms@engine_decode"
    engine(changes={key: c.RegionView(**same)}).install(ENGINE, ENGINE_REGIONS, DEGREES)  # the control: nothing changed
    adapter = engine(changes={key: c.RegionView(**{**same, **change})})
    error = refusal(lambda: adapter.install(ENGINE, ENGINE_REGIONS, DEGREES))
    (finding,) = error.findings
    assert finding.rule == "identity" and finding.entry == "region norms.rms [engine_decode]"
    assert finding.given.startswith(f"{field} is ")
    adapter.install(("engine_prefill",), ENGINE_REGIONS, DEGREES)  # only what is installed is compared


def test_the_first_region_is_named_and_the_others_counted():
    stale = views(DOC, toolchain={"jax": "0.11.2", "jaxlib": "0.10.0"})
    error = refusal(lambda: c.Adapter("vllm", DOC, registry_view=stale).install(ENGINE, ENGINE_REGIONS, DEGREES))
    (finding,) = error.findings
    assert "head.logprob_rows [engine_decode]" in finding.entry and "7 more" in finding.given


def test_python_floats_in_a_view_are_compared_by_bits():
    held = c.RegionView(HELD.impl, {"eps": 1e-6, "row_tile": 64, "fused": True}, HELD.artifact, DOC.toolchain)
    engine(changes={"norms.rms@engine_decode": held}).install(ENGINE, ENGINE_REGIONS, DEGREES)


def test_wrong_arch():
    adapter = engine(changes={"norms.rms@engine_decode": c.RegionView(impl("norms.rms", arch="sm90"))})
    error = refusal(lambda: adapter.install(ENGINE, ENGINE_REGIONS, DEGREES))
    assert error.rules == ("arch",) and "sm90" in str(error)


@pytest.mark.parametrize(
    "change, axis",
    [
        ({"tp": 16}, "tp"),
        ({"tp": 3}, "tp"),
        ({"tp": 2.0}, "tp"),
        ({"tp": "2"}, "tp"),
        ({"sp": 2}, "sp"),
        ({"pp": 2}, "pp"),
        ({"ep": 2}, "ep"),
        ({"xp": 1}, "xp"),
        ({"tp": None}, "tp"),
    ],
)
def test_degree_outside_every_claim(change, axis):
    error = refusal(lambda: engine().install(ENGINE, ENGINE_REGIONS, {**DEGREES, **change}))
    assert error.rules == ("degree",) and error.findings[0].entry == f"axis {axis}"


def test_a_claimed_axis_must_be_reported():
    error = refusal(lambda: engine().install(ENGINE, ENGINE_REGIONS, {"tp": 2, "sp": 0}))
    assert error.findings[0].entry == "axis pp" and "no degree given" in str(error)


@pytest.mark.parametrize("degrees", [{"tp": 8}, {"sp": False}, {"sp": True}, {"ep": 1}, {"dp": 1}])
def test_degrees_inside_the_claims(degrees):
    assert engine().install(ENGINE, ENGINE_REGIONS, {**DEGREES, **degrees})


def test_vacuous_installs_are_refused():
    assert refusal(lambda: engine().install((), ENGINE_REGIONS, DEGREES)).rules == ("regions",)
    assert refusal(lambda: engine().install(ENGINE, (), DEGREES)).rules == ("regions",) * 2
    partly = {"engine_decode": ENGINE_REGIONS}
    assert refusal(lambda: engine().install(ENGINE, partly, DEGREES)).rules == ("regions",)
    stray = {"engine_decode": ENGINE_REGIONS, "engine_decod": ENGINE_REGIONS}
    assert refusal(lambda: engine().install(("engine_decode",), stray, DEGREES)).rules == ("regions",)
    with pytest.raises(TypeError, match="string"):
        engine().install("engine_decode", ENGINE_REGIONS, DEGREES)
    with pytest.raises(TypeError, match="string"):
        engine().install(ENGINE, "norms.rms", DEGREES)


def test_iterators_are_read_once():
    assert len(engine().install(iter(ENGINE), iter(ENGINE_REGIONS), DEGREES).regions) == 8  # type: ignore[arg-type]
    error = refusal(lambda: engine().install(iter(ENGINE), iter(["gdn.core"]), DEGREES))  # type: ignore[arg-type]
    assert set(error.rules) == {"coverage"}


def test_a_refused_install_installs_nothing_and_is_recorded():
    adapter = engine()
    refusal(lambda: adapter.install(ENGINE, ENGINE_REGIONS, {**DEGREES, "tp": 16}))
    assert [record.event for record in adapter.ledger.records] == ["refusal"]
    assert refusal(lambda: adapter.launched("norms.rms", "engine_decode", sha("m"))).rules == ("installed",)
    assert refusal(lambda: adapter.handshake(adapter.identities)).rules == ("installed",)


def test_launches_are_counted():
    adapter = installed()
    for _ in range(2):
        adapter.launched("norms.rms", "engine_decode", sha("module"))
    assert adapter.ledger.launches == {("norms.rms", "engine_decode", sha("module")): 2}
    error = refusal(lambda: adapter.launched("norms.rms", "trainer_fwd", sha("module")))
    assert error.rules == ("installed",)


def test_native_entries_install_without_artifact():
    doc = native_sample()
    assert engine(doc).install(ENGINE, ENGINE_REGIONS, DEGREES)


def test_handshake():
    trainer = c.Adapter("megatron", DOC, registry_view=views(DOC))
    trainer.install(("trainer_fwd", "trainer_score"), TRAINER_REGIONS, DEGREES)
    adapter = installed()
    assert adapter.handshake(trainer.identities, other_runtime="megatron") == DOC.identities
    assert adapter.handshake(trainer.identities.plain()) == DOC.identities  # as it comes over the wire
    assert [record.event for record in adapter.ledger.records] == ["install", "handshake", "handshake"]


def test_handshake_lets_deployment_differ():
    tuned = sample(deployment={"tiles": 1}).identities
    assert tuned and installed().handshake(tuned) == tuned


@pytest.mark.parametrize("name", ["semantic", "numerical_policy"])
def test_handshake_refuses_another_identity(name):
    other = c.recompute(DOC).evolve(**{name: "0" * 64})
    error = refusal(lambda: installed().handshake(other))
    assert error.rules == ("handshake",) and error.findings[0].entry == f"identity {name}"


@pytest.mark.parametrize("other", [{}, {"semantic": "x"}, [], None, 3])
def test_handshake_refuses_what_is_no_identity(other):
    assert refusal(lambda: installed().handshake(other)).rules == ("handshake",)


def test_handshake_with_itself_is_refused():
    adapter = installed()
    assert refusal(lambda: adapter.handshake(adapter.identities, other_runtime="vllm")).rules == ("two-runtimes",)


def test_every_case_installs_from_its_own_views():
    adapter = c.Adapter("jax", DOC, registry_view=views(DOC))
    used = {case: [region for region, held, _ in DOC.owners() if held == case] for case in ALL_CASES}
    assert adapter.install(ALL_CASES, used, DEGREES).unused == ()
