"""Reads a command line: its settings and its plugins, and whether code that a run folder names may be imported.

A run folder can come from a stranger, and its ``config.toml`` names single-file plugins, modules, functions by path and
model folders with code. A run that starts here records the digest of each in the user's state folder
(``$XDG_STATE_HOME/slime/code``), so that its own resumes need no further words. A file that the user names with
``--config``, and that lies in no run folder, is the user's own word.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from slime_core.checkpoint.folder import find
from slime_core.cli.memory import with_memory_defaults
from slime_core.cli.preflight import computes_on_gpus, finds_gpus, print_warning
from slime_core.config.load import Peek, Resolved, load, peek
from slime_core.config.model_config import architecture_of
from slime_core.config.settings import core_settings
from slime_core.config.sources import read_command_line
from slime_core.errors import PluginError
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.discovery import Source
from slime_core.plugins.manifest import LOCK_FILE, SHOWN, Manifest, read_lock
from slime_core.plugins.selection import check_selection, check_settings

ENGINE_CODE = ("custom_weight_loader", "forward_hooks")
"""SGLang's flags that name functions which an engine imports."""


def resolve(
    argv: Sequence[str], *, purpose: Literal["run", "eval"] = "run", checks: bool = True
) -> tuple[Resolved, ActivePlugins]:
    """Return the settings and the plugins of a command line.

    Arguments:
        checks: False, for reading about settings: neither the rules between them nor a plugin for the model is needed.
    """
    trains = purpose == "run"
    argv = with_settings_of_loaded_run(argv) if trains else argv
    seen = peek(argv)
    consent = Consent(seen)
    active = activate_named(seen) if checks else activate_offered(seen, seen.plugins)
    resolved = load(argv, **active.for_settings, purpose=purpose, check_rules=checks, finds_gpus=finds_gpus)
    if checks:
        consent.check(resolved)
    if trains and computes_on_gpus(resolved.config):
        resolved = with_memory_defaults(resolved, active.registry)
    if checks:
        check_selection(resolved.config, active.registry, trains=trains, options=resolved.plugin_options)
        architecture = architecture_of(resolved.config.model.hf_checkpoint)
        check_settings(resolved, active.registry, architecture=architecture, code=active.functions, trains=trains)
    return resolved, active


def activate_offered(peek: Peek, names: Sequence[str]) -> ActivePlugins:
    """Activate the plugins ``names`` and those that the settings need, to show their settings; no model is needed."""
    return activate(names, choices=peek.choices, flags=peek.flags, without=peek.no_plugins, admit=Consent(peek).admit)


def with_leading_config(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``--config`` before a leading file name."""
    return [*argv] if not argv or argv[0].startswith("-") else ["--config", *argv]


def with_settings_of_loaded_run(argv: Sequence[str]) -> list[str]:
    """Return ``argv``; if it has ``--load`` without ``--config``, add the settings of the run that is resumed.

    Raises:
        ConfigError: the folder to load holds no checkpoint.
    """
    line = read_command_line(argv, core_settings())
    folder = Path(*line.words.get("load", [])).expanduser()
    if line.config or "load" not in line.words or not folder.is_dir():
        return list(argv)
    home = find(folder).home
    return [*argv] if home is None else [*argv, "--config", str(home / "config.toml")]


def activate_named(peek: Peek, *, is_locked: bool = True) -> ActivePlugins:
    """Activate the plugins that the command line names, those that these require, and those that claim other names.

    Arguments:
        is_locked: check the plugins against the lock, if the command line names one.

    Raises:
        PluginError: one cannot be found or loaded, is not as the lock says, or a run folder names code that this user
            has not run.
    """
    lock = None
    if is_locked and (peek.locked or peek.lock_file):
        lock = read_lock(peek.lock_file or Path.cwd() / LOCK_FILE)
    consent = Consent(peek)

    def admit(manifest: Manifest) -> None:
        consent.admit(manifest)
        if lock is not None:
            lock.admit(manifest)

    active = activate(
        peek.plugins,
        architecture=None if peek.debug_rollout_only else architecture_of(peek.hf_checkpoint),
        choices=peek.choices,
        flags=peek.flags,
        code=peek.code,
        without=peek.no_plugins,
        admit=admit,
    )
    if lock is not None:
        lock.check(active.manifest)
    return active


# --- Code that a run folder names -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Code:
    """One piece of code.

    Arguments:
        shown: what it is, for people.
        flag: what names it on a command line.
        digest: of its content, as hexadecimal SHA-256.
    """

    shown: str
    flag: str
    digest: str

    def __str__(self) -> str:
        return f"{self.shown} (sha256 {self.digest[:SHOWN]})"


@dataclass(frozen=True, slots=True)
class Consent:
    """Refuses code that a run folder's settings name, unless this user has run it or names it on the command line."""

    peek: Peek

    def admit(self, manifest: Manifest) -> None:
        """Check plugins and functions before they are imported.

        Raises:
            PluginError: some of them are not known; says how to name them.
        """
        if (config := self._of_run_folder) is not None:
            # The command line comes from the user; the file may not.
            _refuse_unknown(
                [one for one in _local(manifest) if self.peek.flags.get(one.flag.removeprefix("--")) != one.flag],
                config,
            )

    def check(self, resolved: Resolved) -> None:
        """Check the code that model folders hold and engines import.

        Raises:
            PluginError: as :meth:`admit`.
        """
        if (config := self._of_run_folder) is not None:
            _refuse_unknown([code for layer, code in _of_settings(resolved) if layer == "file"], config)

    @property
    def _of_run_folder(self) -> Path | None:
        """The file with the settings, if it is in a run folder."""
        config = self.peek.config
        if config is None:
            return None
        folder = config.parent
        is_run = (folder / "plugins.json").exists() or any((folder / "checkpoints").glob("*/state.json"))
        return config if is_run else None


def remember(manifest: Manifest, resolved: Resolved) -> None:
    """Record the code of a run that starts, so that a resume or an evaluation needs no further flags."""
    found = {code.digest: code.shown for code in [*_local(manifest), *(code for _, code in _of_settings(resolved))]}
    try:
        for digest, shown in found.items():
            path = _record(digest)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(f"{shown}\n", encoding="utf-8")
    except OSError as problem:
        print_warning(
            f"{problem.filename} cannot be written ({problem.strerror}), so a resume of this run will ask again for "
            "the code that it names"
        )


def _record(digest: str) -> Path:
    """The file that says that this user has run code of this digest."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The specification has relative paths ignored.
    return (home if home.is_absolute() else Path.home() / ".local" / "state") / "slime" / "code" / digest


def _refuse_unknown(named: Sequence[_Code], config: Path) -> None:
    unknown = [code for code in named if not _record(code.digest).is_file()]
    if unknown:
        code = "".join(f"  {one}\n" for one in unknown)
        flags = ", ".join(dict.fromkeys(one.flag for one in unknown))
        raise PluginError(
            f"{config} lies in a run folder and names code that no run of yours has used:\n{code}"
            "Nothing of it was imported. Read it, and if it may run, name it on the command line as the file does: "
            f"{flags}"
        )


def _local(manifest: Manifest) -> Iterator[_Code]:
    """The plugins and functions of ``manifest`` that belong to no installed distribution."""
    flags = [(entry, "--plugin") for entry in manifest.entries]
    flags += [(function, f"--{function.plugin.replace('_', '-')}") for function in manifest.functions]
    for entry, flag in flags:
        if entry.source is not Source.INSTALLED:
            yield _Code(entry.distribution, flag, _digest(entry.source, entry.entry_point, entry.digest))


def _of_settings(resolved: Resolved) -> Iterator[tuple[str, _Code]]:
    """The layer that names it, and the code that model folders hold or that engines import by name."""
    if resolved.config.model.trust_remote_code:
        for folder in dict.fromkeys(_folders([value for _, value in resolved.values().values()])):
            for code in _of_model(folder):
                yield resolved.provenance["trust_remote_code"].layer, code
    for key, (setting, value) in resolved.values().items():
        given = (setting.name, value) if setting.section == "sglang" else value
        for name, named in _engine_flags(given) if setting.section in ("engine", "eval", "sglang") else ():
            code = _Code(f"{name} = {named} of {key}", setting.flag, _digest("sglang", name, json.dumps(named)))
            yield resolved.provenance[key].layer, code


def _folders(value: object) -> Iterator[Path]:
    """The model folders in the values of settings."""
    if isinstance(value, Path):
        yield from [value] if (value / "config.json").exists() else []
    elif isinstance(value, BaseModel | tuple | list):
        for one in value:
            yield from _folders(one)


def _of_model(folder: Path) -> Iterator[_Code]:
    """The Python files of a model folder, and the code on a hub that its ``auto_map`` names."""
    flag = "--trust-remote-code"
    for path in sorted(filter(Path.is_file, folder.rglob("*.py"))):
        digest = _digest("model", hashlib.sha256(path.read_bytes()).hexdigest())
        yield _Code(f"{path}, by trust_remote_code", flag, digest)
    for path in sorted(filter(Path.is_file, folder.glob("*.json"))):
        if b"auto_map" in (text := path.read_bytes()):
            with suppress(ValueError, RecursionError):  # transformers cannot read it either
                for name in sorted(_on_hub(json.loads(text))):
                    yield _Code(f"{name} of {path}, by trust_remote_code", flag, _digest("hub", name))


def _on_hub(value: Any, *, inside: bool = False) -> set[str]:
    """``repository--module.Class`` wherever an ``auto_map`` in ``value`` says it."""
    if isinstance(value, dict):
        return {name for key, one in value.items() for name in _on_hub(one, inside=inside or key == "auto_map")}
    if isinstance(value, list):
        return {name for one in value for name in _on_hub(one, inside=inside)}
    return {value} if inside and isinstance(value, str) and "--" in value else set()


def _engine_flags(value: object) -> Iterator[tuple[str, object]]:
    """Pairs of a flag of :data:`ENGINE_CODE` and its value, wherever they stand in ``value``."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ENGINE_CODE:
        yield value
    elif isinstance(value, BaseModel | tuple):
        for one in value:
            yield from _engine_flags(one)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
