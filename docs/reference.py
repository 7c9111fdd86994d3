"""Two pages that are read off the code: ``docs/hooks.md`` (hooks, kinds, contracts) and ``docs/settings.md``.

``python -m docs.reference docs/hooks.md docs/settings.md`` writes them; a test compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_core.config.explain import settings_tables
from slime_core.plugins import contracts, hooks
from slime_core.plugins.activation import activate
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import OUR_DISTRIBUTIONS

__all__ = ["hooks_page", "settings_page"]

_HEAD = """\
# Hooks and contracts

Every call that a plugin may implement, and what the targets of its components implement. Written by
`python -m docs.reference docs/hooks.md docs/settings.md`; [plugins.md](plugins.md) is the guide.
"""

_LIFECYCLE = """\
## The lifecycle of a run

Marked with `@hookimpl` like the others, and called while the run goes on, in the order in which the run names its
plugins. An implementation names the parameters that it wants. An exception of a *participant* ends the run; that of an
*observer* is logged and counted, and after three the plugin is not called there again.

| hook | where | policy | |
|---|---|---|---|"""


_SETTINGS = """\
# Settings

Every setting of a run, by section. A setting is a flag, or a line of its section in a TOML file: `--lr 1e-6`, or
`lr = 1e-6` below `[optimizer]`. The sections at the end belong to plugins. `slime config explain lr` says what one
setting accepts and which value a run takes. Megatron's and SGLang's own flags are listed by
`slime run --help megatron` and `slime run --help sglang`. Written by
`python -m docs.reference docs/hooks.md docs/settings.md`.
"""


def settings_page() -> str:
    """The text of ``docs/settings.md``; needs our distributions installed."""
    ours = sorted(name for claimed in OUR_DISTRIBUTIONS.values() for name in claimed.get("slime", ()))
    return "\n".join([_SETTINGS, *settings_tables(activate(ours).options)])


def hooks_page() -> str:
    """The text of ``docs/hooks.md``."""
    declared = [f"| `{name}() -> {_returns(name)}` | {_first(vars(hooks)[name])} |" for name in _declarations()]
    called = [_lifecycle_row(name, entry) for name, entry in hooks.LIFECYCLE_HOOKS.items()]
    blocks = [
        _HEAD,
        "## Declarations",
        "Called once, at start, without parameters.",
        "\n".join(["| hook | |", "|---|---|", *declared]),
        "\n".join([_LIFECYCLE, *called]),
        "## Settings",
        "Called with the settings of a run.",
        *(text for name in hooks.OF_SETTINGS for text in _check(name)),
        "## Kinds and their traits",
        *(block for kind in Kind for block in _described(kind.words, kind.traits)),
        "## Contracts",
        "Every target is called once, as `Target(options, run)`: with the options object of its plugin (None without "
        "one) and a `RunView`.",
        *(block for name in sorted(contracts.__all__) for block in _described(name, vars(contracts)[name])),
    ]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def _check(name: str) -> list[str]:
    return [f"`{name}{_parameters(vars(hooks)[name])}`", _text(vars(hooks)[name])]


def _declarations() -> list[str]:
    return [*hooks.REGISTRATION_HOOKS, "slime_presets", "slime_options"]


def _returns(name: str) -> str:
    return str(inspect.signature(vars(hooks)[name]).return_annotation)


def _lifecycle_row(name: str, entry: hooks.Lifecycle) -> str:
    call = _in_cell(f"{name}{_parameters(vars(hooks)[name])}").removesuffix(" -> None")
    policy = f"{entry.policy} or observer" if entry.may_observe else entry.policy
    return f"| `{call}` | {', '.join(entry.places)} | {policy} | {_first(vars(hooks)[name])} |"


def _parameters(function: Any) -> str:
    """Its signature, annotations as they are written."""
    return str(inspect.signature(function)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")


def _described(title: str, cls: Any) -> list[str]:
    return [f"### {title}", _fields(cls), _text(cls), *_methods(cls)]


def _fields(cls: Any) -> str:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    listed = ", ".join(f"{field.name}: {field.type}" for field in fields)
    return f"`{cls.__name__}({listed})`" if fields else ""


def _methods(cls: Any) -> Iterator[str]:
    for name, method in vars(cls).items():
        public = not name.startswith("_") or name in ("__call__", "__len__")
        if inspect.isfunction(method) and public and not dataclasses.is_dataclass(cls):
            word = "async " if inspect.iscoroutinefunction(method) else ""
            yield f"- `{word}{name}{_parameters(method)}`\n\n{_indented(_text(method))}"
        elif isinstance(method, property) and public:
            returns = inspect.signature(method.fget).return_annotation if method.fget else ""
            yield f"- `{name}: {returns}`\n\n{_indented(_text(method))}"


def _text(found: Any) -> str:
    text = inspect.cleandoc(found.__doc__ or "")
    return (
        text.replace("``", "`").replace("Arguments:\n", "Arguments:\n\n").replace(":class:", "").replace(":func:", "")
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _first(found: Any) -> str:
    return _in_cell(" ".join(_text(found).split("\n\n")[0].split()))


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, page in zip(sys.argv[1:], (hooks_page, settings_page), strict=True):
        Path(path).write_text(page(), encoding="utf-8")
