"""Sections of the training side: what is optimized, by which optimizer, in which steps, on which ranks; how weights are
published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.options import NO_ENGINES, ONE_HALF, Conflicts, Needs
from slime_core.config.section import Count, CountOrZero, Fraction, Name, Positive, PositiveOrZero, Section

__all__ = [
    "PARITY_BOUNDS",
    "STRICT_PARITY_BOUNDS",
    "AlgorithmConfig",
    "CriticConfig",
    "LearnerConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "WeightsConfig",
]


OF_SEPARATE_CRITIC = Needs("critic_num_gpus", because="otherwise the critic shares the actor's ranks")


class AlgorithmConfig(Section):
    """What is optimized."""

    advantage_estimator: Name | None = None
    """Component that turns rewards into advantages. None: a plugin must preset it, as --plugin grpo does."""
    policy_loss: Name | None = None
    """Component that turns log-probabilities and advantages into the loss of each token. None: the estimator's own."""
    eps_clip: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far below 1 the importance ratio counts before it is clipped."""
    eps_clip_high: PositiveOrZero | None = None
    """How far above 1 the importance ratio counts before it is clipped. None: eps_clip."""
    eps_clip_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clip: bound of the loss, in multiples of a negative advantage. None: no bound."""
    use_kl_loss: bool = False
    """Add the divergence from the reference model to the loss; a second model is kept in memory."""
    kl_loss_coef: Annotated[PositiveOrZero, Needs("use_kl_loss")] = 0.0
    """Weight of that divergence. 0 with use_kl_loss: it is measured only."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the divergence. low_var_kl: k3, clamped.

    k1 measures and does not pull: on samples of the actor itself its gradient has expectation 0.
    """
    entropy_coef: PositiveOrZero = 0.0
    """Weight of the entropy bonus. 0: entropy is measured only."""
    use_unbiased_kl: Annotated[
        bool,
        Needs("use_kl_loss"),
        Conflicts("kl_loss_type", equals="k2", because="the mean of k2 is not the divergence"),
    ] = False
    """Weigh the divergence in the loss by the importance ratio of the actor to the old one, gradient included."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of a step. False: over each response, then over responses."""
    loss_token_divisor: Annotated[
        Positive | None, Conflicts("calculate_per_token_loss", because="each divides the loss in its own way")
    ] = None
    """Divide each response's loss by this many tokens, whatever its length (Dr. GRPO). None: by its own tokens."""
    normalize_advantages: bool = False
    """Whiten the advantages over all trained tokens of a rollout: mean 0, variance 1."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the reward of a later token. 1: none. For estimators that work token by token."""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of generalised advantage estimation, for estimators with a critic. 1: returns minus values."""
    kl_coef: Annotated[PositiveOrZero, Conflicts("kl_loss_coef", because="the divergence would count twice")] = 0.0
    """Weight of the divergence from the reference model that is taken off each token's reward. 0: none.

    For estimators that work token by token; above 0 a second model is kept in memory.
    """
    corrections: tuple[Name, ...] = ()
    """Components that weigh and mask tokens by how far the learner stands from the engine, in order. Empty: none."""
    use_rollout_logprobs: bool = False
    """The engine's log-probs are the old ones, of policy loss and estimators; the learner computes none of its own."""
    get_mismatch_metrics: bool = False
    """Measure how far learner and engine stand apart, in train/mismatch_... metrics."""
    true_on_policy_mode: Annotated[
        bool,
        Conflicts(
            "async_buffer_size",
            "use_rollout_logprobs",
            because="it trains on what the trained weights sampled, with a ratio of exactly 1",
        ),
        Conflicts("corrections", because="it leaves nothing to correct"),
        Conflicts("update_weights_interval", because="weights are published after every rollout"),
        Conflicts("parity_interval", because="learner and engine are compared at every rollout"),
        Conflicts("bf16", because="bfloat16 rounds a thousand times as much as it allows"),
        Conflicts(*NO_ENGINES, because="other weights sampled what is read"),
    ] = False
    """Train only on what the trained weights drew: one optimizer step a rollout, published after each, ratio exactly 1.

    Learner and engine must agree in float32 within 1e-5 nats on average and 1e-4 at most, at every rollout, or the run
    ends. Their kernels differ, so no agreement to the bit is promised.
    """
    use_opd: Annotated[
        bool,
        Needs("opd_teacher_load"),
        Conflicts("opd_kl_coef", equals=0, because="a weight of 0 leaves the teacher without effect"),
    ] = False
    """On-policy distillation: take the divergence from a teacher off each token's advantage; a model more in memory."""
    opd_kl_coef: Annotated[PositiveOrZero, Needs("use_opd")] = 1.0
    """Weight of that divergence."""
    opd_teacher_load: Annotated[Path | None, Needs("use_opd")] = None
    """Hugging Face folder of the teacher, of the policy's architecture and vocabulary. None: there is no teacher."""
    ref_update_interval: Annotated[
        Count | None, Needs("use_kl_loss", "kl_coef", because="only they keep a reference")
    ] = None
    """Copy the actor into the reference after every so many rollouts. None: the reference never changes."""
    keep_old_actor: Annotated[
        bool,
        Needs(
            "update_weights_interval", because="engines that are updated after every rollout serve the current weights"
        ),
        Conflicts("use_rollout_logprobs", because="each says where old log-probs come from"),
        Conflicts(
            "async_buffer_size",
            because="it keeps one copy of the weights; --use-rollout-logprobs has the log-probs of older ones",
        ),
        Conflicts(*NO_ENGINES, because="no engine is started"),
    ] = False
    """Old log-probs come from a kept copy of the weights that the engines served, not from the current ones."""


class OptimizerConfig(Section):
    """Adam and the learning-rate schedule."""

    lr: PositiveOrZero = 1e-6
    """Learning rate after warm-up."""
    min_lr: Annotated[PositiveOrZero, Needs("lr_decay_style")] = 0.0
    """Learning rate at the end of the decay; not used by a constant schedule."""
    lr_warmup_iters: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly from 0. 0: no warm-up."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], Needs("lr_wsd_decay_iters", when="WSD")
    ] = "constant"
    """How the learning rate falls after warm-up. WSD: it stays, and falls over the last lr_wsd_decay_iters steps.

    inverse-square-root: with the square root of lr_warmup_iters over the steps done, never below min_lr.
    """
    lr_decay_iters: Annotated[Count | None, Needs("lr_decay_style")] = None
    """Optimizer steps until min_lr is reached. None: all steps of the run."""
    lr_wsd_decay_iters: Annotated[Count | None, Needs("lr_decay_style", equals="WSD")] = None
    """Optimizer steps over which the learning rate falls at the end, with lr_decay_style WSD. None: there are none."""
    lr_wsd_decay_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"], Needs("lr_decay_style", equals="WSD")
    ] = "exponential"
    """How it falls over those steps."""
    weight_decay: PositiveOrZero = 0.1
    """Decoupled weight decay."""
    adam_beta1: Fraction = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: Fraction = 0.999
    """Decay of the mean of squared gradients."""
    adam_eps: Positive = 1e-8
    """Added to the denominator of the Adam update."""
    clip_grad: PositiveOrZero = 1.0
    """Largest global norm of the gradient; larger ones are scaled down. 0: no clipping."""
    lr_warmup_init: Annotated[PositiveOrZero, Needs("lr_warmup_iters")] = 0.0
    """Learning rate at which warm-up begins."""
    reset_optimizer_states: bool = False
    """Forget Adam's means and counts at the start of each rollout."""
    only_train_params_name_list: Annotated[tuple[Name, ...], Conflicts("freeze_params_name_list")] = ()
    """Train only weights whose Megatron name one of these regular expressions finds. Empty: all."""
    freeze_params_name_list: tuple[Name, ...] = ()
    """Train all weights but those whose Megatron name one of these regular expressions finds."""


class CriticConfig(Section):
    """The critic, for advantage estimators that read values; what is None is as for the actor."""

    critic_load: Path | None = None
    """Hugging Face folder with the critic's start weights: a causal language model of the actor's architecture.

    Its vocabulary head is read and left aside. None: the actor's weights.
    """
    critic_lr: PositiveOrZero | None = None
    """Learning rate of the critic after warm-up. None: lr."""
    critic_lr_warmup_iters: CountOrZero | None = None
    """Optimizer steps over which the critic's learning rate rises. None: lr_warmup_iters."""
    critic_weight_decay: PositiveOrZero | None = None
    """Decoupled weight decay of the critic. None: weight_decay."""
    critic_clip_grad: PositiveOrZero | None = None
    """Largest global norm of the critic's gradient. None: clip_grad."""
    value_clip: Positive | None = 0.2
    """How far a value may move from the one before the rollout's first step and still lower the critic's loss.

    In the unit of the rewards. None: as far as it likes.
    """
    num_critic_only_steps: CountOrZero = 0
    """Rollouts at the start that train the critic alone."""
    critic_num_gpus: Count | None = None
    """Devices of a critic that trains apart from the actor; on a CPU, processes. None: it shares the actor's ranks."""
    critic_tensor_model_parallel_size: Annotated[Count | None, OF_SEPARATE_CRITIC] = None
    """As tensor_model_parallel_size, of a critic apart. None: as the actor."""
    critic_sequence_parallel: Annotated[bool | None, OF_SEPARATE_CRITIC] = None
    """As sequence_parallel, of a critic apart. None: as the actor."""
    critic_pipeline_model_parallel_size: Annotated[Count | None, OF_SEPARATE_CRITIC] = None
    """As pipeline_model_parallel_size, of a critic apart. None: as the actor."""
    critic_context_parallel_size: Annotated[Count | None, OF_SEPARATE_CRITIC] = None
    """As context_parallel_size, of a critic apart. None: as the actor."""


class LearnerConfig(Section):
    """How a rollout is cut into optimizer steps and micro-batches."""

    global_batch_size: Count | None = None
    """Samples an optimizer step. None: rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout."""
    num_steps_per_rollout: Count | None = None
    """Optimizer steps a rollout. None: what global_batch_size implies, or 1."""
    max_tokens_per_gpu: Annotated[
        Count,
        Conflicts("micro_batch_size", unless="hard_token_budget", because="micro_batch_size counts samples instead"),
    ] = 8192
    """Most tokens of one packed micro-batch on one rank; one longer sample still goes alone."""
    hard_token_budget: bool = False
    """Refuse a run whose longest sequence does not fit max_tokens_per_gpu, instead of letting it go alone."""
    micro_batch_size: Count | None = None
    """Most samples of one micro-batch, however long they are; switches shared_prompts off.

    None: as many as max_tokens_per_gpu holds.
    """
    balance_by_flops: bool = False
    """Spread samples over ranks by the work of a forward pass, attention included; switches shared_prompts off.

    False: by tokens.
    """
    log_probs_chunk_size: Count | None = 1024
    """Response tokens whose probabilities over the vocabulary are in memory at once. None: all of a micro-batch."""
    shared_prompts: Literal["auto", "off"] = "auto"
    """Pack a prompt group so that its prompt stands once. auto: where it can and saves a twentieth of the tokens."""
    use_routing_replay: Annotated[
        bool, Conflicts("use_rollout_routing_replay", because="the engine's routes are for all passes")
    ] = False
    """A mixture's routes are recorded in the first pass over a rollout and used again by the later ones."""
    use_rollout_routing_replay: bool = False
    """A mixture's routes are those that the engine took; it returns them with each response."""


class ParallelConfig(Section):
    """How the learner's model is cut over its ranks; what is left of them is data parallel."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every matrix."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share the activations between matrices; for tensor sizes above 1."""
    pipeline_model_parallel_size: Count = 1
    """Ranks that share the stack of layers."""
    num_virtual_stages_per_pipeline_rank: Count = 1
    """Chunks of layers a pipeline rank holds, interleaved. 1: not interleaved."""
    context_parallel_size: Count = 1
    """Ranks that share every sequence."""
    expert_model_parallel_size: Count = 1
    """Ranks that share the experts of a mixture; they lie inside the data-parallel axis.

    A critic apart shares its experts alike where its ranks divide so, and else has all of them on each rank.
    """

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def row_multiple(self) -> int:
        """What the tokens of a packed row are padded to a multiple of, so that ranks can share it."""
        chunks = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return chunks * (self.tensor_model_parallel_size if self.sequence_parallel else 1)


PARITY_BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 2.0)}
"""dtype -> largest mean and largest single difference of log-probabilities that the parity gate accepts, in nats.
Measured with a margin by ``bench/parity.py``; the table is in ``docs/metrics.md``."""
STRICT_PARITY_BOUNDS = (1e-5, 1e-4)
"""The same in float32 with ``true_on_policy_mode``: two to four times the worst of that table, which different kernels
reach by rounding alone."""


class WeightsConfig(Section):
    """Publishing the learner's weights to the engines."""

    update_weights_interval: CountOrZero = 1
    """Publish after every so many rollouts. 0: only before the first."""
    update_weight_buffer_size: Count = 512 * 1024**2
    """Bytes of weights sent at once; one larger tensor still goes alone."""
    update_weight_transport: Literal["auto", "distributed", "tensor", "disk"] = "auto"
    """How weights travel: broadcast, shared memory, or files.

    auto: distributed; with colocate tensor on one machine, and disk on several.
    """
    update_weight_disk_dir: Annotated[Path | None, Needs("update_weight_transport", equals="disk")] = None
    """Folder for weights that travel as files; learner and engines must all see it. None: inside the run folder."""
    check_weight_update_equal: Annotated[bool, Conflicts(*ONE_HALF, because="learner and engines do not both run")] = (
        False
    )
    """After the first publication, spoil the engines' weights, publish again, and compare what they hold."""
    parity_interval: CountOrZero = 1
    """Compare log-probs of learner and engines every so many rollouts; stop if they differ. 0: never."""
    parity_mean_tolerance: Annotated[
        Positive | None, Conflicts("parity_interval", equals=0, because="nothing is compared")
    ] = None
    """Largest mean absolute difference of log-probs. None: 1e-4 in float32, 0.1 in bfloat16."""
    parity_max_tolerance: Annotated[
        Positive | None, Conflicts("parity_interval", equals=0, because="nothing is compared")
    ] = None
    """Largest absolute difference of one token's log-probs. None: 1e-3 in float32, 2 in bfloat16."""
