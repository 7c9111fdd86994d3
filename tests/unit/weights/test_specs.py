"""The weights that engines expect; an export that differs is refused before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_core.errors import WeightSyncError
from slime_core.weights.hugging_face import WeightSpec, expected_specs
from slime_core.weights.publisher import require_matching_specs

NORM = WeightSpec("norm", "float32", (4,))
HEAD = WeightSpec("lm_head.weight", "float32", (8, 4))
EXPECTED = {spec.name: spec for spec in (NORM, HEAD)}


def test_expected_weights_are_read_off_the_headers_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    save_file({"norm": torch.zeros(4)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file({"lm_head.weight": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "unlisted.safetensors")
    index = {"weight_map": {"norm": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    half = WeightSpec("lm_head.weight", "bfloat16", (8, 4))
    assert expected_specs(tmp_path) == {"norm": NORM, "lm_head.weight": half}


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"holds no \*\.safetensors file"):
        expected_specs(tmp_path)


def test_a_broken_header_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0oops!")
    with pytest.raises(WeightSyncError, match=r"model\.safetensors"):
        expected_specs(tmp_path)


def test_equal_weights_pass_in_any_order() -> None:
    require_matching_specs([HEAD, NORM], EXPECTED)


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ([NORM], "missing: lm_head.weight"),
        ([NORM, HEAD, WeightSpec("new", "float32", (1,))], "unknown .*: new"),
        ([NORM, WeightSpec("lm_head.weight", "float32", (4, 8))], r"float32\[4, 8\] .*float32\[8, 4\]"),
        ([NORM, WeightSpec("lm_head.weight", "float16", (8, 4))], r"wrong dtype: lm_head.weight"),
        ([NORM, HEAD, NORM], "twice: norm"),
        (  # all at once
            [WeightSpec("norm", "float32", (5,)), WeightSpec("x", "float32", (1,))],
            r"missing: lm_head.weight; unknown .*: x; wrong shape: norm",
        ),
    ],
)
def test_each_mistake_is_named(sent: list[WeightSpec], complaint: str) -> None:
    with pytest.raises(WeightSyncError, match=complaint):
        require_matching_specs(sent, EXPECTED)


def test_the_output_weight_of_a_tied_model_may_be_absent_on_either_side() -> None:
    require_matching_specs([NORM], EXPECTED, tied=True)
    require_matching_specs([NORM, HEAD], {"norm": NORM}, tied=True)


def test_the_engines_dtype_is_accepted_as_well_as_their_checkpoints() -> None:
    require_matching_specs(
        [NORM, HEAD],
        {name: WeightSpec(name, "bfloat16", spec.shape) for name, spec in EXPECTED.items()},
        dtype="float32",
    )
