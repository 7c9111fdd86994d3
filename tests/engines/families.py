"""Tiny checkpoints of every family that slime-models builds, with random weights."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_core import RunView
from slime_core.config.schema import ARITHMETIC
from slime_core.modeling.layout import ParallelLayout

ROLLOUTS = 3
LIVE = (
    *("--plugin", "grpo", "--rm-type", "random", "--progress", "none", "--skip-eval-before-train"),
    *("--prompt-data", str(ARITHMETIC / "data" / "train.jsonl"), "--apply-chat-template", "--lr", "1e-3"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "24"),
    *("--num-rollout", str(ROLLOUTS), "--save-interval", "1", "--parity-interval", "1", "--check-weight-update-equal"),
    *("--parity-mean-tolerance", "1000", "--parity-max-tolerance", "1000"),
)
"""Random rewards, so that weights move; every rollout is compared, and no difference ends the run."""

SIZES: Mapping[str, Any] = {
    **{"vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "eos_token_id": 1},
    **{"bos_token_id": None, "pad_token_id": None},  # a padding row of zeros would tie all experts
}
HEADS: Mapping[str, Any] = {"head_dim": 16, "rope_theta": 1e4}
MIXTURE: Mapping[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
LLAMA: Mapping[str, Any] = {"hidden_size": 96, "num_attention_heads": 6}

SIGMOID: Mapping[str, Any] = {
    **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "n_group": 1, "topk_group": 1, **UNTIED},
}
"""Mixtures whose routers score by a sigmoid."""

LATENT: Mapping[str, Any] = {
    **{**SIGMOID, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 24},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
}
LLAMA_3 = {
    **{"rope_type": "llama3", "rope_theta": 2e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
}
DEEPSEEK = {**LATENT, "num_experts_per_tok": 3, "first_k_dense_replace": 1}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3", {**HEADS, **UNTIED}),
    "qwen2, tied": ("Qwen2", {"rope_theta": 1e6, **TIED}),
    "qwen2, untied": ("Qwen2", {"rope_theta": 1e4, **UNTIED}),
    "llama": ("Llama", {**LLAMA, "rope_theta": 1e5, **TIED}),
    "qwen3_moe": ("Qwen3Moe", {**HEADS, **MIXTURE, "norm_topk_prob": True, **UNTIED}),
    "qwen3_moe, not normed, tied": (
        "Qwen3Moe",
        {**HEADS, **MIXTURE, "num_experts_per_tok": 3, "norm_topk_prob": False, **TIED},
    ),
    "llama, scaled": ("Llama", {**LLAMA, "rope_parameters": LLAMA_3, **UNTIED}),
    "glm4": ("Glm4", {**HEADS, "attention_bias": True, **UNTIED}),
    "glm4, no biases": ("Glm4", {**HEADS, "attention_bias": False, **UNTIED}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{**HEADS, **SIGMOID},
            **{"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "rope_theta": 1e6, "routed_scaling_factor": 1.8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{**DEEPSEEK, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
            **{"routed_scaling_factor": 2.5, "rope_parameters": YARN},
        },
    ),
    "kimi_k2": (
        "DeepseekV3",
        {
            **{**DEEPSEEK, "routed_scaling_factor": 2.827},
            **{"rope_parameters": {**YARN, "rope_theta": 5e4}, "rms_norm_eps": 1e-5},
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {
            **{**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-5},
            **{"routed_scaling_factor": 2.446, "rope_theta": 5e4},
        },
    ),
}
"""Name -> what transformers calls the family, and its fields."""

GAP = 1e-4
"""Rounding cannot swap router probabilities that differ by this much."""

WEIGHT_SEEDS = {"moonlight": 1}
"""Where two experts nearly tie with the weights of seed 0."""

_DEEPSEEK = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
AS_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": {**_DEEPSEEK, "model_type": "kimi_k2"},  # transformers has no class of this name
    "moonlight": _DEEPSEEK,
    "glm4_moe_lite": {"first_k_dense_replace": 1},  # transformers 5 writes mlp_layer_types only; SGLang reads this
}
"""Fields of the published config.json that transformers does not write."""


def config_of(name: str, **changes: Any) -> Any:
    """The transformers config of a family."""
    import transformers

    family, fields = FAMILIES[name]
    return getattr(transformers, f"{family}Config")(**{**SIZES, **fields, **changes})


def write(name: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint with the embedded tokenizer; every norm and bias, those of routers included, is perturbed."""
    import transformers

    torch.manual_seed(WEIGHT_SEEDS.get(name, 0))
    model = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")(config_of(name, **changes))
    with torch.no_grad():
        for parameter in [*model.parameters(), *router_biases(model).values()]:
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **AS_PUBLISHED.get(name, {})}))
    for file in (ARITHMETIC / "model").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    return folder


def router_biases(model: Any) -> dict[str, torch.Tensor]:
    """What routers of a transformers model add to choose experts; no optimizer trains it."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def smallest_gap(router: Any, logits: torch.Tensor) -> float:
    """Of the scores by which a router of transformers chooses: between the last chosen and the first that is not."""
    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
    groups = getattr(router, "num_group", 1) or 1
    if groups > 1:
        by_group = scores.unflatten(-1, (groups, -1))
        best = by_group.topk(2).values.sum(-1).topk(router.topk_group + 1)
        if (gap := _last_gap(best.values)) < GAP:
            return gap
        taken = torch.zeros_like(by_group[..., 0]).scatter(1, best.indices[:, :-1], 1.0).bool()
        scores = by_group.masked_fill(~taken[..., None], -1e9).flatten(1)
    return _last_gap(scores.topk(router.top_k + 1).values)


def _last_gap(best: torch.Tensor) -> float:
    return float((best[:, -2] - best[:, -1]).detach().min())


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """All weights of a transformers model by their names in a checkpoint."""
    return by_expert(dict(model.named_parameters())) | router_biases(model)


def spec_of(name: str) -> Any:
    """A fresh model spec of the family."""
    family = FAMILIES[name][0]
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", family).lower()
    return getattr(importlib.import_module(f"slime_models.{module}"), family)(RunView())


def build(name: str, folder: Path, layout: ParallelLayout, **overrides: Any) -> tuple[Any, list[Any]]:
    """The spec, and the chunks with the weights of ``folder``."""
    spec = spec_of(name)
    config = json.loads((folder / "config.json").read_text())
    chunks = spec.build(config, dtype=torch.float32, parallel=layout, overrides=overrides)
    spec.load_weights(chunks, folder)
    return spec, chunks


def packed_logits(chunk: Any, sequences: Sequence[torch.Tensor], *, tail: int = 0) -> torch.Tensor:
    """Logits of all sequences as one row, ``tail`` padding tokens at its end left out."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(sequence) for sequence in sequences]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in (*lengths, tail)])
    tokens = torch.cat([*sequences, torch.zeros(tail, dtype=torch.int64)])
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    logits: torch.Tensor = chunk(tokens[None], positions[None], None, packed_seq_params=packed)
    return logits[0, : sum(lengths)]


def of_hugging_face(folder: Path) -> Any:
    """The model as transformers runs it, experts one by one."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    config = kind.config_class.from_dict({**config, "model_type": kind.config_class.model_type})
    return kind.from_pretrained(folder, config=config, dtype=torch.float32, experts_implementation="eager")


def by_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 holds the experts of a layer in one tensor; checkpoints hold each alone."""
    singles = {}
    for name, weight in weights.items():
        if ".experts." not in name:
            singles[name] = weight
            continue
        is_fused = name.endswith("gate_up_proj")
        parts = (
            zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True) if is_fused else [("down_proj", weight)]
        )
        for part, stacked in parts:
            singles |= {f"{name.rpartition('.')[0]}.{n}.{part}.weight": expert for n, expert in enumerate(stacked)}
    return singles


def live_run(model: Path, run: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of each rollout of a ``slime run`` of ``model``; one that is finished is only read."""
    if not (run / "checkpoints" / f"step-{ROLLOUTS:06d}").exists():
        words = [*LIVE, *flags, "--hf-checkpoint", str(model), "--output-dir", str(run)]
        done = subprocess.run([sys.executable, "-m", "slime_core", "run", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "parity/mean" in row]


def fresh_server_difference(run: Path, step: int, folder: Path, log: Path) -> float:
    """Largest difference of log-probabilities of rollout ``step``: a fresh server of ``folder`` to the run's engine.

    Arguments:
        run: its folder; the first samples of a rollout are stored with tokens.
        folder: Hugging Face folder with the weights of version ``step``.
    """
    from slime_core.rollout.engines.engine import EngineSettings, SGLangServer
    from slime_core.weights.engine_control import call

    lines = (run / "samples" / f"train-{step:06d}.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("rollout_log_probs")]
    assert rows
    assert all(row["weight_versions"] == [str(step)] for row in rows)
    scoring = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    differences: list[float] = []
    with SGLangServer(EngineSettings(folder, log, dtype="float32")) as server:
        server.wait_ready()
        for row in rows:
            answer = call(server.url, "/generate", {"input_ids": row["tokens"], **scoring}, timeout_s=60)
            live = row["rollout_log_probs"]
            entries = answer["meta_info"]["input_token_logprobs"][-len(live) :]
            differences += [abs(entry[0] - recorded) for entry, recorded in zip(entries, live, strict=True)]
    return max(differences)
