"""``slime``: finds the command, turns errors that slime raises on purpose into a message and an exit code.

A command is the core's, or one that an installed distribution adds, read from metadata; its target is imported when it
is run, so that ``slime --help`` needs none of what commands need::

    [project.entry-points."slime.commands"]
    oak = "acme_oak.command:main"               # slime oak ...
    "plugins.grow" = "acme_oak.grow:main"       # slime plugins grow ...

The target is called with the words after the command, ``(argv: Sequence[str]) -> int``, and returns the exit code. Its
errors are handled like those of the core's own commands.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core import __version__
from slime_core.errors import PluginError, SlimeError, UserError, nearest
from slime_core.plugins.discovery import COMMAND_GROUP, OUR_DISTRIBUTIONS, distribution_of, scan
from slime_core.plugins.loading import boundary, load_attribute

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.load import Peek


INTERRUPTED = 130
"""Exit code by which shells report a program that Ctrl-C ended."""

OVERVIEW = """\
slime: reinforcement learning of language models, with Megatron-core and SGLang

  slime run --plugin grpo            train; without a model and prompts, a small built-in task
  slime check run.toml               what slime run would find wrong, and what it would start where; starts nothing
  slime eval RUN                     measure a run's newest checkpoint, or a model, on held-out prompts

  slime ledger RUN                   where every prompt group of a run ended: trained, filtered, failed, evicted, held

  slime plugins list                 what is installed
  slime plugins show NAME            what one plugin offers
  slime plugins trace                which code a run calls, hook by hook; takes what slime run takes
  slime plugins lock                 write slime.lock: the plugins of a run, down to their files
  slime plugins verify               compare what is installed with slime.lock

  slime config explain KEY           what one setting does, its value, and where that came from
  slime config show                  all settings as TOML; takes what slime run takes

  slime COMMAND --help               more about one command
  slime --version"""

CORE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": (),
    "check": (),
    "eval": (),
    "ledger": (),
    "plugins": ("list", "show", "trace", "lock", "verify"),
    "config": ("explain", "show"),
}
"""The core's commands and what follows them. A distribution can add to these, and cannot replace one."""


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

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.target})"

    def run(self, argv: Sequence[str]) -> int:
        """Import the target and call it; returns its exit code.

        Raises:
            PluginError: it cannot be imported, is no function, or returned no exit code. Errors of the command itself
                come out as they are.
        """
        who = f"command slime {' '.join(self.words)} of {self}"
        step = f"Reinstall {self.distribution} with what it depends on, or report it to its author."
        with boundary(who, "importing it", next_step=step, locate=True):
            target = load_attribute(self.target)
        if not callable(target):
            raise PluginError(f"{who}: its target is not a function. Report it to the author of {self.distribution}.")
        code = target(list(argv))
        if type(code) is not int:
            found = f"returned {code!r}; an exit code is wanted, an int"
            raise PluginError(f"{who} {found}. Report it to the author of {self.distribution}.")
        return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Arguments:
        argv: the words after ``slime``; None: those of this process.

    Returns:
        The exit code: 0, 1 if something failed, 2 if something was requested wrongly, 130 after Ctrl-C.
    """
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except SlimeError as error:
        print(f"slime: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, SlimeError):  # a process died after SIGTERM, so nothing was saved
            print(f"slime: {interrupt.__cause__}", file=sys.stderr)
        print("slime: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left; without this, the interpreter complains again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as problem:
        if problem.errno != errno.ENAMETOOLONG:
            raise
        print(f"slime: {str(problem.filename)[:60]!r}...: no path is that long; give a shorter one", file=sys.stderr)
        return UserError.exit_code


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print("\n".join([OVERVIEW, "", "Commands that other distributions add:", *_added_commands()]))
        return 0
    if command == "--version":
        print(f"slime {__version__}")
        return 0
    if not is_core(argv) and (installed := find(argv)) is not None:
        added_command, words = installed
        return added_command.run(words)
    if command not in _COMMANDS:
        known = list(dict.fromkeys([*_COMMANDS, *(one.words[0] for one in added())]))
        same = _SAME_COMMAND.get(command)
        meant = f"; write slime {same}" if same else nearest(command, known)
        raise UserError(f"slime {command}: no such command{meant}\nCommands are {', '.join(known)}. See slime --help.")
    return _COMMANDS[command](rest)


def is_core(argv: Sequence[str]) -> bool:
    """Whether these words start a command of the core's, so that no metadata has to be read."""
    first, *rest = argv or [""]
    return first in CORE_COMMANDS and (not rest or not CORE_COMMANDS[first] or rest[0] in CORE_COMMANDS[first])


def find(argv: Sequence[str]) -> tuple[Command, list[str]] | None:
    """The installed command that these words start with, and the words after it; None: there is none.

    Raises:
        PluginError: two distributions declare the command, or it is one of ours that is not installed.
    """
    for count in (2, 1)[-len(argv) :]:
        name = ".".join(argv[:count])
        found = [one for one in added() if one.name == name]
        if len(found) > 1:
            raise PluginError(
                f"slime {' '.join(argv[:count])}: {' and '.join(map(str, found))} declare this command.\n"
                "slime prefers neither: uninstall the one that is not meant."
            )
        if found:
            return found[0], list(argv[count:])
        if (distribution := distribution_of(COMMAND_GROUP, name)) is not None:
            raise PluginError(
                f"slime {' '.join(argv[:count])} comes with {distribution}, which is not installed here.\n"
                f"Install it from a checkout of slime: pip install ./plugins/{distribution}"
            )
    return None


def added() -> list[Command]:
    """Every command that installed metadata adds, by name; two claims of one name are both listed."""
    entries = scan().group(COMMAND_GROUP)
    found = [Command(entry.name, entry.value, entry.distribution, entry.version) for entry in entries]
    return [command for command in found if not is_core(command.words)]


def _added_commands() -> Iterator[str]:
    """A line for each command of a distribution: those that are installed, and ours that are not."""
    commands = {one.name: f"{one.distribution} {one.version}" for one in added()}
    ours = ((name, one) for one, groups in OUR_DISTRIBUTIONS.items() for name in groups.get(COMMAND_GROUP, ()))
    missing = {name: f"not installed: plugins/{distribution}" for name, distribution in ours if name not in commands}
    for name, origin in (commands | missing).items():
        yield f"  {'slime ' + name.replace('.', ' '):<34} ({origin})"


# --- The core's commands ----------------------------------------------------------------------------------------------


def _run(argv: list[str]) -> int:
    if _asks_help(argv):
        return _help("run", argv)
    from slime_core.cli import run
    from slime_core.cli.activation import resolve

    return run.execute(*resolve(argv))


def _eval(argv: list[str]) -> int:
    if _asks_help(argv):
        return _help("eval", argv)
    from slime_core.cli import evaluate

    return evaluate.execute(argv)


def _check(argv: list[str]) -> int:
    from slime_core.cli import check

    return 0 if _printed(check.USAGE, argv) else check.execute(argv)


def _ledger(argv: list[str]) -> int:
    from slime_core.cli import ledger_command

    return 0 if _printed(ledger_command.USAGE, argv) else ledger_command.execute(argv)


def _config(argv: list[str]) -> int:
    from slime_core.cli.activation import resolve
    from slime_core.config.explain import explain, to_toml
    from slime_core.plugins.discovery import inactive_flags

    match argv:
        case ["explain", name, *flags] if not _asks_help([name]):
            resolved, active = resolve(flags, checks=False)
            print(explain(name, resolved, inactive_flags(active.registry.plugins, active.declared)))
        case ["show", *flags] if not _asks_help(flags):
            print(to_toml(resolve(flags)[0]), end="")
        case _:
            usage = "slime config explain KEY [flags of slime run]\nslime config show [flags of slime run]"
            if not _asks_help(argv):
                raise UserError(f"{' '.join(['slime config', *argv])}: accepted are\n{usage}")
            print(usage)
    return 0


def _plugins(argv: list[str]) -> int:
    from slime_core.cli import plugins

    return plugins.execute(argv, others=() if is_core(["plugins", *argv]) else added())


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "check": _check,
    "eval": _eval,
    "ledger": _ledger,
    "plugins": _plugins,
    "config": _config,
}


_SAME_COMMAND = {
    "train": "run",
    "start": "run",
    "launch": "run",
    "resume": "run --load RUN",
    "evaluate": "eval",
    "validate": "check",
    "dry-run": "check",
}
"""Names of other tools -> the command."""


def _asks_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def _printed(usage: str, argv: Sequence[str]) -> bool:
    """Whether ``argv`` asks for help; then ``usage`` is printed."""
    if asks := _asks_help(argv):
        print(usage)
    return asks


def _help(command: str, argv: Sequence[str]) -> int:
    """Print the short page, or the topic after ``--help``; plugins named with it bring their options."""
    from slime_core.config.explain import help_page, help_topic
    from slime_core.config.load import peek
    from slime_core.plugins.discovery import installed

    place = next(place for place, word in enumerate(argv) if word in ("--help", "-h"))
    topic = [word for word in argv[place + 1 : place + 2] if not word.startswith("--")]
    flags = [*argv[:place], *argv[place + 1 + len(topic) :]]
    seen = peek(flags)
    options = _options(seen, [*seen.plugins, *(plugin.name for plugin in installed() if plugin.name in topic)])
    print(help_topic(topic[0], options) if topic else help_page(command, options))
    return 0


def _options(peek: Peek, names: Sequence[str]) -> Mapping[str, type[BaseModel]]:
    """The options classes of the plugins ``names`` and of those that the settings need; where one does not load, none,
    and the reason is printed."""
    from slime_core.cli.activation import activate_offered

    try:
        return activate_offered(peek, names).options
    except PluginError as broken:
        print(f"slime: without the options of plugins: {broken}\n", file=sys.stderr)
        return {}
