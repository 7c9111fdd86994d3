"""Settings under the names that other tools give them: TRL, verl, OpenRLHF, the Trainer of transformers, vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

__all__ = ["counterpart", "counterparts"]

_NAMES: Mapping[str, str] = {
    "--lr": "learning_rate actor_learning_rate",
    "--lr-warmup-iters": """
        warmup_steps num_warmup_steps warmup_iters warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio
    """,
    "--lr-decay-style": "lr_scheduler lr_scheduler_type lr_schedule",
    "--clip-grad": "max_grad_norm grad_clip max_norm",
    "--adam-eps": "adam_epsilon",
    "--eps-clip": "epsilon clip_range cliprange clip_ratio clip_ratio_low",
    "--eps-clip-high": "epsilon_high clip_ratio_high",
    "--entropy-coef": "entropy_coeff ent_coef entropy_loss_coef",
    "--use-kl-loss with --kl-loss-coef": "beta init_kl_coef kl_coeff kl_loss_coeff",
    "--lambd": "lam gae_lambda gae_lam",
    "--advantage-estimator": "algorithm algo adv_estimator",
    "--rollout-temperature": "temperature",
    "--rollout-top-p": "top_p",
    "--rollout-top-k": "top_k",
    "--rollout-max-response-len": """
        max_new_tokens max_tokens max_completion_length max_response_length response_length generate_max_len
    """,
    "--rollout-max-prompt-len": "max_prompt_length prompt_max_len",
    "--sglang-context-length": "max_model_len max_seq_len max_seq_length max_length",
    "--n-samples-per-prompt": "num_generations group_size rollout_n num_return_sequences",
    "--rollout-batch-size, in prompts a rollout, or --global-batch-size, in samples an optimizer step": """
        batch_size train_batch_size per_device_train_batch_size ppo_mini_batch_size
    """,
    "--global-batch-size, in samples an optimizer step; micro-batches follow from --max-tokens-per-gpu": """
        gradient_accumulation_steps accumulate_grad_batches
    """,
    "--micro-batch-size, or leave it out: micro-batches are packed up to --max-tokens-per-gpu": """
        micro_train_batch_size micro_rollout_batch_size ppo_micro_batch_size_per_gpu
    """,
    "--num-rollout": """
        max_steps num_steps total_steps total_training_steps num_train_steps epochs num_epochs num_train_epochs
        max_epochs total_epochs num_episodes
    """,
    "--hf-checkpoint": "model_path model_name_or_path pretrain actor_model base_model",
    "--hf-checkpoint, whose tokenizer it is": "tokenizer tokenizer_path tokenizer_name tokenizer_name_or_path",
    "--ref-load": "ref_model ref_model_path reference_model",
    "--prompt-data": "dataset dataset_name dataset_path train_file train_files train_data train_dataset data",
    "--eval-prompt-data NAME FILE": "eval_dataset eval_data eval_file val_files val_file validation_file test_file",
    "--input-key": "prompt_key prompt_column",
    "--label-key": "answer_key label_column",
    "--rm-type, or --custom-rm-path file.py": "reward_model reward_funcs reward_function reward_fn reward_pretrain",
    "--rm-type remote_rm with --rm-url": "remote_rm_url",
    "--output-dir": "save_path ckpt_path save_dir checkpoint_dir default_local_dir run_dir log_dir",
    "--save-interval": "save_steps save_freq",
    "--eval-interval": "eval_steps eval_freq test_freq",
    "--load RUN": "resume resume_from resume_from_checkpoint load_checkpoint",
    "--recompute-activations": "gradient_checkpointing",
    "--bf16": "dtype precision mixed_precision torch_dtype",
    "--tensor-model-parallel-size for the learner, or --rollout-num-gpus-per-engine for an engine": """
        tp tp_size tensor_parallel_size vllm_tensor_parallel_size
    """,
    "--pipeline-model-parallel-size": "pp pp_size pipeline_parallel_size",
    "--context-parallel-size": "cp cp_size ulysses_sequence_parallel_size",
    "--expert-model-parallel-size": "ep ep_size expert_parallel_size",
    "--actor-num-gpus-per-node": "num_gpus gpus n_gpus n_gpus_per_node nproc_per_node",
    "--actor-num-nodes": "nnodes num_nodes",
    "--rollout-num-gpus": "num_engines vllm_num_engines",
    "--sglang-mem-fraction-static": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "--sglang-moe-a2a-backend deepep": "sglang_enable_deepep_moe",
    "--sglang-ep-size": "sglang_enable_ep_moe",
    "--plugin wandb": "report_to logger wandb",
    "slime check with the same flags, which starts nothing": "dry_run",
}
"""What to write instead -> names of other tools."""


@cache
def counterparts() -> Mapping[str, str]:
    """Return name of another tool, with underscores -> what to write instead."""
    return {name: instead for instead, names in _NAMES.items() for name in names.split()}


def counterpart(name: str) -> str | None:
    """Return what to write instead of a flag or key of another tool; None: it is not in the table."""
    return counterparts().get(name.removeprefix("--").replace("-", "_"))
