"""``slime``: finds the command, turns errors that slime raises on purpose into a message and an exit code.

Commands are imported when they are used, so that ``slime --help`` needs none of what they need.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from slime_core import __version__
from slime_core.cli import commands
from slime_core.cli.activation import activate_unlocked, architecture_of, expand
from slime_core.errors import PluginError, SlimeError, UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.load import Peek, Resolved
    from slime_core.plugins.activation import ActivePlugins


INTERRUPTED = 130
"""Exit code by which shells report a program that Ctrl-C ended."""

OVERVIEW = """\
slime: reinforcement learning of language models, with Megatron-core and SGLang

  slime run --plugin grpo            train; without a model and prompts, a small embedded task
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

WHAT_TO_EVALUATE = """\
eval: nothing says what to evaluate; give one of
  slime eval RUN                            the newest checkpoint of a run folder, on that run's prompts
  slime eval RUN/checkpoints/step-000040    one checkpoint
  slime eval FOLDER --eval-prompt-data NAME FILE.jsonl    a Hugging Face folder
  slime eval --eval-temperature 0           with settings alone: the small embedded model on the embedded prompts
Each prints a table, or JSON with --json; --output-dir FOLDER keeps samples, scores and logs."""


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
    except KeyboardInterrupt:
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


def activate_named(peek: Peek) -> ActivePlugins:
    """The plugins that the command line names and, where needed, the one that claims the model's architecture.

    Raises:
        PluginError: one cannot be found or loaded, or is not as the lock says.
    """
    from slime_core.cli.plugins import lock_of

    lock = lock_of(peek)
    active = activate_unlocked(peek, admit=lock.admit if lock else None)
    if lock is not None:
        lock.check(active.manifest)
    return active


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(OVERVIEW + commands.listing())
        return 0
    if command == "--version":
        print(f"slime {__version__}")
        return 0
    installed = None if commands.is_core(argv) else commands.find(argv)
    if installed is not None:
        added, words = installed
        return added.run(words)
    if command not in _COMMANDS:
        raise UserError(f"{command!r} is no command; commands are {', '.join(_COMMANDS)}. See slime --help.")
    return _COMMANDS[command](rest)


def _run(argv: list[str]) -> int:
    if _asks_help(argv):
        return _help("run", argv)
    resolved, active = _resolve(argv, purpose="run")
    _check_targets(resolved, active, trains=True)
    from slime_core.cli import run

    return run.execute(resolved, active, architecture=architecture_of(resolved.config.model.hf_checkpoint) or "")


def _eval(argv: list[str]) -> int:
    if _asks_help(argv):
        return _help("eval", argv)
    if not argv:
        raise UserError(WHAT_TO_EVALUATE)
    from slime_core.cli import evaluate

    resolved, active = _resolve(evaluate.expand(argv), purpose="eval")
    _check_targets(resolved, active, trains=False)
    architecture = architecture_of(resolved.config.model.hf_checkpoint) or ""
    return evaluate.execute(resolved, active, architecture=architecture, as_json=evaluate.JSON_FLAG in argv)


def _check(argv: list[str]) -> int:
    from slime_core.cli import check

    if _printed(check.USAGE, argv):
        return 0
    resolved, active = _resolve(expand(argv))
    return check.execute(resolved, active, architecture=architecture_of(resolved.config.model.hf_checkpoint) or "")


def _ledger(argv: list[str]) -> int:
    from slime_core.cli import ledger

    return 0 if _printed(ledger.USAGE, argv) else ledger.execute(argv)


def _config(argv: list[str]) -> int:
    from slime_core.config.explain import explain, to_toml
    from slime_core.plugins.discovery import inactive_flags

    match argv:
        case ["explain", name, *flags] if not _asks_help([name]):
            resolved, active = _resolve(flags, checks=False)
            print(explain(name, resolved, inactive_flags(active.registry.plugins, active.declared, is_given=False)))
        case ["show", *flags] if not _asks_help(flags):
            print(to_toml(_resolve(flags)[0]), end="")
        case _:
            usage = "slime config explain KEY [flags of slime run]\nslime config show [flags of slime run]"
            if not _asks_help(argv):
                raise UserError(f"{' '.join(['slime config', *argv])}: accepted are\n{usage}")
            print(usage)
    return 0


def _trace(argv: list[str]) -> int:
    from slime_core.cli import describe

    if not _printed(describe.USAGE, argv):
        resolved, active = _resolve(expand(argv))
        architecture = architecture_of(resolved.config.model.hf_checkpoint) or ""
        print("\n".join(describe.trace(resolved, active, architecture=architecture)))
    return 0


def _plugins(argv: list[str]) -> int:
    if argv[:1] == ["trace"]:
        return _trace(argv[1:])
    from slime_core.cli.plugins import add_commands

    parser = argparse.ArgumentParser(prog="slime", allow_abbrev=False)
    known = commands.is_core(["plugins", *argv])
    add_commands(parser.add_subparsers(required=True), added=() if known else commands.added())
    arguments = parser.parse_args(["plugins", *argv])
    return int(arguments.handler(arguments))


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "check": _check,
    "eval": _eval,
    "ledger": _ledger,
    "plugins": _plugins,
    "config": _config,
}


def _resolve(
    argv: Sequence[str], *, purpose: Literal["run", "eval"] = "run", checks: bool = True
) -> tuple[Resolved, ActivePlugins]:
    """The settings and the plugins of a command line.

    Arguments:
        checks: False, for reading about settings: neither the rules between them nor a plugin for the model is needed.
    """
    from slime_core.cli import run
    from slime_core.cli.consent import Consent
    from slime_core.cli.memory import with_memory_defaults
    from slime_core.cli.preflight import computes_on_gpus, finds_gpus
    from slime_core.config.load import load, peek
    from slime_core.plugins.activation import activate
    from slime_core.plugins.conditions import check_settings
    from slime_core.plugins.selection import check_selection

    trains = purpose == "run"
    argv = run.expand(argv) if trains else argv
    seen = peek(argv)
    consent = Consent(seen)
    if checks:
        active = activate_named(seen)
    else:
        active = activate(
            seen.plugins, choices=seen.choices, flags=seen.flags, without=seen.no_plugins, admit=consent.admit
        )
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


def _check_targets(resolved: Resolved, active: ActivePlugins, *, trains: bool) -> None:
    from slime_core.plugins.selection import check_targets

    check_targets(resolved.config, active.registry, trains=trains, architecture=None)


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

    place = next(place for place, word in enumerate(argv) if word in ("--help", "-h"))
    topic = [word for word in argv[place + 1 : place + 2] if not word.startswith("--")]
    flags = [*argv[:place], *argv[place + 1 + len(topic) :]]
    seen = peek(flags)
    options = _options_in_spite_of_all(seen, topic)
    print(help_topic(topic[0], options) if topic else help_page(command, options))
    return 0


def _options_in_spite_of_all(peek: Peek, topic: Sequence[str]) -> dict[str, type[BaseModel]]:
    """The options classes of the plugins that load, that of ``topic`` among them; what is wrong with the others is
    printed."""
    from slime_core.cli.consent import Consent
    from slime_core.plugins.activation import activate, table_of
    from slime_core.plugins.discovery import installed

    options: dict[str, type[BaseModel]] = {}
    admit = Consent(peek).admit
    requested = [plugin.name for plugin in installed() if plugin.name in topic]
    for name in dict.fromkeys([*peek.plugins, *requested]):
        try:
            if table_of(name) not in map(table_of, peek.no_plugins):
                options |= activate([name], admit=admit).options
        except PluginError as broken:
            print(f"slime: without the options of {name}: {broken}\n", file=sys.stderr)
    try:
        active = activate([], choices=peek.choices, flags=peek.flags, without=peek.no_plugins, admit=admit)
        options |= active.options
    except PluginError as broken:
        print(f"slime: without the options of what the settings name: {broken}\n", file=sys.stderr)
    return options
