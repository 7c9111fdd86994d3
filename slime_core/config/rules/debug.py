"""The rules of running one half of the loop alone, and of the files between the halves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["DEBUG", "unwritable"]

FILES = {
    "save_debug_rollout_data": ("{rollout_id}",),
    "load_debug_rollout_data": ("{rollout_id}",),
    "save_debug_train_data": ("{rollout_id}", "{rank}"),
}
"""Setting -> what may stand in its path for a number."""

ENDINGS = {
    "save_debug_rollout_data": "rollouts are written as JSON Lines; call it {stem}.jsonl",
    "load_debug_rollout_data": (
        "slime wrote those, and reading one would run whatever its writer put into it; "
        "rollouts are read as JSON Lines, which --save-debug-rollout-data {stem}.jsonl writes"
    ),
    "save_debug_train_data": "what ranks train is written as safetensors; call it {stem}.safetensors",
}

MARKS = {
    "save_debug_rollout_data": (b'{"format": "slime rollout"', 64),
    "save_debug_train_data": (b'"slime train data"', 2**20),
}
"""Setting -> what stands in a file that it wrote (:mod:`slime_core.prompts.recorded`,
:mod:`slime_core.learner.train_data`), and in how many of its first bytes."""

PLACEHOLDER = r"\{\w+\}"

PICKLES = (".pt", ".pth", ".pkl")


def _rollouts_have_one_source(config: RunConfig) -> Iterator[str]:
    path, name = config.debug.load_debug_rollout_data, config.rollout.rollout_source
    if path is not None and name is not None and not config.provided("rollouts"):
        yield (
            f"rollout_source = {name} has no effect with load_debug_rollout_data = {path}, which says where rollouts "
            "are read; leave one of the two out"
        )


def _placeholders_are_known(config: RunConfig) -> Iterator[str]:
    for name, accepted in FILES.items():
        path = dict(config.debug)[name]
        found = set(re.findall(r"\{[^{}]*\}", f"{path}")) if path is not None else set()
        for unknown in sorted(found - set(accepted)):
            yield f"{name} = {path}: {unknown} stands for nothing; accepted: {' and '.join(accepted)}"


def _every_rollout_has_a_file(config: RunConfig) -> Iterator[str]:
    total = config.rollout.num_rollout
    for name in FILES:
        path = dict(config.debug)[name]
        if path is not None and total > 1 and "{rollout_id}" not in f"{path}":
            one = " or give --num-rollout 1" if name == "load_debug_rollout_data" else ""
            yield (
                f"{name} = {path} is one file, and num_rollout = {total} rollouts have one each; put {{rollout_id}} "
                f"into the path, as in {path.with_stem(path.stem + '-{rollout_id}')},{one or ' which stands for each'}"
            )


def _every_rank_has_a_file(config: RunConfig) -> Iterator[str]:
    path, ranks = config.debug.save_debug_train_data, config.num_learner_ranks
    if path is not None and ranks > 1 and "{rank}" not in f"{path}":
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            f"save_debug_train_data = {path} has no {{rank}}, and actor_num_nodes x actor_num_gpus_per_node = "
            f"{nodes} x {each} = {ranks} learner ranks write one file each; put it into the path, as in "
            f"{path.with_stem(path.stem + '-{rank}')}"
        )


def _nothing_is_pickled(config: RunConfig) -> Iterator[str]:
    for name, ending in ENDINGS.items():
        path = dict(config.debug)[name]
        if path is not None and path.suffix in PICKLES:
            yield f"{name} = {path} is named like a pickle: {ending.format(stem=path.with_suffix(''))}"


def _files_can_be_written(config: RunConfig) -> Iterator[str]:
    for name in MARKS:
        path = dict(config.debug)[name]
        if path is not None and "{" not in f"{path.parent}":
            yield from unwritable(path.parent, name)


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


READ = ("prompt_data", "eval_prompt_data", "lock_file")
"""Settings that name files which a run reads."""


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
    """What stands where ``template`` would be written, and was not written by the setting ``name``."""
    folder = template.resolve().parent
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    mark, within = MARKS[name]
    return [file for file in found if re.fullmatch(_form(template), f"{file}") and mark not in _head(file, within)]


def _head(file: Path, size: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(size)
    except OSError:
        return b""


def _engines_are_there_to_be_evaluated(config: RunConfig) -> Iterator[str]:
    if not config.debug.generates and (given := config.provided("evaluation")):
        yield (
            f"{_reads(config)} starts no engine, and {' '.join(given)} evaluates on engines; leave one of the two out"
        )


def _reads(config: RunConfig) -> str:
    path = config.debug.load_debug_rollout_data
    return "debug_train_only = true" if path is None else f"load_debug_rollout_data = {path}"


def unwritable(folder: Path, what: str) -> Iterator[str]:
    """Why ``folder``, named by setting ``what``, cannot be made or written into; nothing where it can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    flag = "--" + what.replace("_", "-")
    if not nearest.is_dir():
        yield f"{what}: {nearest} is a file, so {folder} cannot be a folder; choose another with {flag}"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: {nearest} is not writable, so {folder} cannot be written; choose another with {flag}"


DEBUG: tuple[Rule, ...] = (
    _rollouts_have_one_source,
    _placeholders_are_known,
    _every_rollout_has_a_file,
    _every_rank_has_a_file,
    _nothing_is_pickled,
    _files_can_be_written,
    _nothing_else_is_replaced,
    _engines_are_there_to_be_evaluated,
)
