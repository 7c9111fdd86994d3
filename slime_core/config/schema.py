"""All settings of a run: one class for each section, one field for each setting; and values computed from several
settings, such as the resolved evaluation sets.

This file has the sections ``[run]``, ``[model]``, ``[cluster]``, ``[checkpoint]``, ``[watch]`` and ``[debug]``, and the
defaults of the built-in demo. The other classes are in ``sampling``, ``learning`` and ``engines``.

A section is a TOML table of the same name. The flag of a field is its name with dashes (``lr_warmup_iters`` is
``--lr-warmup-iters``); names are unique across sections, so flags need no prefix. Fields keep slime's names, and
Megatron's where slime took them from there.

The docstring under a field gives its unit and the meaning of None and 0; ``slime run --help`` prints it.
``[megatron]`` and ``[sglang]`` hold flags of Megatron and SGLang under their names there.

Example, as a file and as flags::

    [optimizer]
    lr = 1e-6                         --lr 1e-6
    [eval]
    eval_prompt_data = [["aime", "aime.jsonl"]]      --eval-prompt-data aime aime.jsonl
    [[eval.eval_datasets]]
    name = "gpqa"
    path = "gpqa.jsonl"                              --eval-datasets "name = 'gpqa', path = 'gpqa.jsonl'"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, PrivateAttr

from slime_core.config.engines import EngineConfig, EngineGroup, MegatronConfig, SGLangConfig
from slime_core.config.learning import (
    OF_REFERENCE,
    AlgorithmConfig,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    ParallelConfig,
    WeightsConfig,
)
from slime_core.config.options import NO_ENGINES, AtMost, Conflicts, Needs, Once, Part, PluginSettings
from slime_core.config.sampling import DataConfig, EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.section import (
    FractionAboveZero,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    rejected,
)

T = TypeVar("T")

ARITHMETIC: Final = Path(__file__).resolve().parent.parent / "builtin" / "arithmetic"
"""Folder of the built-in demo: ``model/`` is a Hugging Face folder, ``data/`` holds the prompt files."""

OF_THE_MODEL: Final[dict[str, object]] = {
    "lr": 3e-4,
    "lr_decay_style": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
    "lr_warmup_iters": 5,
    "rollout_max_response_len": 8,
    "apply_chat_template": True,
}
"""Setting -> default of runs with the built-in model, whatever their prompts."""

DEMO_DEFAULTS: Final[dict[str, object]] = {
    **OF_THE_MODEL,
    "num_rollout": 80,
    "eval_interval": 20,
    "eval_prompt_data": (("arithmetic", ARITHMETIC / "data" / "held_out.jsonl"),),
}
"""Setting -> default of runs with the built-in model and the built-in prompts."""

OF_EVALUATIONS: Final = frozenset({"eval_interval", "eval_prompt_data"})
"""Settings that turn evaluations on."""


def _folder_name(name: str) -> str:
    if len(name.encode()) > 200 or not re.fullmatch(r"[\w][\w .+=,@-]*", name):
        shown = name if len(name) <= 60 else f"{name[:60]}..."
        raise rejected(
            f"found {shown!r}; accepted: a folder name of letters, digits, spaces and . _ + = , @ -, at most 200 "
            "bytes. For a path use --output-dir"
        )
    return name


WHERE_TRAINED = Conflicts("debug_rollout_only", because="nothing is trained")


class JobConfig(Section):
    """The run itself."""

    output_dir: Path | None = None
    """Folder for metrics, config and checkpoints. None: outputs/JOB-TIME in the working directory."""
    job_name: Annotated[Name, AfterValidator(_folder_name)] = "run"
    """Name of the run in its folder and its records."""
    seed: NonNegativeInt = 1234
    """Seed of initialisation, data order and sampling."""
    plugins: tuple[Name, ...] = ()
    """Plugins of the run, by name, module or .py file. Flags replace the list of the file."""
    no_plugins: tuple[Name, ...] = ()
    """Plugins to leave out, even if the file names them or the run uses their components."""
    allow_plugin_change: Annotated[bool, Once()] = False
    """Resume although plugins or slime have changed since the checkpoint."""
    max_restarts: NonNegativeInt = 3
    """Restarts from the newest checkpoint after a process, a node or Ray died, without a new checkpoint in between. 0:
    the first death ends the run."""
    num_token_samples: NonNegativeInt = 8
    """Rows at the start of each file in samples/ that also hold token ids, loss mask and log-probs."""
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    """Progress output. lines: one line a step. live: the same above a bar. auto: live on a terminal, or lines."""


class ModelConfig(Section):
    """The weights a run starts from."""

    hf_checkpoint: Path | None = None
    """Hugging Face folder: start weights, config.json, tokenizer. None: the built-in arithmetic model."""
    model_impl: Name = "auto"
    """Whose layers the learner's model has: megatron, or another implementation that a plugin offers, such as
    transformers. auto: those of a model spec that names the checkpoint's architecture, else those of one for all."""
    initial_megatron_checkpoint: Annotated[
        Path | None,
        Conflicts(
            "debug_rollout_only",
            because="no learner loads weights; give engines the weights with --hf-checkpoint",
        ),
    ] = None
    """torch_dist folder with the start weights, written by slime convert, a run or Megatron. None: hf_checkpoint."""
    ref_load: Annotated[Path | None, OF_REFERENCE] = None
    """Hugging Face or torch_dist folder of the reference model for the KL term. None: the start weights."""
    load: Annotated[
        Path | None,
        Conflicts(
            "debug_rollout_only",
            because="no learner resumes; give engines the weights with --hf-checkpoint CHECKPOINT/hf",
        ),
    ] = None
    """Run folder or checkpoint to resume from, with optimizer, step and data cursor. None: start at step 0.

    Without --config, the settings of that run apply. Code that the run folder names is run only if the command line
    names it again.
    """
    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps float32 masters. False: float32.

    Not given: bfloat16 on GPUs if dtype or torch_dtype in the checkpoint's config.json is bfloat16, otherwise float32.
    """
    trust_remote_code: bool = False
    """Let transformers run Python code from the checkpoint folder."""


class ClusterConfig(Section):
    """Devices and nodes of the run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of learner and engines. auto: cuda if a node of the joined Ray cluster has a GPU; without a cluster, if
    this machine has one and torch is a CUDA build; otherwise cpu."""
    actor_num_nodes: PositiveInt = 1
    """Nodes that train."""
    actor_num_gpus_per_node: PositiveInt = 1
    """Learner ranks per node, one GPU each; on a CPU, processes."""
    rollout_num_gpus: PositiveInt = 1
    """GPUs of all engines together; on a CPU, server processes.

    Not given: enough for one engine; with colocate, all devices of the learner.
    """
    rollout_num_gpus_per_engine: PositiveInt = 1
    """GPUs per engine (its tensor parallel size); on a CPU, processes."""
    colocate: Annotated[
        bool,
        Conflicts(
            "update_weights_interval", because="colocated engines release their weights while the learner trains"
        ),
    ] = False
    """Learner and engines share devices in turns; rollout_num_gpus must not exceed the learner's."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB. A run that needs more is refused. None: as nvidia-smi reports it on this machine.

    If it is unknown, no run is refused, and slime check prints the memory that a GPU needs.
    """
    ray_address: Name | None = None
    """Ray cluster to join: "auto" or an address. None: start a local one and stop it at the end."""


class CheckpointConfig(Section):
    """Saving; a checkpoint is always written at the end of a run."""

    save_interval: Annotated[PositiveInt | None, WHERE_TRAINED] = None
    """Rollouts between checkpoints. None: save at the end, at SIGTERM, and by save_interval_minutes."""
    save_interval_minutes: PositiveFloat | None = 30.0
    """Minutes after the last checkpoint until an additional one, which the next checkpoint replaces. It is written when
    a rollout ends. None: no additional ones."""
    save_keep_last: Annotated[
        PositiveInt | None, Needs("save_interval", because="all other checkpoints are replaced")
    ] = None
    """Newest checkpoints of save_interval to keep on disk. None: all."""
    save_keep_every: Annotated[PositiveInt | None, Needs("save_keep_last", because="otherwise all stay")] = None
    """Keep every checkpoint at a multiple of this many rollouts. None: keep only those of save_keep_last."""
    async_save: bool = True
    """Copy the state to host memory and write it while training continues. The next save and the end of the run wait
    for the files. False: training waits for the files."""
    save_hf: bool = True
    """Also write each checkpoint's weights as a Hugging Face folder."""


class WatchConfig(Section):
    """Time limits of waits for other processes."""

    wait_warn_s: Annotated[PositiveFloat, AtMost("wait_fail_s")] = 60.0
    """Seconds after which a wait for other processes is reported, with their names."""
    wait_fail_s: PositiveFloat = 1800.0
    """Seconds after which a wait for other processes ends the run."""


def _template(*placeholders: str) -> AfterValidator:
    """Return a validator of paths that contain ``placeholders`` for numbers."""

    def check(path: Path) -> Path:
        unknown = sorted(set(re.findall(r"\{[^{}]*\}", f"{path}")) - set(placeholders))
        if unknown:
            raise rejected(
                f"found {path}, but {' and '.join(unknown)} has no meaning here; accepted: {' and '.join(placeholders)}"
            )
        return path

    return AfterValidator(check)


RolloutPath = Annotated[Path, _template("{rollout_id}")]
TrainDataPath = Annotated[Path, _template("{rollout_id}", "{rank}")]


class DebugConfig(Section):
    """Runs that only generate or only train, and rollouts on disk."""

    debug_rollout_only: Annotated[
        bool, Conflicts(*NO_ENGINES, because="neither learner nor engines would be started")
    ] = False
    """Generate and score rollouts without a learner."""
    debug_train_only: Annotated[bool, Needs("load_debug_rollout_data")] = False
    """Train on saved rollouts without engines. Needs load_debug_rollout_data."""
    save_debug_rollout_data: Annotated[RolloutPath | None, Conflicts(*NO_ENGINES, because="nothing is generated")] = (
        None
    )
    """JSON Lines file for the samples of each rollout; {rollout_id} is replaced by its number. None: not written."""
    load_debug_rollout_data: RolloutPath | None = None
    """File with the samples of each rollout, written by save_debug_rollout_data. Implies debug_train_only.

    None: generate rollouts.
    """
    load_debug_rollout_data_subsample: Annotated[FractionAboveZero | None, Needs("load_debug_rollout_data")] = None
    """Fraction of each loaded rollout's prompt groups to train on. None: all."""
    save_debug_train_data: Annotated[TrainDataPath | None, WHERE_TRAINED] = None
    """safetensors file for the training data of each learner rank; {rollout_id} and {rank} are replaced by numbers.

    None: not written.
    """

    @property
    def trains(self) -> bool:
        """Whether a learner is started."""
        return not self.debug_rollout_only

    @property
    def generates(self) -> bool:
        """Whether engines are started. Otherwise rollouts are read from files."""
        return not self.debug_train_only and self.load_debug_rollout_data is None


class RunConfig(Section):
    """All settings of a run. Hashable, picklable and immutable."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    watch: WatchConfig = Field(default_factory=WatchConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
    run: JobConfig = Field(default_factory=JobConfig)
    _of_plugins: PluginSettings = PrivateAttr(default_factory=PluginSettings)

    @property
    def is_deterministic(self) -> bool:
        """Whether the learner uses deterministic operations only."""
        requested = self.learner.deterministic_mode
        return not self.debug.generates if requested is None else requested

    @property
    def of_plugins(self) -> PluginSettings:
        """The part of the plugins' options that the core reads."""
        return self._of_plugins

    def with_plugins(self, settings: PluginSettings) -> Self:
        """Return a copy with ``settings`` as the options of plugins."""
        copy = self.model_copy()
        copy._of_plugins = settings
        return copy

    def provided(self, part: Part) -> tuple[str, ...]:
        """Return the options of plugins that provide ``part``, such as ``custom_rm_path = mine.py``."""
        return self._of_plugins.provided.get(part, ())

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of one rollout; 1 if neither of the two settings is given."""
        if self.learner.num_steps_per_rollout is not None:
            return self.learner.num_steps_per_rollout
        return max(1, self.samples_per_rollout // (self.learner.global_batch_size or self.samples_per_rollout))

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step."""
        return self.learner.global_batch_size or self.samples_per_rollout // self.steps_per_rollout

    @property
    def evaluates(self) -> bool:
        """Whether the run has evaluation sets, or a plugin that evaluates."""
        return bool(self.eval.files or self.provided("evaluation"))

    @property
    def num_learner_ranks(self) -> int:
        """Processes that train."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def num_started_ranks(self) -> int:
        """Learner processes that the run starts; 0 if it only generates."""
        return self.num_learner_ranks if self.debug.trains else 0

    @property
    def num_critic_ranks(self) -> int:
        """Processes of a separate critic; 0 if it shares those of the learner, or there is no critic."""
        return self.critic.critic_num_gpus or 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """The layout of a separate critic: the layout of the actor, changed by the settings of the critic.

        Experts are divided as in the actor if the critic's data- and context-parallel ranks allow it. Otherwise every
        rank has all experts.
        """
        critic, actor = self.critic, self.parallel
        tensor = critic.critic_tensor_model_parallel_size or actor.tensor_model_parallel_size
        pipeline = critic.critic_pipeline_model_parallel_size or actor.pipeline_model_parallel_size
        sequence, stages = critic.critic_sequence_parallel, actor.num_virtual_stages_per_pipeline_rank
        experts = actor.expert_model_parallel_size * (actor.expert_tensor_parallel_size or tensor)
        shares = self.num_critic_ranks // pipeline % experts == 0
        return actor.model_copy(
            update={
                "tensor_model_parallel_size": tensor,
                "sequence_parallel": actor.sequence_parallel and tensor > 1 if sequence is None else sequence,
                "pipeline_model_parallel_size": pipeline,
                "num_virtual_stages_per_pipeline_rank": stages if pipeline > 1 else 1,
                "context_parallel_size": critic.critic_context_parallel_size or actor.context_parallel_size,
                "expert_model_parallel_size": actor.expert_model_parallel_size if shares else 1,
                "expert_tensor_parallel_size": actor.expert_tensor_parallel_size if shares else None,
            }
        )

    @property
    def transport(self) -> Literal["distributed", "tensor", "disk"]:
        """The transport of weights, with ``auto`` resolved."""
        chosen = self.weights.update_weight_transport
        if chosen != "auto":
            return chosen
        return "tensor" if self.cluster.colocate else "distributed"

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel copies of the model in the learner."""
        return self.num_learner_ranks // self.parallel.model_size

    @property
    def num_engines(self) -> int:
        """Inference servers of the policy, started by the run or by the user; 0 if rollouts are read from files."""
        if not self.debug.generates:
            return 0
        external = len(self.engine.rollout_external_engine_addrs)
        return external or sum(group.num_engines for group in self.engine_groups)

    @property
    def engine_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of the policy's engines that the run starts, with their sizes."""
        if not self.debug.generates or self.engine.rollout_external_engine_addrs:
            return ()
        requested = self.cluster
        return self.engine.groups(
            num_gpus=requested.rollout_num_gpus, num_gpus_per_engine=requested.rollout_num_gpus_per_engine
        )

    @property
    def restarts_engines(self) -> bool:
        """Whether dead engines and routers are started again."""
        chosen = self.engine.use_fault_tolerance
        restartable = not (self.cluster.colocate or self.learner.use_rollout_routing_replay)
        return sum(group.num_engines for group in self.engine_groups) > 1 and restartable if chosen is None else chosen

    @property
    def num_rollout_gpus(self) -> int:
        """GPUs of the policy's engines, started by the run or by the user."""
        external = len(self.engine.rollout_external_engine_addrs) * self.cluster.rollout_num_gpus_per_engine
        return external or self.cluster.rollout_num_gpus

    @property
    def splits_prefill(self) -> bool:
        """Whether separate engines prefill and decode."""
        return any(group.worker_type != "regular" for group in self.engine_groups)

    @property
    def eval_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of the engines that only evaluate."""
        if not self.debug.generates:
            return ()
        return self.eval.groups(num_gpus_per_engine=self.cluster.rollout_num_gpus_per_engine)

    @property
    def auxiliary_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of the engines of auxiliary models, followed by the engines that only evaluate."""
        if not self.debug.generates:
            return ()
        return (*(group for model in self.engine.engine_models for group in model.groups), *self.eval_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One resolved evaluation set; :class:`~slime_core.config.sampling.EvalDataset` describes the fields.

    ``label_key``, ``reward_key``, ``repetition_penalty``, ``model`` and the two limits are None if unset.
    """

    name: str
    path: Path
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    repetition_penalty: float | None
    max_prompt_len: int | None
    max_context_len: int | None
    input_key: str
    label_key: str | None
    metadata_key: str
    apply_chat_template: bool
    generate_function: str
    rm_type: str
    reward_key: str | None
    pass_threshold: float
    model: str | None

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that is kept; None if there is no limit."""
        before_a_token = None if self.max_context_len is None else self.max_context_len - 1
        return min((limit for limit in (self.max_prompt_len, before_a_token) if limit is not None), default=None)


def eval_sets(config: RunConfig) -> tuple[EvalSet, ...]:
    """Return the sets of ``eval_prompt_data``, then those of ``eval_datasets``."""
    pairs = (EvalDataset(name=name, path=path) for name, path in config.eval.eval_prompt_data)
    return tuple(_resolved(dataset, config) for dataset in (*pairs, *config.eval.eval_datasets))


def _resolved(dataset: EvalDataset, config: RunConfig) -> EvalSet:
    """Take each setting from the set, otherwise from the ``eval_*`` setting, otherwise from the one of training."""
    of_all, rollout, data = config.eval, config.rollout, config.data
    temperature = _first(dataset.temperature, of_all.eval_temperature)
    greedy = temperature == 0  # top_p and top_k have nothing to choose from
    return EvalSet(
        name=dataset.name,
        path=dataset.path,
        n_samples_per_eval_prompt=_first(dataset.n_samples_per_eval_prompt, of_all.n_samples_per_eval_prompt),
        temperature=temperature,
        top_p=1.0 if greedy else _first(dataset.top_p, of_all.eval_top_p, rollout.rollout_top_p),
        top_k=-1 if greedy else _first(dataset.top_k, of_all.eval_top_k, rollout.rollout_top_k),
        max_response_len=_first(
            dataset.max_response_len, of_all.eval_max_response_len, rollout.rollout_max_response_len
        ),
        min_new_tokens=_first(dataset.min_new_tokens, of_all.eval_min_new_tokens),
        stop=_first(dataset.stop, rollout.rollout_stop),
        stop_token_ids=_first(dataset.stop_token_ids, rollout.rollout_stop_token_ids),
        repetition_penalty=dataset.repetition_penalty,
        max_prompt_len=dataset.max_prompt_len or of_all.eval_max_prompt_len,
        max_context_len=dataset.max_context_len or of_all.eval_max_context_len,
        input_key=dataset.input_key or of_all.eval_input_key or data.input_key,
        label_key=_unless_none(dataset.label_key or of_all.eval_label_key or data.label_key),
        metadata_key=dataset.metadata_key or data.metadata_key,
        apply_chat_template=_first(dataset.apply_chat_template, data.apply_chat_template),
        generate_function=dataset.generate_function or rollout.generate_function,
        rm_type=dataset.rm_type or rollout.rm_type,
        reward_key=_unless_none(dataset.reward_key or of_all.eval_reward_key or rollout.reward_key),
        pass_threshold=_first(dataset.pass_threshold, of_all.eval_pass_threshold),
        model=dataset.model,
    )


def _first(*values: T | None) -> T:
    """Return the first value that is given; the last one always is."""
    return next(value for value in values if value is not None)


def _unless_none(name: str | None) -> str | None:
    """Return None for the text ``none``, with which a set leaves out a key of training."""
    return None if name == "none" else name
