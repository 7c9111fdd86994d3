"""Every setting of a run, typed and frozen: one class a section, one field a setting.

A section is a TOML table of the same name. The flag of a field is its name with dashes (``lr_warmup_iters`` is
``--lr-warmup-iters``); names are unique across sections, so flags need no prefix. Fields keep slime's names, and
Megatron's where slime took them from there.

A field says its unit and what None and 0 mean in its description, which is also its line in ``slime run --help``.
There is no field for a feature that does not exist. ``[megatron]`` and ``[sglang]`` hold what a run says to the engines
under their own names.

Example, as a file and as flags::

    [optimizer]
    lr = 1e-6                         --lr 1e-6
    [eval]
    eval_prompt_data = [["aime", "aime.jsonl"]]      --eval-prompt-data aime aime.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.custom import CustomConfig
from slime_core.config.megatron import MegatronConfig
from slime_core.config.section import Once, Section
from slime_core.config.sglang import SGLangConfig

__all__ = [
    "PARITY_BOUNDS",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CustomConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "JobConfig",
    "LearnerConfig",
    "MegatronConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "RunConfig",
    "SGLangConfig",
    "Section",
    "WatchConfig",
    "WeightsConfig",
]

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
All = Annotated[int, Field(ge=-1, le=-1)]
Share = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


PARITY_BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 2.0)}
"""dtype -> largest mean and largest single difference of log-probabilities that the parity gate accepts, in nats.
Measured with a margin by ``bench/parity.py``; the table is in ``docs/metrics.md``."""


class ModelConfig(Section):
    """The weights a run starts from."""

    hf_checkpoint: Path | None = None
    """Hugging Face folder: start weights, config.json, tokenizer. None: the embedded arithmetic model."""
    ref_load: Path | None = None
    """Hugging Face folder of the reference model that the KL term compares with. None: the start weights."""
    load: Path | None = None
    """Run folder or checkpoint to resume from; optimizer, step and data cursor too. None: start at step 0.

    Without --config, the settings are those of that run. Such a folder can hold pickled parts, which run code when they
    are read: resume only from checkpoints of people you trust.
    """
    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps float32 masters. False: float32."""
    trust_remote_code: bool = False
    """Let transformers run Python code that the checkpoint folder carries."""


class ClusterConfig(Section):
    """Which processes run where."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where learner and engines compute. auto: cuda if the cluster has GPUs and this torch is a CUDA build; or cpu."""
    actor_num_nodes: Count = 1
    """Machines that train."""
    actor_num_gpus_per_node: Count = 1
    """Learner ranks a machine, one GPU each; on a CPU, processes."""
    rollout_num_gpus: Count = 1
    """GPUs that generate, over all engines; on a CPU, one a server process."""
    rollout_num_gpus_per_engine: Count = 1
    """GPUs one engine spans (its tensor parallel size); on a CPU, its processes."""
    colocate: bool = False
    """Learner and engines take turns on the same devices; rollout_num_gpus may then not exceed the learner's."""
    ray_address: Name | None = None
    """Ray cluster to join: "auto" or an address. None: start a local one and stop it at the end."""


class DataConfig(Section):
    """Where prompts come from."""

    prompt_data: Path | None = None
    """JSON Lines file of prompts. None: the embedded arithmetic problems."""
    input_key: Name = "prompt"
    """Field of a row with the prompt: text, or chat messages."""
    label_key: Name | None = "label"
    """Field of a row with the ground truth for the reward. None: rows have none."""
    metadata_key: Name = "metadata"
    """Field of a row with an object that becomes the sample's metadata; rows may lack it."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a text prompt becomes one user message."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew each epoch, by the seed. False: file order."""
    rollout_max_prompt_len: Count | None = None
    """Leave out prompts longer than this many tokens. None: keep all."""
    data_source: Name = "prompts"
    """Component that hands out prompts; of kind data_source."""


class RolloutConfig(Section):
    """How responses are generated and rewarded."""

    num_rollout: Count = 200
    """Rollouts of the run; each is generated, trained on and published once."""
    rollout_batch_size: Count = 32
    """Prompts a rollout."""
    n_samples_per_prompt: Count = 8
    """Responses a prompt; together they are its group."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature; the learner divides its logits by the same number."""
    rollout_top_p: Share = 1.0
    """Nucleus sampling: keep the likeliest tokens up to this probability mass. 1: all."""
    rollout_top_k: All | Count = -1
    """Keep the k likeliest tokens. -1: all."""
    rollout_max_response_len: Count = 1024
    """Longest response in tokens; longer ones are cut and marked truncated."""
    rollout_stop: tuple[Name, ...] = ()
    """Texts that end a response. Empty: only the end-of-sequence token does."""
    rollout_stop_token_ids: tuple[CountOrZero, ...] = ()
    """Token ids that end a response, besides the tokenizer's end-of-sequence token."""
    generate_function: Name = "single_turn"
    """Component that turns a prompt into a response; of kind generate_function."""
    rm_type: Name = "exact_match"
    """Component that rewards responses; of kind reward_model."""
    reward_key: Name | None = None
    """Which of a reward model's named numbers trains. None: rewards are plain numbers."""
    sample_transforms: tuple[Name, ...] = ()
    """Components that keep, drop, mask or shape finished groups, in this order; of kind sample_transform. Empty: none.

    Dropped groups are counted by reason and replaced by groups of other prompts. Evaluations are not transformed.
    """
    rollout_max_refills: CountOrZero = 100
    """Rounds of other prompts that may replace dropped groups before the run ends. 0: train on what is kept."""
    reward_num_workers: Count = 2
    """Processes that score responses; each works on several calls that wait for something at once."""
    reward_timeout_s: Positive = 30.0
    """Seconds that scoring may take; beyond, its process is ended and only the sample in question is lost."""
    reward_memory_gib: Positive = 4.0
    """Memory of one such process in GiB; beyond, the same happens."""
    sglang_server_concurrency: Count = 64
    """Requests in flight an engine; the rest wait in the sampler."""
    rollout_request_timeout_s: Positive = 300.0
    """Seconds after which one generation request counts as failed."""


class EvalConfig(Section):
    """Measuring on held-out prompts."""

    eval_prompt_data: tuple[tuple[Name, Path], ...] = ()
    """Named files of prompts to evaluate on: NAME FILE. Empty: no evaluation."""
    eval_interval: Count | None = None
    """Evaluate after every so many rollouts, and at the end. None: only before the first."""
    skip_eval_before_train: bool = False
    """Do not evaluate the start weights."""
    n_samples_per_eval_prompt: Count = 1
    """Responses an evaluation prompt; the score is their mean."""
    eval_temperature: PositiveOrZero = 0.0
    """Sampling temperature of evaluation. 0: greedy."""
    eval_max_response_len: Count | None = None
    """Longest evaluation response in tokens. None: rollout_max_response_len."""


class AlgorithmConfig(Section):
    """What is optimized."""

    advantage_estimator: Name | None = None
    """Component that turns rewards into advantages. None: a plugin must preset it, as --plugin grpo does."""
    eps_clip: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far below 1 the importance ratio counts before it is clipped."""
    eps_clip_high: PositiveOrZero | None = None
    """How far above 1 the importance ratio counts before it is clipped. None: eps_clip."""
    eps_clip_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clip: bound of the loss, in multiples of a negative advantage. None: no bound."""
    use_kl_loss: bool = False
    """Add the divergence from the reference model to the loss; a second model is kept in memory."""
    kl_loss_coef: PositiveOrZero = 0.0
    """Weight of that divergence. 0 with use_kl_loss: it is measured only."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the divergence. low_var_kl: k3, clamped.

    k1 measures and does not pull: on samples of the actor itself its gradient has expectation 0.
    """
    entropy_coef: PositiveOrZero = 0.0
    """Weight of the entropy bonus. 0: entropy is measured only."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of a step. False: over each response, then over responses."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the reward of a later token. 1: none. For estimators that work token by token."""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of generalised advantage estimation, for estimators with a critic. 1: returns minus values."""
    kl_coef: PositiveOrZero = 0.0
    """Weight of the divergence from the reference model that is taken off each token's reward. 0: none.

    For estimators that work token by token; above 0 a second model is kept in memory.
    """
    corrections: tuple[Name, ...] = ()
    """Components that weigh and mask tokens by how far the learner stands from the engine, in order. Empty: none."""
    tis_clip: Positive = 2.0
    """Largest importance ratio of learner to engine that a correction lets count."""
    tis_clip_low: PositiveOrZero = 0.0
    """Smallest importance ratio of learner to engine that a correction lets count."""


class OptimizerConfig(Section):
    """Adam and the learning-rate schedule."""

    lr: PositiveOrZero = 1e-6
    """Learning rate after warm-up."""
    min_lr: PositiveOrZero = 0.0
    """Learning rate at the end of the decay; not used by a constant schedule."""
    lr_warmup_iters: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly from 0. 0: no warm-up."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up."""
    lr_decay_iters: Count | None = None
    """Optimizer steps until min_lr is reached. None: all steps of the run."""
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


class LearnerConfig(Section):
    """How a rollout is cut into optimizer steps and micro-batches."""

    global_batch_size: Count | None = None
    """Samples an optimizer step. None: rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout."""
    num_steps_per_rollout: Count | None = None
    """Optimizer steps a rollout. None: what global_batch_size implies, or 1."""
    max_tokens_per_gpu: Count = 8192
    """Most tokens of one packed micro-batch on one rank; one longer sample still goes alone."""


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
    """Ranks that share the experts of a mixture; they lie inside the data-parallel axis."""

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


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
    update_weight_disk_dir: Path | None = None
    """Folder for weights that travel as files; learner and engines must all see it. None: inside the run folder."""
    check_weight_update_equal: bool = False
    """After the first publication, spoil the engines' weights, publish again, and compare what they hold."""
    parity_interval: CountOrZero = 1
    """Compare log-probs of learner and engines every so many rollouts; stop if they differ. 0: never."""
    parity_mean_tolerance: Positive | None = None
    """Largest mean absolute difference of log-probs. None: 1e-4 in float32, 0.1 in bfloat16."""
    parity_max_tolerance: Positive | None = None
    """Largest absolute difference of one token's log-probs. None: 1e-3 in float32, 2 in bfloat16."""


class CheckpointConfig(Section):
    """Saving; a checkpoint is always written at the end of a run."""

    save_interval: Count | None = None
    """Save after every so many rollouts. None: only at the end."""
    save_hf: bool = True
    """Also write each checkpoint's weights as a Hugging Face folder."""


class EngineConfig(Section):
    """The SGLang servers."""

    sglang_mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of an engine's memory for weights and KV cache. None: SGLang decides."""
    sglang_context_length: Count | None = None
    """Longest prompt plus response in tokens. None: what the model's config.json says."""
    engine_start_timeout_s: Positive = 300.0
    """Seconds until a starting engine must answer."""


class WatchConfig(Section):
    """Limits on waiting, so that nothing hangs silently."""

    wait_warn_s: Positive = 60.0
    """Seconds after which a wait is reported, with who waits for what."""
    wait_fail_s: Positive = 1800.0
    """Seconds after which a wait ends the run."""


class JobConfig(Section):
    """The run itself."""

    output_dir: Path | None = None
    """Folder for metrics, config and checkpoints. None: outputs/JOB-TIME in the working directory."""
    job_name: Name = "run"
    """Name of the run in its folder and its records."""
    seed: CountOrZero = 1234
    """Seed of initialisation, data order and sampling."""
    plugins: tuple[Name, ...] = ()
    """Plugins of the run, by name, module or .py file; named by flag, they replace those of the file."""
    no_plugins: tuple[Name, ...] = ()
    """Plugins that the run goes without, though the file names them, or another plugin or the model needs them."""
    locked: bool = False
    """Refuse every plugin that is not exactly as slime.lock says, before it is imported."""
    lock_file: Path | None = None
    """The lock that --locked reads and slime plugins lock writes; naming it means --locked. None: slime.lock here."""
    allow_plugin_change: Annotated[bool, Once()] = False
    """Resume although plugins or slime have changed since the checkpoint; recorded in plugins.json."""
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    """What is printed while running. auto: live on a terminal, else one line a step."""


class RunConfig(Section):
    """All settings of a run; hashable by value, picklable, and never changed after validation."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    watch: WatchConfig = Field(default_factory=WatchConfig)
    custom: CustomConfig = Field(default_factory=CustomConfig)
    run: JobConfig = Field(default_factory=JobConfig)

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout: prompts times responses a prompt."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of one rollout, from whichever of the two settings was given; 1 if neither was."""
        if self.learner.num_steps_per_rollout is not None:
            return self.learner.num_steps_per_rollout
        return max(1, self.samples_per_rollout // (self.learner.global_batch_size or self.samples_per_rollout))

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step: ``global_batch_size``, or what the rollout gives."""
        return self.learner.global_batch_size or self.samples_per_rollout // self.steps_per_rollout

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.eval.eval_prompt_data or self.custom.eval_function_path)

    @property
    def num_learner_ranks(self) -> int:
        """Processes that train."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def transport(self) -> Literal["distributed", "tensor", "disk"]:
        """How weights travel, ``auto`` resolved."""
        chosen = self.weights.update_weight_transport
        if chosen != "auto":
            return chosen
        if not self.cluster.colocate:
            return "distributed"
        return "tensor" if self.cluster.actor_num_nodes == 1 else "disk"

    @property
    def num_data_ranks(self) -> int:
        """Copies of the model that train, each on samples of its own."""
        return self.num_learner_ranks // self.parallel.model_size

    @property
    def num_engines(self) -> int:
        """Inference servers."""
        return self.cluster.rollout_num_gpus // self.cluster.rollout_num_gpus_per_engine
