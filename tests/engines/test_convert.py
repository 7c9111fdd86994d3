"""Checkpoints from Hugging Face to torch_dist and back, on tiny models of every family."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert.command import main
from slime_core.errors import CheckpointError, ConfigError, SlimeError
from slime_core.modeling.layout import ParallelLayout
from tests.engines import families

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def convert(*words: str | Path) -> int:
    return main([str(word) for word in words])


def to_torch_dist(source: Path, target: Path, *more: str) -> Path:
    assert convert("hf-to-torch-dist", "--hf-checkpoint", source, "--save", target, *more) == 0
    return target


def to_hugging_face(source: Path, target: Path, *more: str | Path) -> Path:
    assert convert("torch-dist-to-hf", "--input-dir", source, "--output-dir", target, *more) == 0
    return target


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as safetensors reads them."""
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in Hugging Face's format."""
    return families.write("qwen3", tmp_path_factory.mktemp("convert") / "hf")


@pytest.fixture(scope="module")
def converted(megatron: ParallelLayout, source: Path) -> Path:
    """The same as torch_dist."""
    return to_torch_dist(source, source.with_name("torch_dist"))


@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")  # in Megatron, without q_lora_rank
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_comes_back_bit_for_bit_without_arguments(megatron, tmp_path, name, capsys):
    source = families.write(name, tmp_path / "hf")
    stored = to_torch_dist(source, tmp_path / "torch_dist")
    back = to_hugging_face(stored, tmp_path / "back")
    assert same(weights_of(source), weights_of(back))
    for file in source.glob("*.json*"):
        assert file.read_bytes() == (back / file.name).read_bytes()
    assert (back / "tokenizer.json").is_file()
    capsys.readouterr()
    assert convert("verify", source, stored) == 0
    assert convert("verify", stored, back) == 0
    assert capsys.readouterr().out.count("to the bit") == 2


def test_weights_that_the_model_has_no_place_for_are_left_out_and_reported(megatron, tmp_path, capsys):
    source = families.write("glm4_moe", tmp_path / "hf", num_nextn_predict_layers=1)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(weights_of(source) | extra, source / "model.safetensors", metadata={"format": "pt"})
    stored = to_torch_dist(source, tmp_path / "torch_dist")
    assert re.search(r"1 weights.* model\.layers\.3\.eh_proj\.weight", capsys.readouterr().out)
    assert convert("verify", source, stored) == 1
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.endswith(": model.layers.3.eh_proj.weight float32[2, 2]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(megatron, tmp_path, dtype):
    source = families.write("qwen3_moe", tmp_path / "hf")
    save_file(
        {name: one.to(dtype) for name, one in weights_of(source).items()},
        source / "model.safetensors",
        metadata={"format": "pt"},
    )
    back = to_hugging_face(to_torch_dist(source, tmp_path / "torch_dist"), tmp_path / "back")
    assert same(weights_of(source), weights_of(back))
    assert {one.dtype for one in weights_of(back).values()} == {dtype}


@pytest.mark.filterwarnings("ignore:(`load_state_dict` is deprecated|Please use DTensor):FutureWarning")  # in Megatron
def test_a_model_loads_the_folder_as_it_loads_the_hugging_face_folder(megatron, source, converted):
    from slime_core.checkpoint import sharded

    _, expected = families.build("qwen3", source, ParallelLayout())
    _, found = families.build("qwen3", source, ParallelLayout())
    for parameter in found[0].parameters():
        torch.nn.init.zeros_(parameter)
    sharded.load_weights(converted, chunks=found)
    assert same(dict(expected[0].named_parameters()), dict(found[0].named_parameters()))


def test_transformers_loads_what_came_back(source, converted, tmp_path):
    back = to_hugging_face(converted, tmp_path / "back")
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        a, b = (families.of_hugging_face(folder)(tokens).logits for folder in (source, back))
    assert torch.equal(a, b)


def test_files_have_a_size_and_an_index(converted, source, tmp_path, monkeypatch):
    monkeypatch.setattr("slime_core.weights.hugging_face.SHARD_BYTES", 40_000)
    back = to_hugging_face(converted, tmp_path / "back")
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in back.glob("*.safetensors")}
    assert len(list(back.glob("*.safetensors"))) > 2
    assert same(weights_of(source), weights_of(back))
    assert convert("verify", source, back) == 0


def of_two_processes(*words: str | Path) -> str:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "slime_core", "convert")
    done = subprocess.run(
        [sys.executable, *torchrun, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_two_processes_convert_both_ways_in_different_layouts(megatron, tmp_path):
    source = families.write("qwen3_moe, not normed, tied", tmp_path / "hf", num_hidden_layers=4)
    stored, back = tmp_path / "torch_dist", tmp_path / "back"
    layout = ("--expert-model-parallel-size", "2")
    of_two_processes("hf-to-torch-dist", "--hf-checkpoint", source, "--save", stored, *layout)
    assert convert("verify", source, stored) == 0
    printed = of_two_processes("torch-dist-to-hf", "--input-dir", stored, "--output-dir", back)  # two pipeline stages
    assert printed.count("written") == 1
    assert same(weights_of(source), weights_of(back))


@pytest.mark.long
def test_one_process_converts_back_what_two_saved_with_tensor_parallelism(source, tmp_path):
    stored = tmp_path / "torch_dist"
    layout = ("--tensor-model-parallel-size", "2")
    of_two_processes("hf-to-torch-dist", "--hf-checkpoint", source, "--save", stored, *layout)
    assert same(weights_of(source), weights_of(to_hugging_face(stored, tmp_path / "back")))


# --- verify -----------------------------------------------------------------------------------------------------------


def changed(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    weights = weights_of(target)
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def one_bit(weights: dict[str, torch.Tensor]) -> None:
    weights[NORM].view(torch.int32)[7] ^= 1


def swap(weights: dict[str, torch.Tensor]) -> None:
    other = GATE.replace("gate", "up")
    weights[GATE], weights[other] = weights[other], weights[GATE]


def drop(weights: dict[str, torch.Tensor]) -> None:
    del weights[NORM]


def add(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.9.extra"] = torch.zeros(2)


def reshape(weights: dict[str, torch.Tensor]) -> None:
    weights[GATE] = weights[GATE][:-1].contiguous()


def retype(weights: dict[str, torch.Tensor]) -> None:
    weights[GATE] = weights[GATE].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_bit, [f"other values: {NORM} differs in 1 of 64 entries, by at most"]),
        (swap, [f"other values: {GATE}", f"other values: {GATE.replace('gate', 'up')}"]),
        (drop, [f"missing: {NORM} float32[64]"]),
        (add, ["extra: model.layers.9.extra float32[2]"]),
        (reshape, [f"wrong shape: {GATE} has [95, 64], expected [96, 64]"]),
        (retype, [f"wrong dtype: {GATE} has int32, expected float32"]),
    ],
)
def test_verify_names_what_differs(converted, source, tmp_path, capsys, change, said):
    tampered = changed(source, tmp_path / "tampered", change)
    for other in (source, converted):
        assert convert("verify", other, tampered) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("differ:")
        assert len(lines) == 1 + len(said)
        assert all(any(text in line for line in lines) for text in said)


# --- What is refused --------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, error: type[SlimeError], *words: str | Path) -> str:
    """What is said; neither a target nor a draft is left."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error) as caught:
        convert(*words)
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop, f"missing: {NORM} float32[64]"),
        (add, "extra: model.layers.9.extra float32[2]"),
        (reshape, f"wrong shape: {GATE} has [95, 64], expected [96, 64]"),
        (retype, f"wrong dtype: {GATE} has int32, expected float32"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(megatron, source, tmp_path, change, said):
    wrong = changed(source, tmp_path / "wrong", change)
    words = ("hf-to-torch-dist", "--hf-checkpoint", wrong, "--save", tmp_path / "target")
    assert said in refused(tmp_path, CheckpointError, *words)


def test_a_torch_dist_folder_that_does_not_fit_its_config_is_refused(converted, tmp_path):
    wrong = tmp_path / "wrong"
    shutil.copytree(converted, wrong)
    config = wrong / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 112}))
    words = ("torch-dist-to-hf", "--input-dir", wrong, "--output-dir", tmp_path / "target")
    assert "wrong shape: decoder.layers.mlp.linear_fc1" in refused(tmp_path, CheckpointError, *words)


def cut(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({NORM: torch.ones(64)}, folder / "pytorch_model.bin")


def outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: "../model.safetensors"}}))


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


def other_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen9ForCausalLM"]}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "model.safetensors is incomplete"),
        (pickled, "safetensors"),
        (outside, "../model.safetensors"),
        (quantised, "quantised weights (quantization_config: fp8)"),
        (other_family, "Qwen9ForCausalLM"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_a_hugging_face_folder_that_is_broken_is_named(megatron, source, tmp_path, harm, said):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    harm(broken)
    assert said in refused(
        tmp_path, SlimeError, "hf-to-torch-dist", "--hf-checkpoint", broken, "--save", tmp_path / "target"
    )


def cut_data(folder: Path) -> None:
    file = max(folder.glob("*.distcp"), key=lambda one: one.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_data(folder: Path) -> None:
    max(folder.glob("*.distcp"), key=lambda one: one.stat().st_size).unlink()


def names_outside(folder: Path) -> None:
    described = pickle.loads((folder / ".metadata").read_bytes())
    for place in described.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(described))


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of the checkpoint was run",)


def runs_code(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Harm()))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut_data, "cannot be loaded"),
        (without_data, "accepted: the name of a file in the same folder, and that file"),
        (names_outside, "says that weights are in '../"),
        (runs_code, "No code of it was run"),
        (lambda folder: (folder / ".metadata").unlink(), "is not a torch_dist checkpoint"),
        (lambda folder: shutil.rmtree(folder / "huggingface"), "--origin-hf-dir"),
    ],
)
def test_a_torch_dist_folder_that_is_broken_is_named(converted, tmp_path, harm, said, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    harm(broken)
    assert said in refused(
        tmp_path, SlimeError, "torch-dist-to-hf", "--input-dir", broken, "--output-dir", tmp_path / "target"
    )
    assert "code of the checkpoint" not in capsys.readouterr().out


def test_a_foreign_folder_converts_with_its_origin(converted, source, tmp_path):
    foreign = tmp_path / "iterations" / "iter_0000007"
    shutil.copytree(converted, foreign)
    shutil.rmtree(foreign / "huggingface")
    (foreign.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    back = to_hugging_face(foreign.parent, tmp_path / "back", "--origin-hf-dir", source)
    assert same(weights_of(source), weights_of(back))


def test_a_padded_vocabulary_is_cut_to_the_configs_or_to_the_given_size(converted, source, tmp_path):
    padded = families.write("qwen3", tmp_path / "padded", vocab_size=128)
    stored = to_torch_dist(padded, tmp_path / "torch_dist")
    expected = weights_of(padded)
    for more, rows in ((("--vocab-size", "16"), 16), (("--origin-hf-dir", source), 16), ((), 128)):
        back = to_hugging_face(stored, tmp_path / f"back{len(more)}{more[:1]}", *more)
        found = weights_of(back)
        for name in (EMBEDDING, "lm_head.weight"):
            assert torch.equal(found[name], expected[name][:rows])
        assert json.loads((back / "config.json").read_text())["vocab_size"] == rows


def test_an_existing_target_is_replaced_only_with_overwrite(converted, source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    words = ("torch-dist-to-hf", "--input-dir", converted, "--output-dir", target)
    assert "replace it with --overwrite" in refused(tmp_path, ConfigError, *words)
    assert "is not a checkpoint" in refused(tmp_path, ConfigError, *words, "--overwrite")
    shutil.copy(source / "config.json", target)
    assert "replace it with --overwrite" in refused(tmp_path, ConfigError, *words)
    to_hugging_face(converted, target, "--overwrite")
    assert same(weights_of(source), weights_of(target))
    assert not (target / "notes.txt").exists()


@pytest.mark.parametrize("target", ["hf", "."])
def test_the_source_is_never_the_target(megatron, source, tmp_path, target):
    shutil.copytree(source, tmp_path / "parent" / "hf")
    words = ("--hf-checkpoint", tmp_path / "parent" / "hf", "--save", tmp_path / "parent" / target, "--overwrite")
    assert "choose another target" in refused(tmp_path, ConfigError, "hf-to-torch-dist", *words)


def test_a_disk_that_takes_no_more_is_one_error(megatron, converted, source, tmp_path):
    from tests.unit.weights.test_disk import files_of_at_most

    for words in (
        ("hf-to-torch-dist", "--hf-checkpoint", source, "--save", tmp_path / "target"),
        ("torch-dist-to-hf", "--input-dir", converted, "--output-dir", tmp_path / "target"),
    ):
        with files_of_at_most(10_000):
            assert "cannot be written" in refused(tmp_path, CheckpointError, *words)
