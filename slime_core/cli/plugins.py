"""``slime plugins list``, ``show``, ``lock`` and ``verify``: what is installed, what a plugin offers, what a run uses.

``list`` reads metadata and imports no plugin, so that no plugin can break it. ``show`` imports the named one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.cli.commands import Command
from slime_core.errors import PluginError, UserError
from slime_core.plugins.discovery import (
    ARCHITECTURE_GROUP,
    CORE,
    Declared,
    PluginIdentity,
    PluginSource,
    activated_by,
    check_bounds,
    claims_for,
    few_ways,
    installed,
    required_by,
    resolve,
    scan,
)

if TYPE_CHECKING:
    from slime_core.config.load import Peek
    from slime_core.plugins.lock import Lock
    from slime_core.plugins.manifest import Manifest, ManifestEntry


def add_commands(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], *, added: Sequence[Command] = ()
) -> None:
    """Add ``plugins`` with ``list`` and ``show``; the chosen one is ``arguments.handler(arguments) -> exit code``.

    Arguments:
        added: commands of installed distributions, for the help page; they run before argparse parses.
    """
    commands = subparsers.add_parser("plugins", help="what is installed, and what a plugin offers").add_subparsers(
        dest="plugins_command", required=True
    )
    listing = commands.add_parser("list", help="installed plugins, from metadata alone")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(handler=lambda arguments: list_plugins(as_json=arguments.json))
    add_lock(commands)
    add_verify(commands)
    showing = commands.add_parser("show", help="the components, presets and options of one plugin")
    showing.add_argument("name", metavar="NAME", help="an installed plugin, ./file.py or package.module")
    showing.add_argument("--json", action="store_true", help="print a JSON object")
    showing.set_defaults(handler=lambda arguments: show_plugin(arguments.name, as_json=arguments.json))
    # Takes the flags of slime run, which argparse does not know: the command line looks for it first.
    commands.add_parser("trace", help="which code a run calls, hook by hook; takes what slime run takes")
    for command in added:
        if command.words[0] == "plugins" and command.mistake is None:
            commands.add_parser(command.words[1], help=f"from {command.distribution} {command.version}")


def list_plugins(*, as_json: bool = False) -> int:
    """Print every installed plugin; imports none. Returns the exit code, 0."""
    found = scan()
    plugins = installed(found)
    counts = Counter(plugin.name for plugin in plugins)
    rows = [{**_metadata(plugin, found), "conflict": counts[plugin.name] > 1} for plugin in plugins]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(line for row in rows for line in _lines(row)))
    for problem in found.unreadable:
        print(f"unreadable: {problem}; reinstall it, or remove it", file=sys.stderr)
    return 0


def show_plugin(name: str, *, as_json: bool = False) -> int:
    """Print what one plugin offers. Returns the exit code: 0, or 2 where it is installed but does not load.

    Raises:
        PluginError: there is no such plugin, or two claim the name.
    """
    # Here, because it pulls in pydantic, which listing does not need.
    from slime_core.cli.describe import declared, page
    from slime_core.plugins.registry import register

    source = _source(name)
    found: dict[str, Any] = {**_metadata(source.plugin, scan()), "error": None}
    try:
        found |= declared(source.plugin, register([source]))
    except PluginError as failure:
        found["error"] = str(failure)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print("\n".join([*_lines(found), *(page(found) if found["error"] is None else _broken(found["error"]))]))
    return 0 if found["error"] is None else PluginError.exit_code


def _source(name: str) -> PluginSource:
    return PluginSource(CORE) if name == CORE.name else resolve(name)


def _metadata(plugin: PluginIdentity, found: Declared) -> dict[str, Any]:
    """The metadata of a plugin, read without importing it."""
    claims = claims_for(plugin, found)
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "architectures": [claim.name for claim in claims.get(ARCHITECTURE_GROUP, ())],
        "claims": {group: [claim.name for claim in own] for group, own in claims.items()},
        "activated_by": list(activated_by(claims)),
        "requires": required_by(plugin, found),
        "unfit": _unfit(plugin),
    }


def _unfit(plugin: PluginIdentity) -> str | None:
    """Why the plugin's own bounds leave out this version of the core; None: they do not."""
    try:
        check_bounds(plugin, {CORE.distribution: CORE.version})
    except PluginError as mistake:
        return str(mistake)
    return None


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['name']:<16} {row['distribution']:<20} {row['version']:<12} {row['entry_point']}"
    notes = []
    if row.get("conflict"):
        notes.append(f"name claimed twice: write {row['distribution']}:{row['name']}, or uninstall what is not meant")
    if row["unfit"]:
        notes += [f"does not fit: {row['unfit'].partition(': ')[2].splitlines()[0]}"]
    if row["architectures"]:
        notes.append(f"for checkpoints of {', '.join(row['architectures'])}")
    if row["activated_by"]:
        notes.append(f"active with {', or '.join(few_ways(row['activated_by'], row['name']))}")
    if row["requires"]:
        notes.append(f"brings {', '.join(row['requires'])} with it")
    yield from (f"{'':<16} {line}" for line in notes)


def _broken(error: str) -> Iterator[str]:
    yield "  does not load:"
    yield from (f"    {line}" for line in error.splitlines())


USAGE = """\
slime plugins lock [CONFIG.toml] [flags of slime run]     the plugins that this run would use
slime plugins lock --run RUN [--lock-file FILE]           those that a run used
Writes slime.lock, or FILE, for slime plugins verify and slime run --locked."""

Subparsers = argparse._SubParsersAction


def add_lock(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add ``lock``, which takes what ``slime run`` takes."""
    # No character starts a flag of this parser: its words are those of slime run, which reads them itself.
    locking = commands.add_parser("lock", help="write the plugins of a run to slime.lock", prefix_chars="\0")
    locking.add_argument("words", nargs="*")
    locking.set_defaults(handler=lambda arguments: write_lock(arguments.words))


def add_verify(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add ``verify``."""
    verifying = commands.add_parser("verify", help="compare slime.lock with what is installed")
    which = verifying.add_mutually_exclusive_group()
    which.add_argument("file", metavar="FILE", nargs="?", type=Path, help="the lock; default: slime.lock")
    which.add_argument("--lock-file", metavar="FILE", type=Path, help="the same, as slime run calls it")
    verifying.set_defaults(handler=lambda arguments: verify(arguments.file or arguments.lock_file))


def write_lock(words: Sequence[str]) -> int:
    """Write the lock that ``words`` ask for; returns the exit code, 0.

    Raises:
        UserError: a mistake in a setting, or a plugin that cannot be found or loaded.
    """
    if "--help" in words or "-h" in words:
        print(USAGE)
        return 0
    manifest, path = _of_run(words) if "--run" in _split_equals(words) else _of_settings(words)
    from slime_core.plugins.lock import Lock
    from slime_core.plugins.manifest import listed
    from slime_core.track.record import write_atomically

    lock = Lock.of(manifest, path)
    try:
        write_atomically(path, lock.to_toml())
    except OSError as problem:
        raise UserError(f"{path} cannot be written: {problem}. Give another path with --lock-file.") from None
    print(f"{path}: {listed((*lock.plugins, *lock.functions))}")
    return 0


def verify(file: Path | None = None) -> int:
    """Print what is installed otherwise than the lock says; returns the exit code: 0 where nothing is, else 1.

    Raises:
        PluginError: there is no such lock, or the file is none.
    """
    from slime_core.plugins.lock import LOCK_FILE, read_lock

    lock = read_lock(file or LOCK_FILE)
    found = lock.verify()
    total = len(lock.plugins) + len(lock.functions)
    if found:
        print(f"{lock.path}: {len(found)} of {total} plugins are not here as it says:\n{lock.difference_text(found)}")
        return 1
    print(f"{lock.path}: all {total} plugins are here as it says")
    return 0


def lock_of(peek: Peek) -> Lock | None:
    """The lock that the settings name; None: they name none.

    Raises:
        PluginError: there is no such file, or it is no lock.
    """
    from slime_core.plugins.lock import LOCK_FILE, read_lock

    if not (peek.locked or peek.lock_file):
        return None
    return read_lock(peek.lock_file or Path.cwd() / LOCK_FILE)


def _of_settings(words: Sequence[str]) -> tuple[Manifest, Path]:
    from slime_core.cli import run
    from slime_core.cli.activation import activate_unlocked, expand
    from slime_core.config.load import load, peek
    from slime_core.plugins.lock import LOCK_FILE

    argv = run.expand(expand(words))
    active = activate_unlocked(peek(argv))
    resolved = load(argv, **active.for_settings, check_rules=False)
    return active.manifest, resolved.config.run.lock_file or LOCK_FILE


def _split_equals(words: Sequence[str]) -> list[str]:
    """``words`` with ``--flag=value`` as two."""
    return [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]


def _of_run(words: Sequence[str]) -> tuple[Manifest, Path]:
    from slime_core.plugins.lock import LOCK_FILE
    from slime_core.plugins.manifest import Manifest

    match _split_equals(words):
        case ["--run", folder]:
            path = LOCK_FILE
        case ["--run", folder, "--lock-file", file] | ["--lock-file", file, "--run", folder]:
            path = Path(file)
        case _:
            raise UserError(f"slime plugins lock {' '.join(words)}: accepted are\n{USAGE}")
    recorded = Path(folder) / "plugins.json"
    try:
        return _with_files(Manifest.from_json(recorded.read_text(encoding="utf-8")), Path(folder), path), path
    except OSError as problem:
        raise PluginError(f"{recorded} cannot be read: {problem.strerror}. Give the folder of a run.") from None
    except ValueError as mistake:  # not UTF-8, or not what a run writes
        text = mistake.__cause__ or mistake
        raise PluginError(
            f"{recorded} is no record of a run's plugins ({type(text).__name__}: {text}).\n"
            "Give the folder of another run, or the flags of that one in place of --run."
        ) from None


def _with_files(manifest: Manifest, run: Path, lock: Path) -> Manifest:
    """``manifest`` with its single files by paths that hold from here; prints which are not to be found."""
    plugins, functions = ([_found(one, run, lock) for one in part] for part in (manifest.entries, manifest.functions))
    return replace(manifest, entries=tuple(plugins), functions=tuple(functions))


def _found(entry: ManifestEntry, run: Path, lock: Path) -> ManifestEntry:
    """A run records a path as it was given: from its working directory, which is here or around its folder."""
    from slime_core.plugins.discovery import Source

    if entry.source is not Source.FILE:
        return entry
    for folder in (Path(), run, *run.resolve().parents):
        path = folder / entry.distribution
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == entry.digest:
            return replace(entry, distribution=str(path))
    print(
        f"slime: {entry.distribution} is not here as that run used it; {lock} looks for it in {entry.distribution} of "
        "the working directory.",
        file=sys.stderr,
    )
    return entry
