"""``slime eval``: measures a model, or what a run or a checkpoint holds, on held-out prompts.

    slime eval RUN | CHECKPOINT | HUGGING_FACE_FOLDER [--json] [--output-dir FOLDER] [flags of slime run]

A checkpoint with an ``hf`` folder is read by the engines as it is. One without (``--save-hf false``) is loaded by a
learner laid out as the run's, which publishes its weights to the engines, as a resumed run does.
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
"""Asks for JSON instead of a table; the only flag of ``slime eval`` that is not a setting."""

WHAT_TO_EVALUATE = (
    "eval: nothing says what to evaluate; give a run folder, a checkpoint, a Hugging Face folder with "
    "--eval-prompt-data NAME FILE, or settings alone for the small built-in model. See slime eval --help."
)

SCORES, SAMPLES, LOGS = "scores.json", "samples", "logs"
"""Files of an output folder."""


def expand(argv: Sequence[str]) -> list[str]:
    """Flags for what a leading folder means: the settings of the run that it belongs to, and its weights.

    Raises:
        ConfigError: the folder holds neither a checkpoint nor a model, or a checkpoint that cannot be loaded.
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
    known: list[str] = []
    if (home := checkpoint.home) is not None:
        known = ["--config", str(home / "config.toml")]
    if (checkpoint.hf / "config.json").is_file():
        return [*known, "--hf-checkpoint", str(checkpoint.hf), *argv[1:]]
    if not known and "--config" not in argv:
        raise ConfigError(
            f"{checkpoint.path} has no hf folder (it was saved with --save-hf false) and lies in no run folder, so "
            "nothing says how a learner has to load it; add --config with the config.toml of its run"
        )
    return [*known, "--load", str(checkpoint.path), *argv[1:]]


def execute(argv: Sequence[str]) -> int:
    """Print the scores, as a table and one a line or as JSON; returns the exit code.

    Raises:
        UserError: nothing says what to evaluate, or the folder for the samples holds a run.
    """
    if not argv:
        raise UserError(WHAT_TO_EVALUATE)
    as_json = JSON_FLAG in argv
    resolved, active = resolve(expand(argv), purpose="eval")
    check_targets(resolved.config, active.registry, trains=False, architecture=None)
    # The checkpoint that a learner has to load; what a run's own settings say it resumed from is of no concern.
    load = resolved.config.model.load
    held = find(load) if load is not None and resolved.provenance["load"].layer == "flag" else None
    # A run of one half alone is evaluated as any other, and nothing trains that an evaluation could run during.
    alone = {"eval_num_gpus": None, "eval_num_gpus_per_engine": None, "eval_interleaved": False}
    measuring = resolved.config.eval.model_copy(update=alone)
    resolved = replace(resolved, config=resolved.config.model_copy(update={"debug": DebugConfig(), "eval": measuring}))
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
    sets = [one for one in eval_sets(resolved.config) if f"eval/{one.name}" in scores]
    described = {one.name: _described(one) for one in sets}
    report = {"model": str(model), "metrics": scores, "sets": described}
    if folder is not None:
        (folder / SCORES).write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines([one.name for one in sets], scores, folder)))
    return 0


def _described(one: EvalSet) -> dict[str, Any]:
    """The settings of a set as :data:`SCORES` has them."""
    found = {**asdict(one), "path": str(one.path)}
    return {"n_samples": found.pop("n_samples_per_eval_prompt"), **found}


def table(names: Sequence[str], scores: Mapping[str, float]) -> str:
    """One row a set: its score, pass@k, share of truncated responses, their mean length, failed samples.

    Example::

        set         score   pass@1  truncated  length  failed
        arithmetic  0.3940  0.3940  0.0000     3.2     0
    """
    found = [name for name in names if f"eval/{name}" in scores]
    starts = tuple(f"eval/{name}-pass@" for name in found)
    passed = sorted({int(one.rpartition("@")[2]) for one in scores if one.startswith(starts)})
    header = ["set", "score", *(f"pass@{k}" for k in passed), "truncated", "length", "failed"]
    return columns([_row(name, scores, passed) for name in found], head=header) if found else ""


def _requested_folder(resolved: Resolved) -> Path | None:
    """The folder for samples that the user requested; the folder in a run's own settings is the run's."""
    folder = resolved.config.run.output_dir
    if folder is None or resolved.provenance["output_dir"].layer != "flag":
        return None
    if (folder / "config.toml").exists() or (folder / "metrics.jsonl").exists():
        raise ConfigError(f"output_dir: {folder} holds a run, whose samples would be replaced; name another folder")
    return folder


@contextmanager
def _output(folder: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """The folder of logs and samples; None: there is none."""
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
    own = f"eval/{name}"
    failed = sum(value for metric, value in scores.items() if metric.startswith(f"{own}-failed/"))
    length = scores.get(f"{own}/response_len/mean")
    return [
        name,
        f"{scores[own]:.4f}",
        *(f"{scores[f'{own}-pass@{k}']:.4f}" if f"{own}-pass@{k}" in scores else "" for k in passed),
        f"{scores[f'{own}-truncated_ratio']:.4f}" if f"{own}-truncated_ratio" in scores else "",
        "" if length is None else f"{length:.1f}",
        f"{failed:.0f}",
    ]
