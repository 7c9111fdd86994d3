"""The run itself: what it starts from, where it runs, what it saves, how long it waits, and which half of it is left.

The sections ``[run]``, ``[model]``, ``[cluster]``, ``[checkpoint]``, ``[watch]`` and ``[debug]``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from slime_core.config.options import NO_ENGINES, Conflicts, Needs, Once
from slime_core.config.section import Count, CountOrZero, Name, Positive, Section, Share, rejected

__all__ = ["CheckpointConfig", "ClusterConfig", "DebugConfig", "JobConfig", "ModelConfig", "WatchConfig"]


def _folder_name(name: str) -> str:
    if len(name.encode()) > 200 or not re.fullmatch(r"[\w][\w .+=,@-]*", name):
        shown = name if len(name) <= 60 else f"{name[:60]}..."
        raise rejected(
            f"found {shown!r}; accepted: the name of a folder, of letters, digits, spaces and . _ + = , @ -, at most "
            "200 bytes; where the folder is, --output-dir says"
        )
    return name


class JobConfig(Section):
    """The run itself."""

    output_dir: Path | None = None
    """Folder for metrics, config and checkpoints. None: outputs/JOB-TIME in the working directory."""
    job_name: Annotated[Name, AfterValidator(_folder_name)] = "run"
    """Name of the run in its folder and its records."""
    seed: CountOrZero = 1234
    """Seed of initialisation, data order and sampling."""
    plugins: tuple[Name, ...] = ()
    """Plugins of the run, by name, module or .py file; named by flag, they replace those of the file."""
    no_plugins: tuple[Name, ...] = ()
    """Plugins to leave out, even if the file, another plugin or the model names them."""
    locked: bool = False
    """Refuse every plugin that differs from slime.lock, before it is imported."""
    lock_file: Path | None = None
    """The lock that --locked reads and slime plugins lock writes; naming it means --locked. None: slime.lock here."""
    allow_plugin_change: Annotated[bool, Once()] = False
    """Resume although plugins or slime have changed since the checkpoint; recorded in plugins.json."""
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    """What is printed while running. auto: live on a terminal, else one line a step."""


class ModelConfig(Section):
    """The weights a run starts from."""

    hf_checkpoint: Path | None = None
    """Hugging Face folder: start weights, config.json, tokenizer. None: the built-in arithmetic model."""
    ref_load: Annotated[Path | None, Needs("use_kl_loss", "kl_coef", because="only they keep a reference")] = None
    """Hugging Face folder of the reference model that the KL term compares with. None: the start weights."""
    load: Annotated[
        Path | None,
        Conflicts(
            "debug_rollout_only", because="no learner resumes; engines get the weights of --hf-checkpoint CHECKPOINT/hf"
        ),
    ] = None
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
    """Nodes that train."""
    actor_num_gpus_per_node: Count = 1
    """Learner ranks per node, one GPU each; on a CPU, processes."""
    rollout_num_gpus: Count = 1
    """GPUs of all engines together; on a CPU, server processes.

    Not given: those of one engine; with colocate, all of the learner's devices.
    """
    rollout_num_gpus_per_engine: Count = 1
    """GPUs per engine (its tensor parallel size); on a CPU, processes."""
    colocate: Annotated[
        bool, Conflicts("update_weights_interval", because="engines give their weights away while the learner trains")
    ] = False
    """Learner and engines share devices in turns; rollout_num_gpus must not exceed the learner's."""
    ray_address: Name | None = None
    """Ray cluster to join: "auto" or an address. None: start a local one and stop it at the end."""


class CheckpointConfig(Section):
    """Saving; a checkpoint is always written at the end of a run."""

    save_interval: Annotated[Count | None, Conflicts("debug_rollout_only", because="nothing is trained")] = None
    """Save every this many rollouts. None: only at the end."""
    save_hf: bool = True
    """Also write each checkpoint's weights as a Hugging Face folder."""


class WatchConfig(Section):
    """Limits on waiting, so that nothing hangs silently."""

    wait_warn_s: Positive = 60.0
    """Seconds after which a wait is reported with the processes that it waits for."""
    wait_fail_s: Positive = 1800.0
    """Seconds after which a wait ends the run."""


PICKLES = (".pt", ".pth", ".pkl")


def _template(*placeholders: str, pickle: str) -> AfterValidator:
    """Accepts a path in which ``placeholders`` stand for numbers, and that is not named like a pickle.

    Arguments:
        pickle: what to write instead of a pickle; ``{stem}`` is the path without its suffix.
    """

    def check(path: Path) -> Path:
        unknown = sorted(set(re.findall(r"\{[^{}]*\}", f"{path}")) - set(placeholders))
        if unknown:
            raise rejected(
                f"found {path}, and {' and '.join(unknown)} stands for nothing; accepted: {' and '.join(placeholders)}"
            )
        if path.suffix in PICKLES:
            raise rejected(f"found {path}, which is named like a pickle; {pickle.format(stem=path.with_suffix(''))}")
        return path

    return AfterValidator(check)


WRITTEN_ROLLOUTS = _template("{rollout_id}", pickle="rollouts are written as JSON Lines: {stem}.jsonl")
READ_ROLLOUTS = _template(
    "{rollout_id}",
    pickle="reading one of slime's would run the code in it; accepted: JSON Lines, as --save-debug-rollout-data "
    "{stem}.jsonl writes them",
)
TRAIN_DATA = _template("{rollout_id}", "{rank}", pickle="it is written as safetensors: {stem}.safetensors")


class DebugConfig(Section):
    """One half of the loop alone, and what crosses between the halves, on disk."""

    debug_rollout_only: Annotated[
        bool, Conflicts(*NO_ENGINES, because="neither learner nor engines would be started")
    ] = False
    """Generate and reward, and train nothing: no learner is started."""
    debug_train_only: Annotated[bool, Needs("load_debug_rollout_data")] = False
    """Train on saved rollouts: no engine is started. Needs load_debug_rollout_data."""
    save_debug_rollout_data: Annotated[
        Annotated[Path, WRITTEN_ROLLOUTS] | None, Conflicts(*NO_ENGINES, because="nothing is generated")
    ] = None
    """File for the samples of each rollout, JSON Lines; {rollout_id} stands for its number. None: not written."""
    load_debug_rollout_data: Annotated[Path, READ_ROLLOUTS] | None = None
    """File with the samples of each rollout, as save_debug_rollout_data wrote it; means debug_train_only.

    None: rollouts are generated.
    """
    load_debug_rollout_data_subsample: Annotated[Share | None, Needs("load_debug_rollout_data")] = None
    """Share of each loaded rollout's prompt groups that is trained on. None: all."""
    save_debug_train_data: Annotated[
        Annotated[Path, TRAIN_DATA] | None, Conflicts("debug_rollout_only", because="nothing is trained")
    ] = None
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
