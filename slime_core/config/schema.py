"""Every setting of a run, typed and frozen: one class per section, one field per setting; and values that follow from
several settings, such as each evaluation set with its settings resolved.

This file has the sections ``[run]``, ``[model]``, ``[cluster]``, ``[checkpoint]``, ``[watch]`` and ``[debug]``, and the
defaults of the built-in demo; the other classes are in ``sampling``, ``learning`` and ``engines``.

A section is a TOML table of the same name. The flag of a field is its name with dashes (``lr_warmup_iters`` is
``--lr-warmup-iters``); names are unique across sections, so flags need no prefix. Fields keep slime's names, and
Megatron's where slime took them from there.

A field says its unit and what None and 0 mean in its description, which is also its line in ``slime run --help``.
There is no field for a feature that does not exist. ``[megatron]`` and ``[sglang]`` hold settings of the
engines under the engines' names.

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
"""Setting to value; the unit of each is that of its field. They hold for the built-in model with any prompts."""

DEMO_DEFAULTS: Final[dict[str, object]] = {
    **OF_THE_MODEL,
    "num_rollout": 80,
    "eval_interval": 20,
    "eval_prompt_data": (("arithmetic", ARITHMETIC / "data" / "held_out.jsonl"),),
}
"""Defaults of the built-in model with its own task."""

OF_EVALUATIONS: Final = frozenset({"eval_interval", "eval_prompt_data"})
"""Settings that ask for evaluations."""


def _folder_name(name: str) -> str:
    if len(name.encode()) > 200 or not re.fullmatch(r"[\w][\w .+=,@-]*", name):
        shown = name if len(name) <= 60 else f"{name[:60]}..."
        raise rejected(
            f"found {shown!r}; accepted: the name of a folder, of letters, digits, spaces and . _ + = , @ -, at most "
            "200 bytes; where the folder is, --output-dir says"
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
    """Plugins of the run, by name, module or .py file; named by flag, they replace those of the file."""
    no_plugins: tuple[Name, ...] = ()
    """Plugins to leave out, even if the file names them or the model needs them."""
    allow_plugin_change: Annotated[bool, Once()] = False
    """Resume although plugins or slime have changed since the checkpoint."""
    max_restarts: NonNegativeInt = 3
    """How often the run restarts from its newest checkpoint after a process, a node or Ray died; a new checkpoint
    resets the count. 0: it ends."""
    num_token_samples: NonNegativeInt = 8
    """How many rows of each file in samples/, the first ones, also hold token ids, loss mask and log-probs."""
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    """What is printed while running: one line a step; live: above a bar. auto: live on a terminal, else lines."""


class ModelConfig(Section):
    """The weights a run starts from."""

    hf_checkpoint: Path | None = None
    """Hugging Face folder: start weights, config.json, tokenizer. None: the built-in arithmetic model."""
    initial_megatron_checkpoint: Annotated[
        Path | None,
        Conflicts(
            "debug_rollout_only",
            because="no learner loads weights; give engines the weights with --hf-checkpoint",
        ),
    ] = None
    """torch_dist folder with the start weights, of slime convert, a run or Megatron. None: those of hf_checkpoint."""
    ref_load: Annotated[Path | None, OF_REFERENCE] = None
    """Hugging Face or torch_dist folder of the reference model for the KL term. None: the start weights."""
    load: Annotated[
        Path | None,
        Conflicts(
            "debug_rollout_only",
            because="no learner resumes; give engines the weights with --hf-checkpoint CHECKPOINT/hf",
        ),
    ] = None
    """Run folder or checkpoint to resume from; optimizer, step and data cursor too. None: start at step 0.

    Without --config, the settings are those of that run. Code that such a folder names is run only if a run of yours
    has used it, or if you name it again; reading a checkpoint runs none.
    """
    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps float32 masters. False: float32.

    Not given: on GPUs bfloat16 if the checkpoint's config.json says so (dtype, torch_dtype); else float32.
    """
    trust_remote_code: bool = False
    """Let transformers run Python code from the checkpoint folder."""


class ClusterConfig(Section):
    """Which processes run where."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where learner and engines compute. auto: cuda if a node of the joined Ray cluster has a GPU, or without
    one if this machine has and torch is a CUDA build; else cpu."""
    actor_num_nodes: PositiveInt = 1
    """Nodes that train."""
    actor_num_gpus_per_node: PositiveInt = 1
    """Learner ranks per node, one GPU each; on a CPU, processes."""
    rollout_num_gpus: PositiveInt = 1
    """GPUs of all engines together; on a CPU, server processes.

    Not given: those of one engine; with colocate, all of the learner's devices.
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
    """Memory of one GPU in GiB, by which a run that does not fit is refused. None: what nvidia-smi says here.

    Where neither says it, slime check prints what a GPU has to hold, and nothing is refused.
    """
    ray_address: Name | None = None
    """Ray cluster to join: "auto" or an address. None: start a local one and stop it at the end."""


class CheckpointConfig(Section):
    """Saving; a checkpoint is always written at the end of a run."""

    save_interval: Annotated[PositiveInt | None, WHERE_TRAINED] = None
    """Save every this many rollouts. None: only at the end, at SIGTERM, and as save_interval_minutes says."""
    save_interval_minutes: PositiveFloat | None = 30.0
    """Also save after the first rollout that ends this many minutes after the last checkpoint; the next checkpoint
    replaces it. None: never."""
    save_keep_last: Annotated[
        PositiveInt | None, Needs("save_interval", because="all other checkpoints are replaced")
    ] = None
    """Checkpoints of save_interval that stay on disk, the newest ones. None: all."""
    save_keep_every: Annotated[PositiveInt | None, Needs("save_keep_last", because="otherwise all stay")] = None
    """Checkpoints after a multiple of this many rollouts stay, however old they are. None: as save_keep_last says."""
    async_save: bool = True
    """Training waits for a copy of the state in host memory, and continues while that is written; the next save and the
    end of the run wait for the files. False: training waits for them."""
    save_hf: bool = True
    """Also write each checkpoint's weights as a Hugging Face folder."""


class WatchConfig(Section):
    """Limits on waiting, so that nothing hangs silently."""

    wait_warn_s: Annotated[PositiveFloat, AtMost("wait_fail_s")] = 60.0
    """Seconds after which a wait for another process is reported, with the processes that it waits for."""
    wait_fail_s: PositiveFloat = 1800.0
    """Seconds after which a wait for another process ends the run."""


def _template(*placeholders: str) -> AfterValidator:
    """Accepts a path in which ``placeholders`` stand for numbers."""

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
    """Rollouts alone or training alone, and rollouts on disk."""

    debug_rollout_only: Annotated[
        bool, Conflicts(*NO_ENGINES, because="neither learner nor engines would be started")
    ] = False
    """Generate and reward, and train nothing: no learner is started."""
    debug_train_only: Annotated[bool, Needs("load_debug_rollout_data")] = False
    """Train on saved rollouts: no engine is started. Needs load_debug_rollout_data."""
    save_debug_rollout_data: Annotated[RolloutPath | None, Conflicts(*NO_ENGINES, because="nothing is generated")] = (
        None
    )
    """File for the samples of each rollout, JSON Lines; {rollout_id} stands for its number. None: not written."""
    load_debug_rollout_data: RolloutPath | None = None
    """File with the samples of each rollout, as save_debug_rollout_data wrote it; means debug_train_only.

    None: rollouts are generated.
    """
    load_debug_rollout_data_subsample: Annotated[FractionAboveZero | None, Needs("load_debug_rollout_data")] = None
    """Share of each loaded rollout's prompt groups that is trained on. None: all."""
    save_debug_train_data: Annotated[TrainDataPath | None, WHERE_TRAINED] = None
    """File for what each learner rank trained, safetensors; {rollout_id} and {rank} stand for their numbers.

    None: not written.
    """

    @property
    def trains(self) -> bool:
        """Whether a learner is started."""
        return not self.debug_rollout_only

    @property
    def generates(self) -> bool:
        """Whether engines are started; else rollouts are read."""
        return not self.debug_train_only and self.load_debug_rollout_data is None


class RunConfig(Section):
    """All settings of a run; hashable by value, picklable, and never changed after validation."""

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
        """The options of the run's plugins, as far as the core reads them."""
        return self._of_plugins

    def with_plugins(self, found: PluginSettings) -> Self:
        """The same settings with ``found`` as those of plugins."""
        copy = self.model_copy()
        copy._of_plugins = found
        return copy

    def provided(self, part: Part) -> tuple[str, ...]:
        """The options of plugins that bring ``part``, as ``custom_rm_path = mine.py``; empty: the core does it."""
        return self._of_plugins.provided.get(part, ())

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
        return bool(self.eval.files or self.provided("evaluation"))

    @property
    def num_learner_ranks(self) -> int:
        """Processes that train."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def num_started_ranks(self) -> int:
        """Processes that train and that the run starts: none where it only generates."""
        return self.num_learner_ranks if self.debug.trains else 0

    @property
    def num_critic_ranks(self) -> int:
        """Processes of a separate critic; 0: it shares the learner's, or there is none."""
        return self.critic.critic_num_gpus or 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """The layout of a separate critic: the actor's, but for settings of its own.

        Experts are shared as the actor's where its data- and context-parallel ranks allow that, else each has all.
        """
        own, actor = self.critic, self.parallel
        tensor = own.critic_tensor_model_parallel_size or actor.tensor_model_parallel_size
        pipeline = own.critic_pipeline_model_parallel_size or actor.pipeline_model_parallel_size
        sequence, stages = own.critic_sequence_parallel, actor.num_virtual_stages_per_pipeline_rank
        experts = actor.expert_model_parallel_size * (actor.expert_tensor_parallel_size or tensor)
        shares = self.num_critic_ranks // pipeline % experts == 0
        return actor.model_copy(
            update={
                "tensor_model_parallel_size": tensor,
                "sequence_parallel": actor.sequence_parallel and tensor > 1 if sequence is None else sequence,
                "pipeline_model_parallel_size": pipeline,
                "num_virtual_stages_per_pipeline_rank": stages if pipeline > 1 else 1,
                "context_parallel_size": own.critic_context_parallel_size or actor.context_parallel_size,
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
        """Copies of the model that train, each on samples of its own."""
        return self.num_learner_ranks // self.parallel.model_size

    @property
    def num_engines(self) -> int:
        """Inference servers of the policy, started by the run or by the user; none where rollouts are read."""
        if not self.debug.generates:
            return 0
        external = len(self.engine.rollout_external_engine_addrs)
        return external or sum(group.num_engines for group in self.engine_groups)

    @property
    def engine_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of the policy's engines that the run starts, sizes resolved."""
        if not self.debug.generates or self.engine.rollout_external_engine_addrs:
            return ()
        requested = self.cluster
        return self.engine.groups(
            num_gpus=requested.rollout_num_gpus, num_gpus_per_engine=requested.rollout_num_gpus_per_engine
        )

    @property
    def restarts_engines(self) -> bool:
        """Whether engines and the router are started again when they die."""
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
        """Whether some engines compute prompts and others what follows them."""
        return any(group.worker_type != "regular" for group in self.engine_groups)

    @property
    def eval_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of the engines that only evaluate."""
        if not self.debug.generates:
            return ()
        return self.eval.groups(num_gpus_per_engine=self.cluster.rollout_num_gpus_per_engine)

    @property
    def auxiliary_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of all engines but the policy's: those of auxiliary models, model after model; then those that only
        evaluate."""
        if not self.debug.generates:
            return ()
        return (*(group for model in self.engine.engine_models for group in model.groups), *self.eval_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One evaluation set; see :class:`~slime_core.config.sampling.EvalDataset` for what its fields mean.

    ``label_key``, ``reward_key``, ``repetition_penalty``, ``model`` and the two limits are None where there is none.
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
        """Tokens of the longest prompt that is kept; None: all are."""
        before_a_token = None if self.max_context_len is None else self.max_context_len - 1
        return min((most for most in (self.max_prompt_len, before_a_token) if most is not None), default=None)


def eval_sets(config: RunConfig) -> tuple[EvalSet, ...]:
    """The sets of ``eval_prompt_data``, then those of ``eval_datasets``."""
    pairs = (EvalDataset(name=name, path=path) for name, path in config.eval.eval_prompt_data)
    return tuple(_resolved(one, config) for one in (*pairs, *config.eval.eval_datasets))


def _resolved(own: EvalDataset, config: RunConfig) -> EvalSet:
    """Take each setting from the set itself, else from the ``eval_*`` of all sets, else from training."""
    of_all, rollout, data = config.eval, config.rollout, config.data
    temperature = _first(own.temperature, of_all.eval_temperature)
    greedy = temperature == 0  # top_p and top_k have nothing to choose from
    return EvalSet(
        name=own.name,
        path=own.path,
        n_samples_per_eval_prompt=_first(own.n_samples_per_eval_prompt, of_all.n_samples_per_eval_prompt),
        temperature=temperature,
        top_p=1.0 if greedy else _first(own.top_p, of_all.eval_top_p, rollout.rollout_top_p),
        top_k=-1 if greedy else _first(own.top_k, of_all.eval_top_k, rollout.rollout_top_k),
        max_response_len=_first(own.max_response_len, of_all.eval_max_response_len, rollout.rollout_max_response_len),
        min_new_tokens=_first(own.min_new_tokens, of_all.eval_min_new_tokens),
        stop=_first(own.stop, rollout.rollout_stop),
        stop_token_ids=_first(own.stop_token_ids, rollout.rollout_stop_token_ids),
        repetition_penalty=own.repetition_penalty,
        max_prompt_len=own.max_prompt_len or of_all.eval_max_prompt_len,
        max_context_len=own.max_context_len or of_all.eval_max_context_len,
        input_key=own.input_key or of_all.eval_input_key or data.input_key,
        label_key=_unless_none(own.label_key or of_all.eval_label_key or data.label_key),
        metadata_key=own.metadata_key or data.metadata_key,
        apply_chat_template=_first(own.apply_chat_template, data.apply_chat_template),
        generate_function=own.generate_function or rollout.generate_function,
        rm_type=own.rm_type or rollout.rm_type,
        reward_key=_unless_none(own.reward_key or of_all.eval_reward_key or rollout.reward_key),
        pass_threshold=_first(own.pass_threshold, of_all.eval_pass_threshold),
        model=own.model,
    )


def _first(*values: T | None) -> T:
    """Return the first value that is given; the last one always is."""
    return next(value for value in values if value is not None)


def _unless_none(name: str | None) -> str | None:
    """Return None for the text ``none``, with which a set leaves out a key of training."""
    return None if name == "none" else name
