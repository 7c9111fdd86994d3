"""Settings under the names that other frameworks give them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COUNTERPARTS", "counterpart"]

COUNTERPARTS: Mapping[str, str] = {
    "model_path": "--hf-checkpoint",
    "model_name_or_path": "--hf-checkpoint",
    "learning_rate": "--lr",
    "batch_size": "--rollout-batch-size or --global-batch-size",
    "group_size": "--n-samples-per-prompt",
    "num_generations": "--n-samples-per-prompt",
    "temperature": "--rollout-temperature",
    "max_new_tokens": "--rollout-max-response-len",
    "max_model_len": "--sglang-context-length",
    "dataset": "--prompt-data",
    "train_file": "--prompt-data",
    "beta": "--use-kl-loss with --kl-loss-coef",
    "epochs": "--num-rollout",
    "max_steps": "--num-rollout",
    "resume_from_checkpoint": "--load",
    "gradient_checkpointing": "--recompute-activations",
    "tensor_parallel_size": "--tensor-model-parallel-size or --rollout-num-gpus-per-engine",
    "gpu_memory_utilization": "--sglang-mem-fraction-static",
}
"""Name in another framework -> the flag of slime."""


def counterpart(name: str) -> str | None:
    """Return what to write instead of a flag or key of another framework; None if it is unknown."""
    return COUNTERPARTS.get(name.removeprefix("--").replace("-", "_"))
