"""The program ``slime``: runs a command, and prints errors of slime as messages.

A command belongs to the core or to a plugin, which adds it with ``add.command(name, "package.module:function")``. The
function receives the words after the command and returns the exit code.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from slime_core import __version__
from slime_core.errors import PluginError, SlimeError, UserError, nearest
from slime_core.plugins.discovery import Plugin
from slime_core.plugins.loading import load_attribute, next_step
from slime_core.plugins.registry import Registry, load_plugins
from slime_core.user_code.failures import boundary

INTERRUPTED = 130
"""Exit code by which shells report a program that Ctrl-C ended."""

OVERVIEW = """\
slime: reinforcement learning of language models, with Megatron-core and SGLang

  slime run --plugin grpo            train; without a model and prompts, a small built-in task
  slime check run.toml               check a run and print its plan; starts nothing
  slime eval RUN                     evaluate a run's newest checkpoint, or a model, on held-out prompts

  slime ledger RUN                   where every prompt group of a run ended: trained, filtered, failed, evicted, held

  slime plugins list                 what is installed
  slime plugins show NAME            what one plugin offers
  slime plugins trace                which code a run calls, hook by hook; takes what slime run takes

  slime config explain KEY           the description of a setting, its value and the source of the value
  slime config show                  all settings as TOML; takes what slime run takes

  slime COMMAND --help               more about one command
  slime --version"""

CORE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": (),
    "check": (),
    "eval": (),
    "ledger": (),
    "plugins": ("list", "show", "trace"),
    "config": ("explain", "show"),
}
"""Command of the core -> its subcommands. Plugins can add commands and subcommands, and cannot replace one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Arguments:
        argv: the words after ``slime``; None for those of this process.

    Returns:
        The exit code: 0, 1 after a failure, 2 after a mistake of the user, 130 after Ctrl-C.
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
        # The reader (head, less) is gone. Without this line the interpreter reports it again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as problem:
        if problem.errno != errno.ENAMETOOLONG:
            raise
        print(f"slime: {str(problem.filename)[:60]!r}...: the path is too long", file=sys.stderr)
        return UserError.exit_code


def _dispatch(argv: list[str]) -> int:
    command, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print("\n".join([OVERVIEW, "", "Commands of plugins:", *_added_commands()]))
        return 0
    if command == "--version":
        print(f"slime {__version__}")
        return 0
    if not is_core(argv):
        added = added_commands(load_plugins(options=False))
        for count in (2, 1)[-len(argv) :]:
            if (name := " ".join(argv[:count])) in added:
                return run_added(name, *added[name], argv[count:])
        if command not in _COMMANDS:
            commands = list(dict.fromkeys([*_COMMANDS, *(name.split()[0] for name in added)]))
            same = _SAME_COMMAND.get(command)
            meant = f"; write slime {same}" if same else nearest(command, commands)
            raise UserError(
                f"slime {command}: no such command{meant}\nCommands are {', '.join(commands)}. See slime --help."
            )
    return _COMMANDS[command](arguments)


def is_core(argv: Sequence[str]) -> bool:
    """Return whether these words start a command of the core, so that no plugin has to be loaded."""
    first, second = [*argv, "", ""][:2]
    return first in CORE_COMMANDS and (not second or not CORE_COMMANDS[first] or second in CORE_COMMANDS[first])


def added_commands(registry: Registry) -> dict[str, tuple[Plugin, str]]:
    """Return command -> its plugin and the path of its function. The first plugin by name counts."""
    plugins = reversed(registry.loaded.values())
    return {name: (entry.plugin, path) for entry in plugins for name, path in entry.added.commands.items()}


def run_added(name: str, plugin: Plugin, path: str, words: Sequence[str]) -> int:
    """Run the command of a plugin; return its exit code.

    Raises:
        PluginError: its function cannot be imported, or returned no exit code.
    """
    with boundary(plugin, f"importing {path} of command slime {name}", next_step=next_step(plugin), locate=True):
        function = load_attribute(path)
    code = function(list(words))
    if type(code) is not int:
        raise PluginError(f"{plugin}: command slime {name} returned {code!r}; it must return an exit code, an int.")
    return code


def _added_commands() -> Iterator[str]:
    registry = load_plugins(options=False)
    for name, (plugin, _) in sorted(added_commands(registry).items()):
        yield f"  {'slime ' + name:<34} (plugin {plugin.name})"
    for problem in registry.broken.values():
        yield f"not loaded: {problem}"


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

    match argv:
        case ["explain", name, *flags] if not _asks_help([name]):
            resolved, _ = resolve(flags, checks=False)
            print(explain(name, resolved))
        case ["show", *flags] if not _asks_help(flags):
            print(to_toml(resolve(flags)[0]), end="")
        case _:
            usage = "slime config explain KEY [flags of slime run]\nslime config show [flags of slime run]"
            if not _printed(usage, argv):
                raise UserError(f"{' '.join(['slime config', *argv])}: accepted are\n{usage}")
    return 0


def _plugins(argv: list[str]) -> int:
    from slime_core.cli import plugins

    return plugins.execute(argv)


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
"""Command of another tool -> the command of slime."""


def _asks_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def _printed(usage: str, argv: Sequence[str]) -> bool:
    """Print ``usage`` if ``argv`` contains --help; return whether it does."""
    if asks := _asks_help(argv):
        print(usage)
    return asks


def _help(command: str, argv: Sequence[str]) -> int:
    """Print the short help, or that of the topic after ``--help``: a section of settings, or a plugin with options."""
    from slime_core.config.explain import help_page, help_topic
    from slime_core.config.load import peek

    place = next(place for place, word in enumerate(argv) if word in ("--help", "-h"))
    topic = [word for word in argv[place + 1 : place + 2] if not word.startswith("--")]
    line = peek([*argv[:place], *argv[place + 1 + len(topic) :]])
    try:
        options = load_plugins(line.plugins, without=line.no_plugins, in_file=line.in_file).options
    except PluginError as problem:
        print(f"slime: without the options of the named plugins: {problem}\n", file=sys.stderr)
        options = load_plugins().options
    print(help_topic(topic[0], options) if topic else help_page(command, options))
    return 0
