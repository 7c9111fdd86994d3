"""Commands that installed distributions add to ``slime``, read from metadata; a target is imported when it is run.

    [project.entry-points."slime.commands"]
    oak = "acme_oak.command:main"               # slime oak ...
    "plugins.grow" = "acme_oak.grow:main"       # slime plugins grow ...

The target is called with the words after the command, ``(argv: Sequence[str]) -> int``, and returns the exit code. Its
errors are handled like those of the core's own commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime_core.errors import PluginError
from slime_core.plugins.discovery import COMMAND_GROUP, Declared, scan
from slime_core.plugins.loading import boundary, load_attribute, place_of

CORE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": (),
    "check": (),
    "eval": (),
    "ledger": (),
    "plugins": ("list", "show", "trace", "lock", "verify"),
    "config": ("explain", "show"),
}
"""The core's commands and what follows them; a distribution can add to these, and cannot replace one."""

OURS: Mapping[str, tuple[str, str]] = {
    "convert": ("slime-convert", "checkpoints between Hugging Face and torch_dist, and whether two are equal"),
    "doctor": ("slime-doctor", "whether this machine can run slime: each check, and a run of two rollouts"),
    "models": ("slime-models", "presets of models, what memory they take, and which one a checkpoint is"),
    "plot": ("slime-plots", "charts of runs: in the terminal, and as SVG, PNG or PDF"),
    "samples": ("slime-plots", "samples of a run in the terminal, with a colour for each token"),
    "report": ("slime-plots", "a page about a run, or about several"),
    "searchr1": ("slime-searchr1", "the retriever of passages over HTTP: slime searchr1 serve"),
    "plugins.new": ("slime-testing", "write a package with a plugin of one's own"),
    "plugins.check": ("slime-testing", "whether a plugin is sound: imports, hooks, contracts, metadata, files"),
}
"""Commands of our own distributions: which one has it, and what it does; so that help can say what to install."""

_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)?")


@dataclass(frozen=True, slots=True)
class Command:
    """One declared command.

    Example: ``Command("plugins.grow", "acme_oak.grow:main", "acme-oak", "2.1")`` is ``slime plugins grow``.
    """

    name: str
    target: str
    distribution: str
    version: str

    @property
    def words(self) -> list[str]:
        """The words that a user types after ``slime``."""
        return self.name.split(".")

    @property
    def mistake(self) -> str | None:
        """Why it can never run; None: it can."""
        if not _NAME.fullmatch(self.name):
            return "a command is one word, or two joined by a dot, of a-z, 0-9 and dashes"
        first, *rest = self.words
        if first not in CORE_COMMANDS or (rest and CORE_COMMANDS[first] and rest[0] not in CORE_COMMANDS[first]):
            return None
        return "the core has a command of this name, which cannot be replaced"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.target})"

    def run(self, argv: Sequence[str]) -> int:
        """Import the target and call it; returns its exit code.

        Raises:
            PluginError: it cannot be imported, is no function, or returned no exit code. Errors of the command itself
                come out as they are.
        """
        who = f"command slime {' '.join(self.words)} of {self}"
        with boundary(who, "importing it", next_step=self._step, locate=True):
            target = load_attribute(self.target)
        if not callable(target):
            raise PluginError(f"{who}: its target is no function. Report it to the author of {self.distribution}.")
        code = target(list(argv))
        if type(code) is not int:
            found = f"returned {code!r}; an exit code is wanted, an int"
            raise PluginError(f"{who} {found}. Report it to the author of {self.distribution}.")
        return code

    def _step(self, failure: BaseException) -> str:
        if isinstance(failure, ImportError) or not place_of(failure):
            return f"Reinstall {self.distribution} with what it depends on."
        return f"Correct that line, or report it to the author of {self.distribution}."


def is_core(argv: Sequence[str]) -> bool:
    """Whether these words start a command of the core's, so that no metadata has to be read."""
    if not argv or argv[0] not in CORE_COMMANDS:
        return False
    return not CORE_COMMANDS[argv[0]] or (len(argv) > 1 and argv[1] in CORE_COMMANDS[argv[0]])


def find(argv: Sequence[str]) -> tuple[Command, list[str]] | None:
    """The installed command that these words start with, and the words after it; None: there is none.

    Raises:
        PluginError: two distributions declare the command, or it is one of ours that is not installed.
    """
    commands = added()
    for count in (2, 1)[-len(argv) :]:
        name = ".".join(argv[:count])
        found = [one for one in commands if one.name == name and one.mistake is None]
        if len(found) > 1:
            raise PluginError(
                f"slime {' '.join(argv[:count])}: {' and '.join(map(str, found))} declare this command.\n"
                "slime prefers neither: uninstall the one that is not meant."
            )
        if found:
            return found[0], list(argv[count:])
        if name in OURS:
            distribution, does = OURS[name]
            raise PluginError(
                f"slime {' '.join(argv[:count])} ({does}) comes with {distribution}, which is not installed here.\n"
                f"Install it from a checkout of slime: pip install ./plugins/{distribution}"
            )
    return None


def added(declared: Declared | None = None) -> list[Command]:
    """Every command that installed metadata declares, by name; two claims of one name are both listed."""
    entries = (declared or scan()).group(COMMAND_GROUP)
    return [Command(entry.name, entry.value, entry.distribution, entry.version) for entry in entries]


def listing() -> str:
    """The part of ``slime --help`` about commands of distributions: those that are installed, and ours that are not."""
    commands = added()
    missing = {name: found for name, found in OURS.items() if name not in {one.name for one in commands}}
    lines = [*_installed(commands), *_missing(missing)]
    return "\n".join(["", "", "Commands that other distributions add:", *lines])


def _installed(commands: Sequence[Command]) -> Iterator[str]:
    names = [one.name for one in commands]
    for one in commands:
        twice = "declared twice: uninstall one" if names.count(one.name) > 1 else None
        mistake = one.mistake or twice
        distribution, does = OURS.get(one.name, ("", ""))
        does_it = f"{does} " if one.distribution == distribution else ""
        note = f"; cannot run: {mistake}" if mistake else ""
        yield f"  {'slime ' + ' '.join(one.words):<34} {does_it}({one.distribution} {one.version}){note}"


def _missing(missing: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    for name, (distribution, does) in missing.items():
        yield f"  {'slime ' + name.replace('.', ' '):<34} {does} (not installed: plugins/{distribution})"
