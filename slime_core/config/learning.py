"""Sections of the training side: objective, optimizer, critic, steps, parallel layout, and publication of weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from slime_core.config.options import NO_ENGINES, ONE_HALF, AtMost, Below, Conflicts, Needs, ReadBy
from slime_core.config.section import (
    Distinct,
    FractionBelowOne,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    rejected,
)

SHARED_ACTIVATIONS = "tensor-parallel ranks share the activations"
OF_CRITIC = ReadBy("advantage_estimator", "values")
CHANGES_ADVANTAGES = ReadBy("policy_loss", "advantages")
OF_REFERENCE = Needs("use_kl_loss", "kl_coef", because="only these use a reference model")
OF_PARITY_GATE = Conflicts("parity_interval", equals=0, because="nothing is compared")
WITHOUT_STRICT = Conflicts("true_on_policy_mode", because="that mode sets the bounds, 1e-5 on average and 1e-4 at most")
WITHIN_DECAY = Below("lr_decay_iters", because="both count from the first optimizer step")
OF_SEPARATE_CRITIC = Needs("critic_num_gpus", because="otherwise the critic shares the actor's ranks")


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as problem:
        raise rejected(
            f"found {text!r}, not a regular expression: {problem}; write a dot or bracket with a backslash, as \\."
        ) from None
    return text


Expression = Annotated[Name, AfterValidator(_regular_expression)]


class AlgorithmConfig(Section):
    """The objective: advantages, policy loss and its corrections."""

    advantage_estimator: Name | None = None
    """Component that turns rewards into advantages. None: a plugin must preset it, as --plugin grpo does."""
    policy_loss: Name | None = None
    """Component that turns log-probabilities and advantages into the loss of each token. None: the loss that the
    advantage estimator names."""
    eps_clip: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower PPO clip range: the importance ratio is clipped to [1 - eps_clip, 1 + eps_clip_high]."""
    eps_clip_high: NonNegativeFloat | None = None
    """Upper PPO clip range. None: eps_clip."""
    eps_clip_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clip: the loss of a token with negative advantage A is at most eps_clip_c * |A|. None: no bound."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss; the reference takes the memory of a second model."""
    kl_loss_coef: Annotated[NonNegativeFloat, Needs("use_kl_loss")] = 0.0
    """Weight of the KL divergence from the reference model in the loss. 0 with use_kl_loss: the divergence is only
    measured."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the KL divergence in the loss. low_var_kl: k3, clamped. k1 is for measuring: on samples of the actor
    itself its gradient has expectation 0."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus. 0: entropy is only measured."""
    use_unbiased_kl: Annotated[
        bool,
        Needs("use_kl_loss"),
        Conflicts("kl_loss_type", equals="k2", because="the mean of k2 is not the divergence"),
    ] = False
    """Weight the KL divergence in the loss by the importance ratio of the actor to the old actor, with its gradient."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of a step. False: over each response, then over responses."""
    loss_token_divisor: Annotated[
        PositiveFloat | None, Conflicts("calculate_per_token_loss", because="both set the divisor of the loss")
    ] = None
    """Divide the loss of each response by this many tokens, whatever its length (Dr. GRPO). None: by its tokens."""
    count_masked_rollouts: Annotated[
        bool,
        Conflicts(
            "calculate_per_token_loss", because="the loss is then averaged over tokens, and masked rollouts have none"
        ),
    ] = False
    """Divide the loss of a step by all its rollouts, as slime does. False: by those that train a token, so that the
    others weigh twice as much if transforms or filters mask half of the rollouts.
    """
    normalize_advantages: Annotated[bool, CHANGES_ADVANTAGES] = False
    """Whiten the advantages over all trained tokens of a rollout: mean 0, variance 1."""
    gamma: Annotated[float, Field(ge=0, le=1), ReadBy("advantage_estimator", "gamma")] = 1.0
    """Discount factor of later rewards, for token-level estimators. 1: no discount."""
    lambd: Annotated[float, Field(ge=0, le=1), ReadBy("advantage_estimator", "lambd")] = 1.0
    """Lambda of generalised advantage estimation (GAE), for estimators with a critic. 1: returns minus values."""
    kl_coef: Annotated[
        NonNegativeFloat,
        ReadBy("advantage_estimator", "kl"),
        Conflicts("kl_loss_coef", because="the divergence would count twice"),
    ] = 0.0
    """Weight of the KL divergence from the reference model, subtracted from each token's reward. 0: none.

    For token-level estimators; above 0 the reference takes the memory of a second model.
    """
    corrections: Annotated[tuple[Name, ...], Distinct] = ()
    """Components that weight and mask tokens by the difference between learner and engine, in order. Empty: none."""
    use_rollout_logprobs: bool = False
    """Use the engine's log-probs as the old ones in policy loss and estimators; the learner computes none."""
    get_mismatch_metrics: bool = False
    """Log the mismatch between learner and engine as train/mismatch_... metrics."""
    true_on_policy_mode: Annotated[
        bool,
        Conflicts(
            "async_buffer_size",
            "use_rollout_logprobs",
            because="this mode trains on samples of the current weights, with a ratio of exactly 1",
        ),
        Conflicts("corrections", because="in this mode learner and engine agree, so there is nothing to correct"),
        Conflicts(
            "over_sampling_batch_size",
            unless={"max_staleness": 0},
            because="finished groups that a rollout does not take are kept, and newer weights train on them",
        ),
        Conflicts("update_weights_interval", because="this mode needs a publication after every rollout"),
        Conflicts("parity_interval", because="this mode compares learner and engine at every rollout"),
        Conflicts(
            "bf16",
            because="bfloat16 has 8 bits of precision: it holds a logit between 4 and 8 in steps of 2^-5, so that "
            "rounding alone moves a log-probability by up to 2^-6 = 0.016, and the mode allows 1e-5 on average",
        ),
        Conflicts(*NO_ENGINES, because="other weights sampled the rollouts in the file"),
    ] = False
    """Train only on samples of the current weights: one optimizer step per rollout, published after each, ratio 1.

    Learner and engine must agree in float32 within 1e-5 nats on average and 1e-4 at most in every rollout, or the run
    ends. Their kernels differ, so they do not agree bit for bit.
    """
    use_opd: Annotated[
        bool,
        CHANGES_ADVANTAGES,
        Needs("opd_teacher_load"),
        Conflicts("opd_kl_coef", equals=0, because="a weight of 0 leaves the teacher without effect"),
    ] = False
    """On-policy distillation: subtract the KL divergence from a teacher model from each token's advantage. The teacher
    takes the memory of a second model."""
    opd_kl_coef: Annotated[NonNegativeFloat, Needs("use_opd")] = 1.0
    """Weight of the divergence from the teacher in on-policy distillation."""
    opd_teacher_load: Annotated[Path | None, Needs("use_opd")] = None
    """Hugging Face folder of the teacher for on-policy distillation, of the policy's architecture and vocabulary. None:
    no teacher."""
    ref_update_interval: Annotated[PositiveInt | None, OF_REFERENCE] = None
    """Rollouts between copies of the actor into the reference. None: the reference never changes."""
    keep_old_actor: Annotated[
        bool,
        Needs(
            "update_weights_interval", because="engines that are updated after every rollout serve the current weights"
        ),
        Conflicts("use_rollout_logprobs", because="both set the source of the old log-probs"),
        Conflicts(
            "over_sampling_batch_size",
            unless={"max_staleness": 0},
            because="one copy of old weights is kept, and older weights sampled the groups that over-sampling keeps; "
            "--use-rollout-logprobs has their log-probs",
        ),
        Conflicts(
            "async_buffer_size",
            because="one copy of old weights is kept; --use-rollout-logprobs has the log-probs of older ones",
        ),
        Conflicts(*NO_ENGINES, because="no engine is started"),
    ] = False
    """Compute old log-probs with a copy of the weights that the engines served instead of the current weights."""


class OptimizerConfig(Section):
    """Adam and the learning-rate schedule."""

    lr: NonNegativeFloat = 1e-6
    """Learning rate after warm-up."""
    min_lr: Annotated[NonNegativeFloat, Needs("lr_decay_style"), AtMost("lr", "critic_lr")] = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_iters: Annotated[NonNegativeInt, WITHIN_DECAY] = 0
    """Optimizer steps over which the learning rate rises linearly from 0. 0: no warm-up."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], Needs("lr_wsd_decay_iters", when="WSD")
    ] = "constant"
    """Decay of the learning rate after warm-up. WSD: constant, then a decay over the last lr_wsd_decay_iters steps.

    inverse-square-root: proportional to sqrt(lr_warmup_iters / steps done), at least min_lr.
    """
    lr_decay_iters: Annotated[PositiveInt | None, Needs("lr_decay_style")] = None
    """Optimizer steps until the learning rate is min_lr. None: all steps of the run."""
    lr_wsd_decay_iters: Annotated[PositiveInt | None, Needs("lr_decay_style", equals="WSD")] = None
    """Optimizer steps of the final decay of WSD. None: no final decay."""
    lr_wsd_decay_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"], Needs("lr_decay_style", equals="WSD")
    ] = "exponential"
    """Shape of the final decay of WSD."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay (AdamW)."""
    adam_beta1: FractionBelowOne = 0.9
    """Adam: decay rate of the running mean of gradients."""
    adam_beta2: FractionBelowOne = 0.999
    """Adam: decay rate of the running mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """Adam: added to the denominator of the update."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; larger ones are scaled down. 0: no clipping."""
    lr_warmup_init: Annotated[NonNegativeFloat, Needs("lr_warmup_iters"), AtMost("lr", "critic_lr")] = 0.0
    """Learning rate at the start of warm-up."""
    reset_optimizer_states: bool = False
    """Reset Adam's moments and step counts at the start of each rollout."""
    only_train_params_name_list: Annotated[tuple[Expression, ...], Conflicts("freeze_params_name_list")] = ()
    """Train only weights whose Megatron name matches one of these regular expressions (search). Empty: all."""
    freeze_params_name_list: tuple[Expression, ...] = ()
    """Freeze weights whose Megatron name matches one of these regular expressions (search)."""


class CriticConfig(Section):
    """The critic of advantage estimators that read values. None: as the actor."""

    critic_load: Annotated[Path | None, OF_CRITIC] = None
    """Hugging Face folder with the critic's start weights: a causal language model of the actor's architecture.

    Its vocabulary head is not used. None: the actor's weights.
    """
    critic_lr: Annotated[NonNegativeFloat | None, OF_CRITIC] = None
    """Learning rate of the critic after warm-up. None: lr."""
    critic_lr_warmup_iters: Annotated[NonNegativeInt | None, OF_CRITIC, WITHIN_DECAY] = None
    """Warm-up steps of the critic's learning rate. None: lr_warmup_iters."""
    critic_weight_decay: Annotated[NonNegativeFloat | None, OF_CRITIC] = None
    """Decoupled weight decay of the critic. None: weight_decay."""
    critic_clip_grad: Annotated[NonNegativeFloat | None, OF_CRITIC] = None
    """Largest global norm of the critic's gradient. None: clip_grad."""
    value_clip: Annotated[PositiveFloat | None, OF_CRITIC] = 0.2
    """Clip range for value updates (PPO), in the unit of the rewards. None: no clipping."""
    num_critic_only_steps: Annotated[
        NonNegativeInt, OF_CRITIC, Below("num_rollout", because="the actor has to be trained")
    ] = 0
    """Number of rollouts at the start that train only the critic."""
    critic_num_gpus: Annotated[PositiveInt | None, OF_CRITIC] = None
    """Devices of a separate critic; on a CPU, processes. None: the critic shares the actor's ranks."""
    critic_tensor_model_parallel_size: Annotated[PositiveInt | None, OF_CRITIC, OF_SEPARATE_CRITIC] = None
    """tensor_model_parallel_size of a separate critic. None: as the actor."""
    critic_sequence_parallel: Annotated[
        bool | None,
        OF_CRITIC,
        OF_SEPARATE_CRITIC,
        Needs("critic_tensor_model_parallel_size", "tensor_model_parallel_size", when=True, because=SHARED_ACTIVATIONS),
        Conflicts("critic_tensor_model_parallel_size", equals=1, when=True, because=SHARED_ACTIVATIONS),
    ] = None
    """sequence_parallel of a separate critic. None: as the actor."""
    critic_pipeline_model_parallel_size: Annotated[PositiveInt | None, OF_CRITIC, OF_SEPARATE_CRITIC] = None
    """pipeline_model_parallel_size of a separate critic. None: as the actor."""
    critic_context_parallel_size: Annotated[PositiveInt | None, OF_CRITIC, OF_SEPARATE_CRITIC] = None
    """context_parallel_size of a separate critic. None: as the actor."""


class LearnerConfig(Section):
    """Optimizer steps and micro-batches of a rollout, and the kernels that compute them."""

    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step. None: rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout."""
    num_steps_per_rollout: PositiveInt | None = None
    """Optimizer steps per rollout. None: from global_batch_size, or 1."""
    max_tokens_per_gpu: Annotated[
        PositiveInt,
        Conflicts("micro_batch_size", unless="hard_token_budget", because="micro_batch_size counts samples instead"),
    ] = 8192
    """Maximum tokens of a packed micro-batch on one rank. A longer sample is a micro-batch by itself.

    Not given: 8192, 4096 or 2048, by the memory of the GPU if it is known.
    """
    hard_token_budget: bool = False
    """Refuse a run whose longest sequence does not fit max_tokens_per_gpu."""
    micro_batch_size: PositiveInt | None = None
    """Maximum samples of a micro-batch, of any length; switches shared_prompts off.

    None: as many as fit in max_tokens_per_gpu.
    """
    balance_by_flops: bool = False
    """Balance samples over ranks by the FLOPs of a forward pass, attention included; switches shared_prompts off.

    False: by tokens.
    """
    log_probs_chunk_size: PositiveInt | None = 1024
    """Response tokens whose vocabulary-sized logits are in memory at once. None: all of a micro-batch."""
    fp32_lm_head: Annotated[bool, Needs("bf16", because="in float32 logits have that type already")] = False
    """Compute logits in float32 instead of bfloat16, in learner and engines. The learner multiplies a chunk of
    log_probs_chunk_size at a time, and again in the backward pass, and holds no other logits."""
    shared_prompts: Literal["auto", "off"] = "auto"
    """Pack the tokens with which several samples start, prompts and earlier turns, once for all of them. auto: where
    possible and at least 5 % of the tokens are saved."""
    use_routing_replay: Annotated[
        bool,
        Conflicts("use_rollout_routing_replay", because="the engine's routes are replayed in all passes"),
        # Recomputing layers in the backward pass is a later pass, which replays the routes of the forward pass.
        Conflicts(
            "use_rollout_logprobs",
            unless={"recompute_granularity": None, "recompute_activations": True},
            because="the engine's log-probs replace the pass whose routes would be replayed",
        ),
    ] = False
    """Record the expert routes of a mixture in the first pass over a rollout and replay them in later passes."""
    use_rollout_routing_replay: bool = False
    """Replay the expert routes of the engine, which returns them with each response of a mixture."""
    flash_attention: Annotated[
        Literal["auto", "fa2", "fa4"],
        Needs("bf16", when="fa4", because="FlashAttention computes in bfloat16"),
        Conflicts("device", equals="cpu", when="fa4", because="FlashAttention runs on GPUs"),
    ] = "auto"
    """Version of FlashAttention, on GPUs in bfloat16. auto: 4 if flash-attn-4 is installed, as with SGLang, and agrees
    with 2 on a test row; otherwise 2."""
    transformer_impl: Annotated[
        Literal["auto", "local", "transformer_engine"],
        Conflicts("device", equals="cpu", when="transformer_engine", because="TransformerEngine runs on GPUs"),
        Conflicts(
            "only_train_params_name_list",
            "freeze_params_name_list",
            when="transformer_engine",
            because="these expressions find names of local layers",
        ),
    ] = "local"
    """Matrices and norms of the learner's layers: Megatron's local ones, or TransformerEngine's. auto:
    TransformerEngine's on GPUs if it is installed and neither the model nor frozen parameters need local layers."""
    compile_pointwise: bool = False
    """Fuse rotary embeddings and SwiGLU with torch.compile, which needs a C++ compiler. Results differ in their last
    bits."""
    deterministic_mode: Annotated[bool | None, Conflicts("debug_rollout_only", because="nothing is trained")] = None
    """Train with deterministic operations only: the same rollouts give the same bits; others end the run.

    None: in runs that only train. Slower on GPUs, because the backward pass of attention adds up in a fixed order.
    """


class ParallelConfig(Section):
    """Parallel layout of the learner; the remaining factor of its ranks is data parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    """Tensor parallelism: ranks that share every matrix."""
    sequence_parallel: bool = False
    """Sequence parallelism: tensor-parallel ranks also share the activations between matrices.

    It has no effect with tensor_model_parallel_size 1, as in Megatron.
    """
    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline parallelism: ranks that share the stack of layers."""
    num_virtual_stages_per_pipeline_rank: Annotated[
        PositiveInt, Needs("pipeline_model_parallel_size", because="interleaving needs several pipeline ranks")
    ] = 1
    """Virtual pipeline stages per rank (interleaved schedule). 1: not interleaved."""
    context_parallel_size: PositiveInt = 1
    """Context parallelism: ranks that share every sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Expert parallelism: ranks that share the experts of a mixture.

    Times expert_tensor_parallel_size it divides the ranks of a pipeline stage. A separate critic uses the same size if
    its ranks are divisible by it; otherwise each of its ranks holds all experts.
    """
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share every matrix of an expert. None: tensor_model_parallel_size. 1 has no effect without experts.

    With 1, each tensor-parallel rank holds complete experts: 8 ranks train with tensor size 4 and expert size 8.
    """

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def row_multiple(self) -> int:
        """A packed row is padded to a multiple of this number of tokens, so that ranks can share it."""
        chunks = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return chunks * (self.tensor_model_parallel_size if self.sequence_parallel else 1)


PARITY_BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 2.0), "mixture": (5e-3, 0.05)}
"""dtype (mixture: of experts, in float32) -> largest mean and largest single difference of log-probabilities that the
parity gate accepts, in nats; see ``learner.parity.Bounds``. ``campaigns/parity.py`` measured those of dense models,
which include a margin (``docs/metrics.md``); those of mixtures are chosen."""
STRICT_PARITY_BOUNDS = (1e-5, 1e-4)
"""The same in float32 with ``true_on_policy_mode``: two to four times the worst of that table, which different kernels
reach by rounding alone."""


class WeightsConfig(Section):
    """Publishing the learner's weights to the engines."""

    update_weights_interval: NonNegativeInt = 1
    """Rollouts between publications. 0: publish only before the first rollout."""
    update_weight_buffer_size: PositiveInt | None = None
    """Largest bucket of weights in bytes. A larger tensor is a bucket by itself. Without GPUs at most 30 MiB.

    None: 512 MiB, and 2 GiB from 30 billion parameters on. GPUs hold two buckets while weights are published.
    """
    update_weight_transport: Literal["auto", "distributed", "tensor", "disk"] = "auto"
    """Transport of weights: broadcast, shared memory, or files.

    auto: distributed; with colocate tensor. tensor needs a learner rank on the machine of each engine.
    """
    update_weight_disk_dir: Annotated[Path | None, Needs("update_weight_transport", equals="disk")] = None
    """Folder of the disk transport, visible to learner and engines. None: inside the run folder."""
    check_weight_update_equal: Annotated[bool, Conflicts(*ONE_HALF, because="learner and engines do not both run")] = (
        False
    )
    """After the first publication, overwrite the engines' weights, publish again, and compare."""
    parity_interval: NonNegativeInt = 1
    """Parity gate: rollouts between comparisons of learner and engine log-probs. The run ends if they differ. 0: never
    compare."""
    parity_mean_tolerance: Annotated[PositiveFloat | None, OF_PARITY_GATE, WITHOUT_STRICT] = None
    """Parity gate: maximum mean absolute difference between log-probs of learner and engines. None: 1e-4 in float32,
    0.1 in bfloat16, 5e-3 in float32 for mixtures of experts."""
    parity_max_tolerance: Annotated[PositiveFloat | None, OF_PARITY_GATE, WITHOUT_STRICT] = None
    """Parity gate: maximum absolute difference between learner and engines in one token's log-prob. None: 1e-3 in
    float32, 2 in bfloat16. In bfloat16 and for mixtures of experts, one token in 1,000 may exceed it."""
