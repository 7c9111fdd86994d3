"""Every setting of a run, typed and frozen: one class a section, one field a setting; and what follows from several.

The classes stand in the modules of their subjects and are known by their names here. A section is a TOML table of the
same name. The flag of a field is its name with dashes (``lr_warmup_iters`` is ``--lr-warmup-iters``); names are unique
across sections, so flags need no prefix. Fields keep slime's names, and Megatron's where slime took them from there.

A field says its unit and what None and 0 mean in its description, which is also its line in ``slime run --help``.
There is no field for a feature that does not exist. ``[megatron]`` and ``[sglang]`` hold what a run says to the engines
under their own names.

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

from typing import Literal, Self

from pydantic import Field, PrivateAttr

from slime_core.config.learning import (
    AlgorithmConfig,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    ParallelConfig,
    WeightsConfig,
)
from slime_core.config.measuring import EvalConfig
from slime_core.config.megatron_flags import MegatronConfig
from slime_core.config.options import Part, PluginSettings
from slime_core.config.running import (
    CheckpointConfig,
    ClusterConfig,
    DebugConfig,
    JobConfig,
    ModelConfig,
    WatchConfig,
)
from slime_core.config.sampling import DataConfig, RolloutConfig
from slime_core.config.section import Section
from slime_core.config.serving import EngineConfig, EngineGroup
from slime_core.config.sglang import SGLangConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
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
    def of_plugins(self) -> PluginSettings:
        """What the core knows of the options of the run's plugins."""
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
        """Processes of a critic that trains apart; 0: it shares the learner's, or there is none."""
        return self.critic.critic_num_gpus or 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """How a critic apart is cut over its ranks: as the actor, but for what it has of its own.

        Experts are shared as the actor's where its data- and context-parallel ranks allow that, else each has all.
        """
        own, actor = self.critic, self.parallel
        tensor = own.critic_tensor_model_parallel_size or actor.tensor_model_parallel_size
        pipeline = own.critic_pipeline_model_parallel_size or actor.pipeline_model_parallel_size
        sequence, stages = own.critic_sequence_parallel, actor.num_virtual_stages_per_pipeline_rank
        replicas, experts = self.num_critic_ranks // (tensor * pipeline), actor.expert_model_parallel_size
        return actor.model_copy(
            update={
                "tensor_model_parallel_size": tensor,
                "sequence_parallel": actor.sequence_parallel and tensor > 1 if sequence is None else sequence,
                "pipeline_model_parallel_size": pipeline,
                "num_virtual_stages_per_pipeline_rank": stages if pipeline > 1 else 1,
                "context_parallel_size": own.critic_context_parallel_size or actor.context_parallel_size,
                "expert_model_parallel_size": experts if replicas % experts == 0 else 1,
            }
        )

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
        """Inference servers of the policy, whoever started them; none where rollouts are read."""
        if not self.debug.generates:
            return 0
        external = len(self.engine.rollout_external_engine_addrs)
        return external or sum(group.num_engines for group in self.engine_groups)

    @property
    def engine_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of the policy's engines that the run starts, sizes resolved."""
        if not self.debug.generates or self.engine.rollout_external_engine_addrs:
            return ()
        asked = self.cluster
        return self.engine.groups(
            num_gpus=asked.rollout_num_gpus, num_gpus_per_engine=asked.rollout_num_gpus_per_engine
        )

    @property
    def num_rollout_gpus(self) -> int:
        """GPUs of the policy's engines, whoever started them."""
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
    def beside_groups(self) -> tuple[EngineGroup, ...]:
        """Groups of all engines beside the policy's: those of other models, model after model; then those that only
        evaluate."""
        if not self.debug.generates:
            return ()
        return (*(group for model in self.engine.engine_models for group in model.groups), *self.eval_groups)
