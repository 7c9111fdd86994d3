"""Compares a model spec with Hugging Face's model in a separate process: Megatron creates groups once per process.

Creates a tiny checkpoint of the architecture with transformers and adds noise to every tensor, builds the same model in
Megatron in float32 on the CPU, and writes the violated properties as a JSON object.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slime_core import RunView, boundary
from slime_core.errors import PluginError
from slime_core.types import JsonValue
from slime_testing.harness import ActivePlugin, Kind
from slime_testing.harness.megatron import start_single_rank

__all__ = ["PROPERTIES", "TINY", "main"]

TINY: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 28,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "initializer_range": 0.1,
    "use_cache": False,
}
"""Fields of the config, used if the architecture has them; heads are grouped, and no two sizes of a layer are equal.

``head_dim`` equals ``qk_rope_head_dim``, because configs of multi-latent attention have both.
"""

LENGTHS = (5, 1, 17, 8)
MOVED = 0.1
"""Scale of the noise added to every tensor, so that no norm is all ones and no bias all zeros."""

TOLERANCE = 1e-4
"""Largest accepted difference of two float32 logits, relative to the largest logit if that is above 1."""

WEIGHTS = "model.safetensors"


def main(task: Path, report: Path) -> None:
    """Read the task, test every variant of every architecture, write property -> description of its violation."""
    request = json.loads(task.read_text(encoding="utf-8"))
    plugin, options = ActivePlugin.from_json(request["plugin"])
    run = RunView.from_json(request["run"])
    layout = start_single_rank()
    traits: Any = plugin.component(Kind.MODEL_SPEC, request["component"]).traits
    make = partial(plugin.build, Kind.MODEL_SPEC, request["component"], options=options, run=run)
    findings: dict[str, str] = {}
    for architecture in sorted(traits.architectures):
        for variant in request["variants"]:
            fields = {**TINY, **request["tiny"], **variant}
            refuses = partial(plugin.refusals, architecture)
            violations = _tested(make, architecture, fields, refuses, layout)
            what = f"{architecture} with {variant}: " if variant else f"{architecture}: "
            findings = {name: what + message for name, message in violations.items()} | findings
    report.write_text(json.dumps(findings), encoding="utf-8")


def _tested(
    make: Callable[[], Any],
    architecture: str,
    fields: Mapping[str, Any],
    refuses: Callable[[Mapping[str, Any]], list[str]],
    layout: Any,
) -> dict[str, str]:
    """Test one checkpoint; return property -> description of its violation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with boundary("building and loading it", architecture):
                reference = _reference(architecture, fields, folder)
                spec = make()
                chunks = spec.build(_config(folder), dtype=torch.float32, parallel=layout)
                spec.load_weights(chunks, folder)
        except PluginError as failure:
            return {"built": str(failure)}
        case = _Case(spec, chunks, reference, folder, refuses)
        return {name: message for name, holds in PROPERTIES.items() if (message := _message(name, holds, case))}


@dataclass(frozen=True, slots=True)
class _Case:
    """A checkpoint, Hugging Face's model of it, and the spec with its Megatron model."""

    spec: Any
    chunks: list[Any]
    reference: Any
    folder: Path
    refuses: Callable[[Mapping[str, Any]], list[str]]

    def weights(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors by name."""
        return load_file(self.folder / WEIGHTS)

    def logits(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return Megatron's logits of the rows, packed into one: [t, V]."""
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths = [len(row) for row in rows]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        with torch.no_grad():
            logits: torch.Tensor = self.chunks[0](
                torch.cat(list(rows))[None], positions, None, packed_seq_params=packed
            )
        return logits[0]

    def wanted(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return Hugging Face's logits of the same rows, each alone: [t, V]."""
        with torch.no_grad():
            return torch.cat([self.reference(row[None]).logits[0] for row in rows])

    def rows(self) -> list[torch.Tensor]:
        """Return random rows of token ids."""
        generator = torch.Generator().manual_seed(7)
        size = int(self.reference.config.vocab_size)
        return [torch.randint(0, size, (length,), generator=generator) for length in LENGTHS]


def _reference(architecture: str, fields: Mapping[str, Any], folder: Path) -> Any:
    """Return transformers' model of the architecture with noise on every tensor, saved to ``folder``."""
    import transformers

    family: Any = getattr(transformers, architecture, None)
    if family is None:
        raise PluginError(f"transformers {transformers.__version__} has no model called {architecture}")
    accepted = family.config_class().to_dict()
    config = family.config_class(**{name: value for name, value in fields.items() if name in accepted})
    torch.manual_seed(0)
    model = family(config).to(torch.float32).eval()
    with torch.no_grad():
        saved = model.state_dict().keys()
        buffers = [buffer for name, buffer in model.named_buffers() if name in saved]  # such as biases of routers
        for tensor in [*model.parameters(), *buffers]:
            tensor.add_(MOVED * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


def _config(folder: Path) -> dict[str, JsonValue]:
    config: dict[str, JsonValue] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _is_not_refused(case: _Case) -> str | None:
    mistakes = case.refuses(_config(case.folder))
    return f"a checkpoint that is built is refused before the start: {'; '.join(mistakes)}" if mistakes else None


def _weights_come_back(case: _Case) -> str | None:
    stored = case.weights()
    exported = {name: weight.clone() for name, weight in case.spec.export_weights(case.chunks)}
    lacks, invents = sorted(stored.keys() - exported.keys()), sorted(exported.keys() - stored.keys())
    if lacks or invents:
        return f"export_weights() leaves out {lacks[:5]} and invents {invents[:5]}"
    differ = [name for name in stored if not torch.equal(stored[name], exported[name])]
    if differ:
        return (
            f"loaded and exported again, {len(differ)} tensors are others than in the checkpoint, {differ[:5]} among "
            "them: the maps are not inverses"
        )
    return None


def _logits_agree(case: _Case) -> str | None:
    for row in case.rows():
        difference = _difference(case.logits([row]), case.wanted([row]))
        if difference is not None:
            return f"the logits of a row of {len(row)} tokens differ from Hugging Face's by {difference:.3g}"
    return None


def _rows_are_separate(case: _Case) -> str | None:
    rows = case.rows()
    difference = _difference(case.logits(rows), torch.cat([case.logits([row]) for row in rows]))
    return (
        None
        if difference is None
        else f"packed into one row, sequences see each other: logits differ by {difference:.3g}"
    )


def _every_tensor_acts(case: _Case) -> str | None:
    """Move each tensor in turn in both models and compare logits; tensors of all experts of a layer move together."""
    rows, weights = [max(case.rows(), key=len)], case.weights()
    # Moves tensors of the checkpoint, so that each has the meaning that Hugging Face's format gives it.
    differences: dict[str, float] = {}
    together = groupby(sorted(weights, key=_of_all_experts), key=_of_all_experts)
    for number, (name, members) in enumerate(together):
        generator = torch.Generator().manual_seed(number)
        moved = {
            member: weights[member] + torch.randn(weights[member].shape, generator=generator) for member in members
        }
        difference = _difference(*_both(case, weights | moved, rows))
        if difference is not None:
            differences[name] = difference
    if not differences:
        return None
    shown = ", ".join(
        f"{name} (logits differ by {difference:.3g})" for name, difference in list(differences.items())[:5]
    )
    return f"these tensors of the checkpoint act otherwise than in Hugging Face's model once they are moved: {shown}"


def _of_all_experts(name: str) -> str:
    """Return the name with a star instead of an expert's number."""
    return re.sub(r"(?<=experts\.)\d+(?=\.)", "*", name)


def _both(
    case: _Case, weights: dict[str, torch.Tensor], rows: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of both models with these weights."""
    with tempfile.TemporaryDirectory() as name:
        save_file(weights, Path(name, WEIGHTS))
        Path(name, "config.json").write_bytes((case.folder / "config.json").read_bytes())
        case.spec.load_weights(case.chunks, Path(name))
        actual = case.logits(rows)
    model = type(case.reference).from_pretrained(
        None, config=case.reference.config, state_dict=weights, dtype=torch.float32
    )
    case.reference.load_state_dict(model.state_dict())
    return actual, case.wanted(rows)


PROPERTIES: Mapping[str, Callable[[_Case], str | None]] = {
    "refused": _is_not_refused,
    "exported": _weights_come_back,
    "logits": _logits_agree,
    "packed": _rows_are_separate,
    "tensors": _every_tensor_acts,
}
"""Property -> its test, in order; the last test changes the weights."""


def _message(name: str, holds: Callable[[_Case], str | None], case: _Case) -> str | None:
    try:
        with boundary(case.spec, f"testing {name}"):
            return holds(case)
    except PluginError as failure:
        return str(failure)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the largest difference, None if it is negligible; infinite for a NaN or another shape."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    difference = float((actual - expected).abs().max())
    return difference if difference > TOLERANCE * max(1.0, float(expected.abs().max())) else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
