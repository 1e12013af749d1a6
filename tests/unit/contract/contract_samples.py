"""A small valid contract with one of everything, and hypothesis strategies around it."""

from __future__ import annotations

from hypothesis import strategies as st

import contract as c

ALL_CASES = tuple(sorted(c.CASES))
TRAINER_SIDE = ("jax_reference", "trainer_fwd", "trainer_score")
ENGINE = ("engine_decode", "engine_prefill")
TOOLCHAIN = {"jax": "0.11.2", "jaxlib": "0.11.2"}
DEGREES = {"tp": 2, "sp": 1, "pp": 1}


def sha(text: str) -> str:
    return c.digest(text)


def impl(id: str, version: int = 1, arch: str = "cpu") -> c.Implementation:
    return c.Implementation(id=id, version=version, arch=arch)  # pyright: ignore[reportArgumentType]


def entry(region: str, cases: tuple[str, ...] = ALL_CASES, **changes) -> c.CompositionEntry:
    fields = {"region": region, "cases": cases, "impl": impl(region), "artifact": sha(region), **changes}
    return c.CompositionEntry.model_validate(fields)


def unsealed(**changes) -> c.Contract:
    gate, neutral = ({"kind": kind, "ref": f"report of the {kind}"} for kind in ("gate", "neutral"))
    fields = {
        "name": "dense-correctness",
        "model_family": "dense",
        "arch": "cpu",
        "cases": tuple(c.CASES[id] for id in ALL_CASES),
        "composition": (
            entry("head.logprob", TRAINER_SIDE, discharge=gate),
            entry("head.logprob_rows", ENGINE, discharge=gate),
            entry("head.sample", ENGINE, discharge=neutral),
            entry("linear.row", ENGINE, constants={"leaves": 8}, artifact=sha("decode"), discharge=gate),
            entry("linear.row", TRAINER_SIDE, constants={"leaves": 8}),
            entry("norms.rms", constants=c.Constants.of({"eps": 1e-6, "row_tile": 64, "fused": True})),
        ),
        "topology": (
            {"axis": "pp", "kind": "pinned", "degrees": (1,), "plan": "one stage"},
            {"axis": "sp", "kind": "invariant", "degrees": (0, 1), "domain": "any T", "proof": "gate sp"},
            {"axis": "tp", "kind": "invariant", "degrees": (1, 2, 4, 8), "domain": "K % 8 == 0", "proof": "gate tp"},
        ),
        "state": ({"state_id": "kv", "invalidated_by": ("weight_sync",), "replay_safe": True, "ref": "gate kv"},),
        "toolchain": TOOLCHAIN,
        "deployment": {"linear.row": {"tiles": [128, 256], "stages": 4}, "occupancy": 0.5},
        **changes,
    }
    return c.Contract.model_validate(fields)


def sample(**changes) -> c.Contract:
    return c.seal(unsealed(**changes))


def native_sample() -> c.Contract:
    """The performance kind: one region native on each side, bounded by a tolerance claim."""
    tolerated = {"kind": "tolerance", "ref": "report 7"}
    kept = [e for e in unsealed().composition if e.region != "norms.rms"]
    sides = [
        entry("norms.rms", ENGINE, impl=impl("vllm.rms"), artifact=None, route="native", discharge=tolerated),
        entry("norms.rms", TRAINER_SIDE, impl=impl("te.rms"), artifact=None, route="native", discharge=tolerated),
    ]
    claim = {
        "case_pair": ("engine_decode", "trainer_fwd"),
        "bounds": {"max_abs": c.encode_float(5e-6)},
        "attributed_to": ("norms.rms",),
        "measured_in": "report 7",
    }
    return sample(composition=(*kept, *sides), tolerance=(claim,))


def views(contract: c.Contract, **changes) -> dict[str, c.RegionView]:
    """A registry that has what `contract` names; keys `region@case`, since linear.row differs between cases."""
    return {
        f"{region}@{case}": c.RegionView(
            **{
                "implementation": held.impl,
                "constants": held.constants,
                "artifact": held.artifact,
                "toolchain": contract.toolchain,
                **changes,
            }
        )
        for region, case, held in contract.owners()
    }


names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=6)
scalars = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | names.filter(lambda s: ":" not in s)
constants = st.dictionaries(names, scalars | st.floats() | st.lists(scalars | st.floats(), max_size=3), max_size=4)
json_values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
deployments = st.dictionaries(names, json_values, max_size=4)


@st.composite
def contracts(draw) -> c.Contract:
    """Any well-typed contract, valid or not: cases split at will, regions owned twice, any claims."""
    cases = st.lists(st.sampled_from(ALL_CASES), min_size=1, max_size=3).map(tuple)
    entries = st.builds(
        entry,
        st.sampled_from(["norms.rms", "linear.row", "attn.core"]),
        cases,
        impl=st.builds(impl, st.sampled_from(["a", "b"]), st.integers(1, 3), st.sampled_from(["cpu", "sm90"])),
        constants=constants.map(c.Constants.of),
        artifact=st.sampled_from([None, sha("x"), sha("y")]),
        discharge=st.sampled_from([None, {"kind": "gate", "ref": "g"}]),
    )
    text = st.sampled_from([None, "", "words"])
    claims = st.fixed_dictionaries(
        {
            "axis": st.sampled_from(["tp", "sp", "ep"]),
            "kind": st.sampled_from(["pinned", "invariant"]),
            "degrees": st.lists(st.integers(0, 8), max_size=3).map(tuple),
            "domain": text,
            "proof": text,
            "plan": text,
        }
    )
    versions = st.dictionaries(st.sampled_from(["jax", "jaxlib", "x/y"]), st.sampled_from(["1", "2"]))
    return unsealed(
        name=draw(st.sampled_from(["one", "two"])),
        model_family=draw(st.sampled_from(["dense", "moe"])),
        arch=draw(st.sampled_from(["cpu", "sm90"])),
        cases=tuple(c.CASES[id] for id in draw(cases)),
        composition=tuple(draw(st.lists(entries, max_size=3))),
        topology=tuple(draw(st.lists(claims, max_size=2))),
        toolchain=draw(versions),
        deployment=draw(deployments),
    )
