"""Reads a command line before its settings: the configuration file and the plugins, whatever a lock says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import PluginError

if TYPE_CHECKING:
    from slime_core.config.load import Peek
    from slime_core.plugins.activation import ActivePlugins, Admit
    from slime_core.plugins.manifest import Manifest


def activate_unlocked(peek: Peek, *, admit: Admit | None = None) -> ActivePlugins:
    """The plugins that the command line names, those that they require, and those that claim what else it names.

    Arguments:
        admit: sees every manifest before its code is imported.

    Raises:
        PluginError: one cannot be found or loaded, or a run folder names code that this user has not run.
    """
    from slime_core.cli.consent import Consent
    from slime_core.plugins.activation import activate
    from slime_core.plugins.discovery import UnknownPlugin

    architecture = None if peek.debug_rollout_only else architecture_of(peek.hf_checkpoint)
    consent = Consent(peek)

    def looked_at(manifest: Manifest) -> None:
        consent.admit(manifest)
        if admit is not None:
            admit(manifest)

    try:
        return activate(
            peek.plugins,
            architecture=architecture,
            choices=peek.choices,
            flags=peek.flags,
            code=consent.functions,
            without=peek.no_plugins,
            admit=looked_at,
        )
    except UnknownPlugin as unknown:
        if message := _of_run(unknown.name, peek):
            raise PluginError(message) from None
        raise


def _of_run(name: str, peek: Peek) -> str | None:
    """The message for a missing plugin that the ``config.toml`` of a run names; None: something else names it."""
    from slime_core.plugins.activation import table_of
    from slime_core.plugins.discovery import Source
    from slime_core.plugins.manifest import Manifest

    if peek.config is None or peek.flags.get("plugin") == "--plugin":
        return None
    run = peek.config.parent
    if not (run / "plugins.json").is_file():
        return None
    plugin = table_of(name)
    entries = Manifest.from_json((run / "plugins.json").read_text(encoding="utf-8")).entries
    entry = next((one for one in entries if one.plugin == plugin), None)
    if entry is None:
        return None
    if entry.source is Source.INSTALLED:
        was, step = "is not installed here", f"Install {entry.distribution} {entry.version}"
    else:
        was, step = (
            "is not there",
            f"Put it back, or say with --plugin where each plugin of the run is ({name} is gone)",
        )
    return (
        f"the run {run} names plugin {plugin!r}, which it had as {entry}, and which {was}.\n"
        f"{step}; or go on without it: --no-plugin {plugin}."
    )


def architecture_of(folder: Path | None) -> str | None:
    """The architecture in the start weights' ``config.json``; None if it cannot be read, which ``load`` reports.

    Arguments:
        folder: None: the embedded model's.
    """
    from slime_core.config.schema import ARITHMETIC
    from slime_core.untrusted import read_object

    try:
        return str(read_object((folder or ARITHMETIC / "model") / "config.json")["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def expand(argv: Sequence[str]) -> list[str]:
    """Flags for what a leading file means: ``--config FILE``."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    return ["--config", *argv]
