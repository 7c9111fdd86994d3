"""Rules of files and folders: what a run reads is there, what it writes can be written and replaces nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_core.config.model_config import described, torch_dist_folder
from slime_core.config.prompt_paths import unreadable
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig
from slime_core.untrusted import open_regular

ROLLOUT_FILES = ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data")
"""Settings that name a file for each rollout, with ``{rollout_id}`` for its number."""

MARKS = {
    "save_debug_rollout_data": (b'{"format": "slime rollout"', 64),
    "save_debug_train_data": (b'"slime train data"', 2**20),
}
"""Setting -> what stands in a file that it wrote (:mod:`slime_core.rollout.rollout_files`,
:mod:`slime_core.learner.rank`), and in how many of its first bytes."""

PLACEHOLDER = r"\{\w+\}"


def _eval_files_are_readable(config: RunConfig) -> Iterator[str]:
    for name, path in config.eval.files:
        yield from _unreadable(path, f"eval_prompt_data {name}")


def _prompts_are_readable(config: RunConfig) -> Iterator[str]:
    if config.data.prompt_data is not None and config.debug.generates:
        yield from _unreadable(config.data.prompt_data, "prompt_data")


def _checkpoint_is_a_model(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.model.hf_checkpoint, "hf_checkpoint")


def _further_models_are_models(config: RunConfig) -> Iterator[str]:
    reference = config.model.ref_load
    if reference is None or torch_dist_folder(reference) is None:
        yield from _no_model(reference, "ref_load", formats="Hugging Face or torch_dist folder")
    yield from _no_model(config.critic.critic_load, "critic_load")
    yield from _no_model(config.algorithm.opd_teacher_load, "opd_teacher_load")


def _initial_checkpoint_is_torch_dist(config: RunConfig) -> Iterator[str]:
    folder = config.model.initial_megatron_checkpoint
    if folder is not None and torch_dist_folder(folder) is None:
        yield (
            f"initial_megatron_checkpoint: {folder} holds no torch_dist checkpoint (no .metadata); accepted: a folder "
            "of slime convert hf-to-torch-dist, a run or one of its checkpoints, Megatron's own. Give a Hugging Face "
            "folder as --hf-checkpoint"
        )


def _load_exists(config: RunConfig) -> Iterator[str]:
    folder = config.model.load
    if folder is not None and not folder.is_dir():
        yield f"load: {folder} is no folder; accepted: a run folder, or one of its checkpoints"


def _output_is_writable(config: RunConfig) -> Iterator[str]:
    yield from _unwritable(config.run.output_dir or Path.cwd() / "outputs", "output_dir")


def _disk_folder_is_used(config: RunConfig) -> Iterator[str]:
    folder = config.weights.update_weight_disk_dir
    if folder is not None:
        yield from _unwritable(folder, "update_weight_disk_dir")


def _unreadable(path: Path, what: str) -> Iterator[str]:
    yield from (f"{what}: {problem}" for problem in unreadable(path))


def _no_model(folder: Path | None, what: str, *, formats: str = "Hugging Face folder") -> Iterator[str]:
    if folder is None:
        return
    accepted = f"accepted: a {formats} on this machine (download a hub model first)"
    if not (folder / "config.json").is_file():
        found = "holds no config.json" if folder.is_dir() else "is no folder"
        yield f"{what}: {folder} {found}; {accepted}"
    elif (content := described(folder)) is None:
        yield f"{what}: {folder / 'config.json'} is no JSON object; {accepted}"
    elif not _names_an_architecture(content):
        yield f"{what}: {folder / 'config.json'} names no architecture; {accepted}"


def _names_an_architecture(found: dict[str, Any]) -> bool:
    match found.get("architectures"):
        case [str(), *_]:
            return True
    return False


def _every_rollout_has_a_file(config: RunConfig) -> Iterator[str]:
    total = config.rollout.num_rollout
    for name in ROLLOUT_FILES:
        path = dict(config.debug)[name]
        if path is not None and total > 1 and "{rollout_id}" not in f"{path}":
            one = " or give --num-rollout 1" if name == "load_debug_rollout_data" else ""
            yield (
                f"{name} = {path} names one file, but each of the num_rollout = {total} rollouts needs its own; put "
                f"{{rollout_id}} into the path, as in "
                f"{_numbered(path, '{rollout_id}')},{one or ' which stands for the number of the rollout'}"
            )


def _numbered(path: Path, number: str) -> Path:
    """An example of a file for each; ``/`` has no name that a number could be put into."""
    return path.with_stem(f"{path.stem}-{number}") if path.name else path / number


def _every_rank_has_a_file(config: RunConfig) -> Iterator[str]:
    path, ranks = config.debug.save_debug_train_data, config.num_learner_ranks
    if path is not None and ranks > 1 and "{rank}" not in f"{path}":
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            f"save_debug_train_data = {path} has no {{rank}}, but actor_num_nodes x actor_num_gpus_per_node = "
            f"{nodes} x {each} = {ranks} learner ranks write one file each; put {{rank}} into the path, as in "
            f"{_numbered(path, '{rank}')}"
        )


def _files_can_be_written(config: RunConfig) -> Iterator[str]:
    for name in MARKS:
        path = dict(config.debug)[name]
        if path is not None and "{" not in f"{path.parent}":
            yield from _unwritable(path.parent, name)


def _nothing_else_is_replaced(config: RunConfig) -> Iterator[str]:
    others = _inputs(config)
    for name in MARKS:
        path = dict(config.debug)[name]
        if path is None:
            continue
        taken = [other for other, file in others.items() if re.fullmatch(_form(path), _first(file))]
        for other in taken:
            yield (
                f"{name} = {path} is the file of {other} = {others[other]}, which saving would replace; give another "
                "file to one of them"
            )
        for file in [] if taken else _foreign(name, path):
            yield (
                f"{name} = {path}: {file} is there already and is nothing that {name} wrote; move it away, or choose "
                "another file"
            )
        others[name] = path


def _inputs(config: RunConfig) -> dict[str, Path]:
    """Setting -> the file that the run reads by it."""
    given = {
        "prompt_data": config.data.prompt_data,
        "load_debug_rollout_data": config.debug.load_debug_rollout_data,
        "lock_file": config.run.lock_file,
    }
    given |= config.of_plugins.files
    given |= {f"eval_prompt_data {name}": path for name, path in config.eval.files}
    return {name: path for name, path in given.items() if path is not None}


def _form(template: Path) -> str:
    """A regular expression for the files of ``template``."""
    return r"\d+".join(re.escape(part) for part in re.split(PLACEHOLDER, f"{template.resolve()}"))


def _first(template: Path) -> str:
    """A file of ``template``, with 0 for its numbers."""
    return re.sub(PLACEHOLDER, "0", f"{template.resolve()}")


def _foreign(name: str, template: Path) -> list[Path]:
    """Files where ``template`` would be written that the setting ``name`` did not write."""
    folder = template.resolve().parent
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    mark, within = MARKS[name]
    return [file for file in found if re.fullmatch(_form(template), f"{file}") and mark not in _head(file, within)]


def _head(file: Path, size: int) -> bytes:
    try:
        with open_regular(file) as stream:
            return stream.read(size)
    except OSError:
        return b""


def _unwritable(folder: Path, what: str) -> Iterator[str]:
    """Why ``folder``, named by setting ``what``, cannot be made or written into; nothing where it can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    flag = "--" + what.replace("_", "-")
    if not nearest.is_dir():
        yield f"{what}: {nearest} is a file, so {folder} cannot be a folder; choose another with {flag}"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: {nearest} is not writable, so {folder} cannot be written; choose another with {flag}"


FILES: tuple[Rule, ...] = (_eval_files_are_readable, _checkpoint_is_a_model, _load_exists, _output_is_writable)
FILES_OF_RUN: tuple[Rule, ...] = (
    _prompts_are_readable,
    _further_models_are_models,
    _initial_checkpoint_is_torch_dist,
    _disk_folder_is_used,
    _every_rollout_has_a_file,
    _every_rank_has_a_file,
    _files_can_be_written,
    _nothing_else_is_replaced,
)
