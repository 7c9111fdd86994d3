"""``slime eval``: evaluates a model, a run or a checkpoint on held-out prompts.

    slime eval RUN | CHECKPOINT | HUGGING_FACE_FOLDER [--json] [--output-dir FOLDER] [flags of slime run]

Engines read the ``hf`` folder of a checkpoint. A checkpoint without one (``--save-hf false``) is loaded by a learner
with the layout of the run, which publishes its weights to the engines, as a resumed run does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slime_core.checkpoint.folder import find
from slime_core.cli.activation import resolve
from slime_core.cli.labels import LabelSamples, check_labels
from slime_core.cli.memory import Needs
from slime_core.cli.preflight import check_files, check_machine, print_warning
from slime_core.cli.run import options_of
from slime_core.components.selection import check_targets, has_critic
from slime_core.config.load import Resolved
from slime_core.config.model_config import architecture_of
from slime_core.config.schema import DebugConfig, EvalSet, eval_sets
from slime_core.errors import ConfigError, UserError
from slime_core.errors import table as columns
from slime_core.track.record import PRIVATE

JSON_FLAG = "--json"
"""Prints JSON instead of a table. It is the only flag of ``slime eval`` that is not a setting."""

WHAT_TO_EVALUATE = (
    "eval: there is no model to evaluate; give a run folder, a checkpoint, a Hugging Face folder with "
    "--eval-prompt-data NAME FILE, or only settings for the built-in model. See slime eval --help."
)

SCORES, SAMPLES, LOGS = "scores.json", "samples", "logs"
"""Files of an output folder."""


def expand(argv: Sequence[str]) -> list[str]:
    """Replace a leading folder by flags: the settings of its run, and its weights.

    Raises:
        ConfigError: the folder has neither a checkpoint nor a model, or a checkpoint that cannot be loaded.
    """
    argv = [word for word in argv if word != JSON_FLAG]
    if not argv or argv[0].startswith("-"):
        return argv
    folder = Path(argv[0])
    if (folder / "config.json").is_file() and not (folder / "state.json").is_file():
        return ["--hf-checkpoint", str(folder), *argv[1:]]
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; accepted: a run folder, one of its checkpoints, or a Hugging Face folder"
        )
    try:
        checkpoint = find(folder)
    except ConfigError as nothing:
        raise ConfigError(f"{nothing} A Hugging Face folder holds config.json.") from None
    home = checkpoint.home
    config = [] if home is None else ["--config", str(home / "config.toml")]
    if (checkpoint.hf / "config.json").is_file():
        return [*config, "--hf-checkpoint", str(checkpoint.hf), *argv[1:]]
    if not config and "--config" not in argv:
        raise ConfigError(
            f"{checkpoint.path} has no hf folder (it was saved with --save-hf false) and is in no run folder, so the "
            "layout of its learner is unknown; add --config with the config.toml of its run"
        )
    return [*config, "--load", str(checkpoint.path), *argv[1:]]


def execute(argv: Sequence[str]) -> int:
    """Print the scores as a table and as lines, or as JSON; return the exit code.

    Raises:
        UserError: there is no model to evaluate, or the folder for the samples has a run.
    """
    if not argv:
        raise UserError(WHAT_TO_EVALUATE)
    as_json = JSON_FLAG in argv
    resolved, active = resolve(expand(argv), purpose="eval")
    check_targets(resolved.config, active.registry, trains=False, architecture=None)
    # The checkpoint that a learner has to load. The one that the run resumed from does not count.
    load = resolved.config.model.load
    held = find(load) if load is not None and resolved.provenance["load"].layer == "flag" else None
    # The settings of debugging and of evaluations during training do not apply.
    without_training = {"eval_num_gpus": None, "eval_num_gpus_per_engine": None, "eval_interleaved": False}
    update = {"debug": DebugConfig(), "eval": resolved.config.eval.model_copy(update=without_training)}
    resolved = replace(resolved, config=resolved.config.model_copy(update=update))
    folder = _requested_folder(resolved)
    labels = LabelSamples()
    check_files(resolved.config, active.registry, trains=False, options=resolved.plugin_options, labels=labels)
    critic = held is not None and has_critic(resolved.config, active.registry)
    check_machine(resolved.config, Needs.of(resolved.config, trains=held is not None, critic=critic))
    options = options_of(resolved, active)
    check_labels(labels, resolved.config, active.registry, active.manifest, options=options, warn=print_warning)
    from slime_core.launch import Job, evaluate

    with _output(folder) as (logs, samples):
        job = Job(
            config=resolved.config,
            registry=active.registry,
            manifest=active.manifest,
            architecture=architecture_of(resolved.config.model.hf_checkpoint) or "",
            logs=logs,
            samples=samples,
            options=options,
        )
        model = job.model if held is None else held.path
        print(f"model: {model}", file=sys.stderr if as_json else sys.stdout, flush=True)
        scores = evaluate(job, warn=print_warning, held=held)
    sets = [dataset for dataset in eval_sets(resolved.config) if f"eval/{dataset.name}" in scores]
    described = {dataset.name: _described(dataset) for dataset in sets}
    report = {"model": str(model), "metrics": scores, "sets": described}
    if folder is not None:
        (folder / SCORES).write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(list(described), scores, folder)))
    return 0


def _described(dataset: EvalSet) -> dict[str, Any]:
    """Return the settings of a set for :data:`SCORES`."""
    settings = {**asdict(dataset), "path": str(dataset.path)}
    return {"n_samples": settings.pop("n_samples_per_eval_prompt"), **settings}


def table(names: Sequence[str], scores: Mapping[str, float]) -> str:
    """Return a row for each set: score, pass@k, fraction of truncated responses, mean length, failed samples.

    Example::

        set         score   pass@1  truncated  length  failed
        arithmetic  0.3940  0.3940  0.0000     3.2     0
    """
    scored = [name for name in names if f"eval/{name}" in scores]
    starts = tuple(f"eval/{name}-pass@" for name in scored)
    passed = sorted({int(metric.rpartition("@")[2]) for metric in scores if metric.startswith(starts)})
    header = ["set", "score", *(f"pass@{k}" for k in passed), "truncated", "length", "failed"]
    return columns([_row(name, scores, passed) for name in scored], head=header) if scored else ""


def _requested_folder(resolved: Resolved) -> Path | None:
    """Return the folder for samples that a flag names. The folder in the settings of a run belongs to the run."""
    folder = resolved.config.run.output_dir
    if folder is None or resolved.provenance["output_dir"].layer != "flag":
        return None
    if (folder / "config.toml").exists() or (folder / "metrics.jsonl").exists():
        raise ConfigError(f"output_dir: {folder} holds a run, whose samples would be replaced; name another folder")
    return folder


@contextmanager
def _output(folder: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """Provide the folders of logs and samples; the latter is None without ``folder``."""
    if folder is not None:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        (folder / LOGS).mkdir(exist_ok=True)
        yield folder / LOGS, folder / SAMPLES
        return
    with tempfile.TemporaryDirectory(prefix="slime-eval-") as logs:
        yield Path(logs), None


def _lines(names: Sequence[str], scores: Mapping[str, float], folder: Path | None) -> Iterator[str]:
    if rows := table(names, scores):
        yield f"\n{rows}\n"
    yield from (f"{name}: {value:.4f}" for name, value in scores.items())
    if folder is not None:
        yield from ["", f"samples: {folder / SAMPLES}", f"scores: {folder / SCORES}"]


def _row(name: str, scores: Mapping[str, float], passed: Sequence[int]) -> list[str]:
    score = f"eval/{name}"
    failed = sum(value for metric, value in scores.items() if metric.startswith(f"{score}-failed/"))
    length = scores.get(f"{score}/response_len/mean")
    return [
        name,
        f"{scores[score]:.4f}",
        *(f"{scores[f'{score}-pass@{k}']:.4f}" if f"{score}-pass@{k}" in scores else "" for k in passed),
        f"{scores[f'{score}-truncated_ratio']:.4f}" if f"{score}-truncated_ratio" in scores else "",
        "" if length is None else f"{length:.1f}",
        f"{failed:.0f}",
    ]
