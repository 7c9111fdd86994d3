"""Every recipe passes ``slime check`` for GPUs of 80 GB, with the config and the weights' sizes of its model."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_core.cli.main import main
from slime_core.config.schema import ARITHMETIC
from slime_models.families import presets
from slime_models.shape import config_of

RECIPES = Path(__file__).parents[2] / "examples/recipes"
LINES = [
    *((path.name, "") for path in sorted(RECIPES.glob("*.toml"))),
    ("gspo_30b_a3b.toml", "--colocate --optimizer-cpu-offload --use-precision-aware-optimizer"),
]
OF_THIS_MACHINE = ("  - device ", "  - host memory ")
"""Mistakes of a machine without GPUs, and with less memory than a node of eight."""


def weight_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and shape of each weight of a Qwen checkpoint."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim", hidden // heads)
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        yield f"{attention}.q_proj.weight", [heads * head, hidden]
        yield f"{attention}.o_proj.weight", [hidden, heads * head]
        for name in ("k_proj", "v_proj"):
            yield f"{attention}.{name}.weight", [config["num_key_value_heads"] * head, hidden]
        mlps = [f"model.layers.{layer}.mlp"]
        width = config["intermediate_size"]
        if "num_experts" in config:
            width = config["moe_intermediate_size"]
            yield f"{mlps[0]}.gate.weight", [config["num_experts"], hidden]
            mlps = [f"{mlps[0]}.experts.{expert}" for expert in range(config["num_experts"])]
        for mlp in mlps:
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{mlp}.{name}.weight", [width, hidden]


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config, the tokenizer of the demo, and weights that are holes in a file."""
    tokenizer = [file for file in (ARITHMETIC / "model").iterdir() if file.suffix != ".safetensors"]
    folder.mkdir(parents=True)
    for file in tokenizer:
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in weight_shapes(config):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_prompts(path: Path, settings: Mapping[str, Any]) -> None:
    """Write rows with the fields that the recipe names."""
    label: Any = {"ground_truth": {"target": ["3"]}} if settings.get("label_key") == "reward_model" else "1+2\n#### 3"
    row = {settings.get("input_key", "prompt"): [{"role": "user", "content": "1+2"}]}
    rows = [row | {settings.get("label_key", "label"): label}] * 600
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("name", "flags"), LINES)
def test_a_recipe_fits_its_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, flags: str) -> None:
    recipe = tomllib.loads((RECIPES / name).read_text())
    shutil.copy(RECIPES / name, tmp_path)
    model = presets()[recipe["models"]["model"]]
    write_checkpoint(tmp_path / recipe["model"]["hf_checkpoint"], config_of(model.shape))
    for path in [
        recipe["data"]["prompt_data"],
        *(path for _, path in recipe.get("eval", {}).get("eval_prompt_data", [])),
    ]:
        write_prompts(tmp_path / path, recipe["data"])
    line = f"check --config {tmp_path / name} --device cuda --gpu-memory-gib 80 {flags}"
    main(line.split())
    printed = capsys.readouterr()
    mistakes = [line for line in printed.err.splitlines() if line.startswith("  - ")]
    assert [line for line in mistakes if not line.startswith(OF_THIS_MACHINE)] == []
    (learner,) = (line for line in printed.out.splitlines() if "memory of a learner GPU" in line)
    if not flags:
        planned = learner.partition(" = ")[2].partition(",")[0]
        assert f"[{name}]" in (RECIPES / "README.md").read_text()
        assert f"| {planned} |" in (RECIPES / "README.md").read_text()
