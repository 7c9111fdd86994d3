"""Checkpoints from Hugging Face to torch_dist and back, on tiny models of every family."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert.command import main
from slime_core.errors import CheckpointError, ConfigError, SlimeError
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.engines.server import free_ports
from tests.engines import families
from tests.engines.learners import Learners, Make

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))


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
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


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
def test_every_family_comes_back_bit_for_bit_without_arguments(megatron, tmp_path, name, capsys) -> None:
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


def test_weights_that_the_model_has_no_place_for_are_left_out_and_reported(megatron, tmp_path, capsys) -> None:
    source = families.write("glm4_moe", tmp_path / "hf", num_nextn_predict_layers=1)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(weights_of(source) | extra, source / "model.safetensors", metadata={"format": "pt"})
    stored = to_torch_dist(source, tmp_path / "torch_dist")
    assert re.search(r"1 weights.* model\.layers\.3\.eh_proj\.weight", capsys.readouterr().out)
    assert convert("verify", source, stored) == 1
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.endswith(": model.layers.3.eh_proj.weight float32[2, 2]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(megatron, tmp_path, dtype) -> None:
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
def test_a_model_loads_the_folder_as_it_loads_the_hugging_face_folder(megatron, source, converted) -> None:
    from slime_core.checkpoint import sharded

    _, expected = families.build("qwen3", source, ParallelLayout())
    _, found = families.build("qwen3", source, ParallelLayout())
    for parameter in found[0].parameters():
        torch.nn.init.zeros_(parameter)
    sharded.load_weights(converted, chunks=found)
    assert same(dict(expected[0].named_parameters()), dict(found[0].named_parameters()))


def test_files_have_a_size_and_an_index(converted, source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("slime_core.weights.hugging_face.SHARD_BYTES", 40_000)
    back = to_hugging_face(converted, tmp_path / "back")
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in back.glob("*.safetensors")}
    assert len(list(back.glob("*.safetensors"))) > 2
    assert same(weights_of(source), weights_of(back))
    assert convert("verify", source, back) == 0


def of_two_processes(learners: Learners, *words: str | Path) -> str:
    """What ``slime convert`` prints in two processes, with the environment that torchrun gives them."""
    (port,) = free_ports(1)

    def run(make: Make) -> str:
        place = {"RANK": make.rank, "LOCAL_RANK": make.rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        with redirect_stdout(StringIO()) as printed:
            assert convert(*words) == 0
        return printed.getvalue()

    return "".join(learners(run, ranks=2))


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_moe, not normed, tied", "expert-model"), ("qwen3", "tensor-model")]
)
def test_two_processes_convert_both_ways_in_different_layouts(learners, megatron, tmp_path, family, layout) -> None:
    source = families.write(family, tmp_path / "hf", num_hidden_layers=4)
    stored, flag = tmp_path / "torch_dist", f"--{layout}-parallel-size"
    of_two_processes(learners, "hf-to-torch-dist", "--hf-checkpoint", source, "--save", stored, flag, "2")
    assert convert("verify", source, stored) == 0
    back, by_one = tmp_path / "back", to_hugging_face(stored, tmp_path / "by one")
    printed = of_two_processes(learners, "torch-dist-to-hf", "--input-dir", stored, "--output-dir", back)
    assert printed.count("written") == 1
    for target in (back, by_one):
        assert same(weights_of(source), weights_of(target))


# --- verify -----------------------------------------------------------------------------------------------------------


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = weights_of(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def one_bit(weights: dict[str, torch.Tensor]) -> None:
    weights[NORM].view(torch.int32)[7] ^= 1


def swap(weights: dict[str, torch.Tensor]) -> None:
    weights[GATE], weights[UP] = weights[UP], weights[GATE]


def drop(weights: dict[str, torch.Tensor]) -> None:
    del weights[NORM]


def add(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.9.extra"] = torch.zeros(2)


def reshape(weights: dict[str, torch.Tensor]) -> None:
    weights[GATE] = weights[GATE][:-1].contiguous()


def retype(weights: dict[str, torch.Tensor]) -> None:
    weights[GATE] = weights[GATE].to(torch.int32)


FITS_NOT = {
    drop: f"missing: {NORM} float32[64]",
    add: "extra: model.layers.9.extra float32[2]",
    reshape: f"wrong shape: {GATE} has [95, 64], expected [96, 64]",
    retype: f"wrong dtype: {GATE} has int32, expected float32",
}
DIFFERS = {
    one_bit: (f"other values: {NORM} differs in 1 of 64 entries, by at most",),
    swap: (f"other values: {GATE}", f"other values: {UP}"),
    **{change: (said,) for change, said in FITS_NOT.items()},
}


@pytest.mark.parametrize("change", DIFFERS)
def test_verify_names_what_differs(converted, source, tmp_path, capsys, change) -> None:
    tampered = shutil.copytree(source, tmp_path / "tampered")
    change_weights(tampered, change)
    for other in (source, converted):
        assert convert("verify", other, tampered) == 1
        _, *lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(DIFFERS[change])
        assert all(any(text in line for line in lines) for text in DIFFERS[change])


# --- What is refused --------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, error: type[SlimeError], *words: str | Path) -> str:
    """The message; neither a target nor a draft is left."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error) as caught:
        convert(*words)
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


def edit_config(**fields: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (file,) = folder.rglob("config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


def cut(folder: Path) -> None:
    file = max((*folder.glob("*.safetensors"), *folder.glob("*.distcp")), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({NORM: torch.ones(64)}, folder / "pytorch_model.bin")


def outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: "../model.safetensors"}}))


def without(pattern: str) -> Callable[[Path], None]:
    """Without the largest file or the folder."""

    def remove(folder: Path) -> None:
        path = max(folder.glob(pattern), key=lambda path: path.stat().st_size)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def names_outside(folder: Path) -> None:
    described = pickle.loads((folder / ".metadata").read_bytes())
    for place in described.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(described))


BROKEN: dict[str, tuple[bool, Callable[[Path], None], str]] = {
    **{change.__name__: (True, partial(change_weights, change=change), said) for change, said in FITS_NOT.items()},
    "cut weights": (True, cut, "model.safetensors"),
    "pickled weights": (True, pickled, "safetensors"),
    "an index that names a file outside": (True, outside, "../model.safetensors"),
    "quantised": (True, edit_config(quantization_config={"quant_method": "fp8"}), "quantization_config: fp8"),
    "another family": (True, edit_config(architectures=["Qwen9ForCausalLM"]), "Qwen9ForCausalLM"),
    "no config": (True, without("config.json"), "config.json"),
    "cut data": (False, cut, "cannot be loaded"),
    "no data": (False, without("*.distcp"), "__0_0.distcp"),
    "metadata that names a file outside": (False, names_outside, "'../"),
    "no metadata": (False, without(".metadata"), "torch_dist"),
    "no folder of Hugging Face": (False, without("huggingface"), "--origin-hf-dir"),
    "a config of another size": (False, edit_config(intermediate_size=112), "decoder.layers.mlp.linear_fc1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_broken_is_named(converted, source, tmp_path, case) -> None:
    is_hugging_face, harm, named = BROKEN[case]
    broken = shutil.copytree(source if is_hugging_face else converted, tmp_path / "broken")
    harm(broken)
    back = ("torch-dist-to-hf", "--input-dir", broken, "--output-dir", tmp_path / "target")
    words = ("hf-to-torch-dist", "--hf-checkpoint", broken, "--save", tmp_path / "target") if is_hugging_face else back
    assert named in refused(tmp_path, SlimeError, *words)


def test_a_foreign_folder_converts_with_its_origin(converted, source, tmp_path) -> None:
    foreign = tmp_path / "iterations" / "iter_0000007"
    shutil.copytree(converted, foreign)
    shutil.rmtree(foreign / "huggingface")
    (foreign.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    back = to_hugging_face(foreign.parent, tmp_path / "back", "--origin-hf-dir", source)
    assert same(weights_of(source), weights_of(back))


def test_a_padded_vocabulary_is_cut_to_the_configs_or_to_the_given_size(converted, source, tmp_path) -> None:
    padded = families.write("qwen3", tmp_path / "padded", vocab_size=128)
    stored = to_torch_dist(padded, tmp_path / "torch_dist")
    expected = weights_of(padded)
    for more, rows in ((("--vocab-size", "16"), 16), (("--origin-hf-dir", source), 16), ((), 128)):
        back = to_hugging_face(stored, tmp_path / f"back{len(more)}{more[:1]}", *more)
        found = weights_of(back)
        for name in (EMBEDDING, "lm_head.weight"):
            assert torch.equal(found[name], expected[name][:rows])
        assert json.loads((back / "config.json").read_text())["vocab_size"] == rows


def test_an_existing_target_is_replaced_only_with_overwrite(converted, source, tmp_path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    words = ("torch-dist-to-hf", "--input-dir", converted, "--output-dir", target)
    assert "--overwrite" in refused(tmp_path, ConfigError, *words)
    refused(tmp_path, ConfigError, *words, "--overwrite")  # no checkpoint
    shutil.copy(source / "config.json", target)
    assert "--overwrite" in refused(tmp_path, ConfigError, *words)
    to_hugging_face(converted, target, "--overwrite")
    assert same(weights_of(source), weights_of(target))
    assert not (target / "notes.txt").exists()


@pytest.mark.parametrize("target", ["hf", "."])
def test_the_source_is_never_the_target(megatron, source, tmp_path, target) -> None:
    copy = shutil.copytree(source, tmp_path / "parent" / "hf")
    words = ("--hf-checkpoint", copy, "--save", copy.parent / target, "--overwrite")
    refused(tmp_path, ConfigError, "hf-to-torch-dist", *words)


def test_a_disk_that_takes_no_more_is_one_error(megatron, converted, source, tmp_path) -> None:
    from tests.unit.weights.test_disk import files_of_at_most

    for words in (
        ("hf-to-torch-dist", "--hf-checkpoint", source, "--save", tmp_path / "target"),
        ("torch-dist-to-hf", "--input-dir", converted, "--output-dir", tmp_path / "target"),
    ):
        with files_of_at_most(10_000):
            assert "cannot be written" in refused(tmp_path, CheckpointError, *words)
