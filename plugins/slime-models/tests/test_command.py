"""``slime models`` and ``--model``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core import RunPlan
from slime_core.cli.main import main as slime
from slime_core.errors import ConfigError
from slime_core.modeling.memory import GIB, Training, layouts
from slime_models.command import main, size_of
from slime_models.families import presets
from slime_models.options import ModelOptions
from slime_models.plugin import slime_check
from slime_models.shape import config_of


def folder_of(path: Path, name: str, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config_of(presets()[name].shape), **changes}))
    return path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_list_shows_every_preset_and_the_table_of_the_docs(capsys) -> None:
    lines = printed(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(presets())
    page = Path(__file__).parents[3] / "docs/tables/presets.md"
    assert printed(capsys, "list", "--sources") in page.read_text(encoding="utf-8")


def test_the_command_loads_nothing_heavy() -> None:
    code = "import sys; from slime_models.command import main; main(['list']); main(['show', 'kimi-k2'])\n"
    code += "assert not {'torch', 'transformers', 'megatron', 'mbridge', 'ray', 'sglang', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("QWEN3-4b --format args", "--num-layers 36\n"),
        ("deepseek-v3 --format toml", '\nmoe_layer_freq = "[0]*3+[1]*58"\n'),
        ("deepseek-r1", "671,026,404,352"),
        ("qwen3-30B-A3B --gpus 8 --gpu-memory-gib 80", "--sequence-parallel --expert-model-parallel-size 4"),
    ],
)
def test_show_prints_arguments_sizes_and_layouts(capsys, line: str, shown: str) -> None:
    assert shown in printed(capsys, "show", *line.split())


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("deepseek-r1", {}, "presets: deepseek-v3, deepseek-v3.1, deepseek-r1"),
        ("qwen3-4B", {"rope_theta": 5e6, "intermediate_size": 6912}, "intermediate_size = 9728"),
    ],
)
def test_match_names_the_presets_of_that_shape_or_how_the_nearest_differs(
    tmp_path, capsys, name: str, changes: dict[str, object], line: str
) -> None:
    assert line in printed(capsys, "match", str(folder_of(tmp_path, name, **changes)))


@pytest.mark.parametrize("name", ["qwen2.5-0.5B", "llama3.2-1B", "qwen3-30B-A3B", "glm4-9B", "glm4.5-106B-A12B"])
def test_a_run_of_that_checkpoint_accepts_the_arguments_and_one_of_another_does_not(tmp_path, capsys, name) -> None:
    words = printed(capsys, "show", name, "--format", "args").split()
    check = ["check", "--plugin", "grpo", "--hf-checkpoint", str(folder_of(tmp_path, name)), *words]
    assert slime(check) == 2
    assert "no *.safetensors file" in capsys.readouterr().err  # looked up once all settings are valid
    folder_of(tmp_path, name, intermediate_size=6912)
    assert slime(check) == 2
    assert "6912" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show qwen3-5B", "qwen3-5B"),
        ("show qwen3-235B-A22B --gpus 8", "--gpu-memory-gib"),
        ("show qwen3-235B-A22B --gpus 12 --gpu-memory-gib 80", "multiple of 8"),
        ("show qwen3-235B-A22B --gpus 8 --gpu-memory-gib 8", "8 GiB"),
    ],
)
def test_an_unknown_preset_and_layouts_that_cannot_be_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(line.split())


QWEN3 = config_of(presets()["qwen3-4B"].shape)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json cannot be read"),
        ("[]", "JSON object"),
        ('{"architectures": 3}', "architecture None"),
        (json.dumps({**QWEN3, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}), "is Qwen3"),
        (json.dumps({**QWEN3, "hidden_size": "2560"}), "hidden_size = '2560'"),
    ],
)
def test_a_folder_without_a_usable_config_is_refused(tmp_path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        main(["match", str(tmp_path)])


# --- Layouts ----------------------------------------------------------------------------------------------------------


def test_layouts_that_fit_come_best_first() -> None:
    usages = layouts(size_of(presets()["qwen3-4B"].shape), 8, 70, Training(tokens=8192))
    cut = usages[0].cut
    assert (cut.layout.tensor, cut.layout.pipeline, cut.data, cut.recompute) == (1, 1, 8, "mlp")
    assert all(usage.total <= 0.9 * 70 * GIB for usage in usages)


def test_the_bytes_of_one_layout_by_hand() -> None:
    # Qwen3-4B on one rank: 2, 4 and 12 bytes a parameter.
    usage, *_ = layouts(size_of(presets()["qwen3-4B"].shape), 1, 200, Training(tokens=1024))
    sizes = {"weights": 2 * 4_022_468_096, "gradients": 4 * 4_022_468_096, "optimizer": 12 * 4_022_468_096}
    assert usage.parts.items() >= {**sizes, "logits": 1024 * 151936 * (2 + 4)}.items()


# --- --model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ("Qwen3-4B", {}, []),
        ("qwen3-4B", {"num_attention_heads": 20, "intermediate_size": 6912}, ["9728", "num_attention_heads = 32"]),
        ("qwen3-4B", None, ["--hf-checkpoint"]),
        ("qwen9", {}, ["--model qwen9"]),
    ],
)
def test_a_checkpoint_that_is_not_the_preset_is_a_mistake(tmp_path, model: str, changes, named: list[str]) -> None:
    folder = None if changes is None else str(folder_of(tmp_path, "qwen3-4B", **changes))
    mistakes = list(slime_check(RunPlan(settings={"hf_checkpoint": folder}), ModelOptions(model=model)))
    assert [name in mistake for name, mistake in zip(named, mistakes, strict=True)] == [True] * len(named)


def test_a_run_compares_its_checkpoint_with_the_preset(tmp_path, capsys) -> None:
    folder = folder_of(tmp_path, "qwen3-4B", num_attention_heads=20)
    assert slime(["check", "--plugin", "grpo", "--model", "qwen3-4B", "--hf-checkpoint", str(folder)]) == 2
    assert "--model qwen3-4B: num_attention_heads = 32" in capsys.readouterr().err
