"""Bad input never produces a number: one sentence on stderr, exit code 2, nothing half-written."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from isojax import cli, doctor, profile
from tests.integration import models


@pytest.fixture
def isojax(monkeypatch, capsys):
    """Run the command line in this process -> (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["isojax", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save("qwen2", tmp_path_factory.mktemp("qwen2"))


def copy(checkpoint, folder):
    return shutil.copytree(checkpoint, folder / "copy")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refused(result, *words):
    code, out, err = result
    assert code == 2, (out, err)
    assert err.strip().startswith("isojax: ") and "Traceback" not in err
    assert all(w in err for w in words), err


class TestCheckpoint:
    def test_missing_folder(self, isojax, tmp_path):
        refused(isojax("score", "x", "--model", tmp_path / "nowhere"), "nowhere", "config.json")

    def test_missing_gguf(self, isojax, tmp_path):
        refused(isojax("score", "x", "--model", tmp_path / "model.gguf"), "does not exist")

    def test_truncated_gguf(self, isojax, tmp_path):
        (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(10))
        refused(isojax("score", "x", "--model", tmp_path / "model.gguf"), "model.gguf")

    def test_truncated(self, isojax, checkpoint, tmp_path):
        file = copy(checkpoint, tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        refused(isojax("score", "x", "--model", file.parent), "truncated")

    def test_wrong_shape(self, isojax, checkpoint, tmp_path):
        folder = edit(copy(checkpoint, tmp_path), intermediate_size=640)
        refused(isojax("score", "x", "--model", folder), "shape", "640")

    def test_missing_tensor(self, isojax, checkpoint, tmp_path):
        from safetensors.torch import load_file, save_file

        folder = copy(checkpoint, tmp_path)
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        refused(isojax("score", "x", "--model", folder), "model.norm.weight")

    def test_missing_shard(self, isojax, checkpoint, tmp_path):
        folder = copy(checkpoint, tmp_path)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
        refused(isojax("score", "x", "--model", folder), "part-2.safetensors")

    def test_malformed_index(self, isojax, checkpoint, tmp_path):
        folder = copy(checkpoint, tmp_path)
        (folder / "model.safetensors.index.json").write_text("{")
        refused(isojax("score", "x", "--model", folder), "index", "malformed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}),
        ("num_key_value_heads", 3),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
    ],
)
def test_unsupported_config_fields_are_named(isojax, checkpoint, tmp_path, field, value):
    folder = edit(copy(checkpoint, tmp_path), **{field: value})
    refused(isojax("score", "x", "--model", folder), field.split("_parameters")[0])


def test_a_window_that_is_off_is_accepted(checkpoint, tmp_path):
    from isojax.model.config import load_config

    folder = edit(copy(checkpoint, tmp_path), sliding_window=128, use_sliding_window=False)
    assert load_config(folder).family == "qwen2"


def test_unknown_family(isojax, checkpoint, tmp_path):
    refused(isojax("score", "x", "--model", edit(copy(checkpoint, tmp_path), model_type="gpt2")), "model_type", "gpt2")


@pytest.fixture(scope="module")
def reference(checkpoint):
    from isojax.runtime import Reference

    return Reference.load(checkpoint)


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "words"),
        [([], "empty"), ([1, 512], "512"), ([1, -1], "-1"), (list(range(3, 500)) * 3, "at most")],
    )
    def test_refused(self, reference, prompt, words):
        from isojax.errors import InputError

        for call in (reference.score, reference.logprobs, lambda p: reference.generate(p, 4)):
            with pytest.raises(InputError, match=words):
                call([prompt])

    def test_empty_prompt_on_the_command_line(self, isojax, checkpoint):
        refused(isojax("generate", "", "--model", checkpoint), "empty")


class TestContract:
    @pytest.fixture
    def file(self, tmp_path):
        return shutil.copy(profile.path("dense", "cpu"), tmp_path / "contract.json")

    def test_the_shipped_profile_is_this_installation(self):
        assert profile.build("dense", "cpu") == profile.shipped("dense", "cpu")

    @pytest.mark.slow
    def test_the_shipped_sm90_profile_is_this_installation(self):
        assert profile.build("dense", "sm90") == profile.shipped("dense", "sm90")

    def test_malformed(self, isojax, file):
        file.write_text(file.read_text()[:-20])
        refused(isojax("contract", "validate", file))

    def test_edited(self, isojax, file):
        text = file.read_text()
        edited = re.sub(r'("kv_tile":\s*)\d+', r"\g<1>32", text)
        assert edited != text
        file.write_text(edited)
        refused(isojax("contract", "validate", file))

    def test_other_version(self, isojax, file):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 2}))
        refused(isojax("contract", "validate", file), "version")

    def test_missing(self, isojax, tmp_path):
        refused(isojax("contract", "show", tmp_path / "none.json"))

    def test_diff_finds_and_exits_with_1(self, isojax, file, tmp_path):
        import contract

        changed = contract.seal(contract.load(file).evolve(deployment=contract.FrozenMap({"tiles": "other"})))
        contract.save(changed, tmp_path / "other.json")
        code, out, _ = isojax("contract", "diff", file, tmp_path / "other.json")
        assert code == 1 and "deployment" in out
        assert isojax("contract", "diff", file, file)[0] == 0

    def test_an_unwritable_target_leaves_nothing(self, isojax, tmp_path):
        refused(isojax("contract", "build", tmp_path / "no" / "such" / "folder.json"), "folder.json")
        assert list(tmp_path.iterdir()) == []


class TestMachine:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="here the arch exists")
    @pytest.mark.parametrize(
        "command,mend",
        [
            (["gate", "norms.rms", "--arch", "sm90"], "--arch cpu"),
            (["parity", "--arch", "sm90"], "--arch cpu"),
            (["bench", "kernels"], "--dry"),
            (["bench", "trainer"], "--model tiny"),
            (["tune"], "on the GPU that the table is for"),
        ],
    )
    def test_sm90_without_a_gpu(self, isojax, command, mend):
        """Each says what helps there: not every command has an --arch."""
        refused(isojax(*command), "sm90", "Hopper", mend)

    def test_unknown_arch(self, isojax):
        refused(isojax("gate", "norms.rms", "--arch", "sm100"), "sm100")

    def test_unknown_region(self, isojax):
        refused(isojax("gate", "norms.rsm"), "norms.rms")

    @pytest.mark.parametrize(("package", "extra"), [("vllm", "vllm-cpu"), ("megatron-core", "megatron")])
    def test_missing_runtime(self, isojax, monkeypatch, package, extra):
        real = doctor.version
        monkeypatch.setattr(doctor, "version", lambda *n: None if package in n else real(*n))
        refused(isojax("parity"), "not installed", extra)

    def test_wrong_usage(self, isojax):
        refused(isojax("score", "x", "--temperature", "-1"))
        refused(isojax("no-such-command"), "see `isojax --help`")
        refused(isojax("tune", "--match", "("), "no regular expression")
        refused(isojax("tune", "norms.rms"), "nothing to tune")

    @pytest.mark.parametrize("text,where", [("1 / 0", "mine.py:1: ZeroDivisionError"), ("def f(:", "SyntaxError")])
    def test_a_module_that_breaks(self, isojax, monkeypatch, tmp_path, text, where):
        (tmp_path / "mine.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        refused(isojax("gate", "norms.rms", "--load", "mine"), "--load mine", where)

    def test_doctor_says_what_runs(self, isojax):
        code, out, _ = isojax("doctor", "--json")
        assert code == 0 and any(row["what"] == "arch cpu" for row in json.loads(out))

    def test_doctor_names_commands_that_the_installation_lacks(self, monkeypatch):
        real = doctor.importlib.metadata.distribution("isojax")
        fewer = SimpleNamespace(entry_points=[e for e in real.entry_points if e.name != "parity"])
        monkeypatch.setattr(doctor.importlib.metadata, "distribution", lambda name: fewer)
        assert "parity" in doctor.unknown_commands()
