"""``slime plugins new KIND NAME``: writes the package of a working plugin, with its tests, as a starting point.

The files are the templates in ``templates/common`` and ``templates/KIND``, at their places in the package, with
``package`` instead of its import name. To add a kind, add a folder and an entry of :data:`RECIPES`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template

from slime_core import __version__
from slime_core.errors import PluginError
from slime_testing.harness import CORE, activate, core_sections, installed_plugins

__all__ = ["KINDS", "Scaffold", "main", "new_plugin"]

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"
COMMON = "common"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The texts of a kind for the common files.

    Arguments:
        summary: one line about the generated plugin, without a full stop.
        partners: plugins that the example run names in addition.
        before: a command before the example run.
        flags: further flags of the example run.
    """

    summary: str
    partners: tuple[str, ...] = ("grpo",)
    before: str = ""
    flags: str = ""


RECIPES: Mapping[str, Recipe] = {
    "advantage-estimator": Recipe("Reward minus the median of the prompt group", partners=()),
    "correction": Recipe("Leaves out tokens whose probabilities in trainer and engine differ too much"),
    "data-source": Recipe("Sums as prompts, computed instead of read from a file"),
    "generate-function": Recipe("One response to each prompt, repeated if it was truncated"),
    "lifecycle": Recipe("A penalty for truncated responses that adapts to their share"),
    "model-spec": Recipe(
        "Qwen2 models for Megatron-core",
        before="python -m $package.tiny tiny",
        flags="--hf-checkpoint tiny/model --prompt-data tiny/prompts.jsonl --rollout-max-response-len 8 "
        "--rm-type random",
    ),
    "multi-turn-generate-function": Recipe("A response of several turns, between which a tool adds up a sum"),
    "policy-loss": Recipe("Importance-weighted policy gradient with a divergence penalty"),
    "reward-model": Recipe("1 for the right whole number, less for a number near it"),
    "rollout-source": Recipe("Fewer samples for prompts whose responses are all the same"),
    "sample-transform": Recipe("Subtracts a penalty from the reward of truncated responses"),
    "token-advantage-estimator": Recipe(
        "REINFORCE with the rollout's mean reward as baseline, discounted per token", partners=()
    ),
    "tracker": Recipe("Writes metrics as rows of a CSV file"),
}

KINDS: tuple[str, ...] = tuple(RECIPES)
"""Accepted kinds: kinds of components, two variants of them, and ``lifecycle`` for hooks alone."""

LONGEST_NAME = 30
"""Limit on a name, in characters; with it the lines of the generated files stay within 120."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A package to write.

    Example: ``Scaffold("advantage-estimator", "my-algo")`` is the distribution ``slime-my-algo`` with the package
    ``slime_my_algo``, whose plugin and component are called ``my-algo``.
    """

    kind: str
    name: str

    @property
    def recipe(self) -> Recipe:
        """The texts of its kind."""
        return RECIPES[self.kind]

    @property
    def distribution(self) -> str:
        """Name of the distribution and of its folder."""
        return f"slime-{self.name}"

    @property
    def package(self) -> str:
        """The import name."""
        return self.distribution.replace("-", "_")

    @property
    def commands(self) -> list[str]:
        """Commands that run the installed plugin."""
        named = " ".join(f"--plugin {name}" for name in (*self.recipe.partners, self.name))
        run = f"slime run {named} {self.recipe.flags} --num-rollout 2".replace("  ", " ")
        commands = [self.recipe.before, run] if self.recipe.before else [run]
        return [Template(command).substitute(name=self.name, package=self.package) for command in commands]

    def files(self) -> dict[Path, str]:
        """Return path in the package's folder -> text, for every file."""
        wheels = [self.distribution, *(f"slime-{name}" for name in self.recipe.partners), "slime-models"]
        words = {
            "name": self.name,
            "distribution": self.distribution,
            "package": self.package,
            "bounds": _bounds(__version__),
            "commands": "\n".join([f"pip install {' '.join(wheels)}", *self.commands]),
            "summary": self.recipe.summary,
        }
        return {
            Path(str(place).replace("package", self.package, 1).removesuffix(SUFFIX)): Template(text).substitute(words)
            for place, text in self._templates()
        }

    def _templates(self) -> Iterator[tuple[Path, str]]:
        for folder in (TEMPLATES / COMMON, TEMPLATES / self.kind):
            for path in sorted(folder.rglob(f"*{SUFFIX}")):
                yield path.relative_to(folder), path.read_text(encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Run ``slime plugins new``; return the exit code.

    Raises:
        PluginError: see :func:`new_plugin`.
    """
    new = argparse.ArgumentParser(
        prog="slime plugins new", description="Write a plugin package that works, with its tests.", allow_abbrev=False
    )
    new.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    new.add_argument("name", metavar="NAME", help="of the plugin: a-z, 0-9 and single dashes")
    new.add_argument("--dir", type=Path, default=Path(), help="parent of the new folder (default: the working folder)")
    arguments = new.parse_args(argv)
    return new_plugin(arguments.kind, arguments.name, where=arguments.dir)


def new_plugin(kind: str, name: str, *, where: Path) -> int:
    """Write the package ``slime-NAME`` into ``where`` and print the next commands; return the exit code, 0.

    Raises:
        PluginError: the kind is unknown, the name is invalid or taken, or the folder exists or cannot be written;
            nothing was written.
    """
    scaffold = Scaffold(_kind(kind), _name(name))
    _refuse_taken(scaffold)
    folder = where / scaffold.distribution
    _write(folder, scaffold.files())
    print(_next_commands(folder, scaffold))
    return 0


# --- What the command accepts ---------------------------------------------------------------------------------------


def _kind(word: str) -> str:
    kind = word.replace("_", "-")
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise PluginError(f"slime plugins new {word}: no such kind{meant}. Kinds are: {', '.join(KINDS)}.")
    return kind


def _name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise PluginError(
            f"a plugin cannot be called {name!r}; a name starts with a letter and has a to z, 0 to 9 and single "
            f"dashes, at most {LONGEST_NAME} characters. Choose another, such as my-algo."
        )
    if name.startswith("slime-"):
        raise PluginError(
            f"the distribution of {name!r} would be slime-{name}; ask for {name.removeprefix('slime-')!r}"
        )
    return name


def _refuse_taken(scaffold: Scaffold) -> None:
    """Refuse a name that another plugin, a table of settings, or a component of the example run has."""
    name = scaffold.name
    if name in core_sections():
        raise PluginError(f"a plugin cannot be called {name!r}: [{name}] is a section of the core's settings.")
    distribution = scaffold.distribution
    owners = [plugin for plugin in installed_plugins() if name == plugin.name or distribution == plugin.distribution]
    if owners:
        raise PluginError(f"the name {name!r} is taken by {owners[0]}. Choose another.")
    owner = _component_owner(scaffold)
    if owner:
        raise PluginError(
            f"the name {name!r} is taken by a component of {owner}, which the same run uses. Choose another."
        )


def _component_owner(scaffold: Scaffold) -> object | None:
    """Return the plugin of the example run that offers a component of this name; None if there is none."""
    names = {CORE.name, *scaffold.recipe.partners}
    for plugin in (plugin for plugin in installed_plugins() if plugin.name in names):
        with suppress(PluginError):  # slime plugins check reports broken plugins
            if any(component.name == scaffold.name for component in activate(plugin).components):
                return plugin
    return None


# --- Writing ---------------------------------------------------------------------------------------------------------


def _write(folder: Path, files: Mapping[Path, str]) -> None:
    """Create ``folder`` with these files, atomically."""
    if os.path.lexists(folder):
        raise PluginError(f"{folder} exists, and nothing is overwritten. Choose another name, or another --dir.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".slime-new-") as parent:
            unfinished = Path(parent) / folder.name
            for place, text in files.items():
                (unfinished / place).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / place).write_text(text, encoding="utf-8")
            unfinished.rename(folder)
    except OSError as problem:
        raise PluginError(f"{folder} cannot be written: {problem}. Name another folder with --dir.") from problem


def _next_commands(folder: Path, scaffold: Scaffold) -> str:
    steps = [f"cd {shlex.quote(str(folder))}", _install_and_test(), " && ".join(scaffold.commands)]
    return "\n".join(
        [f"{folder}: plugin {scaffold.name!r}, {len(scaffold.files())} files. Next:", *(f"  {step}" for step in steps)]
    )


def _install_and_test() -> str:
    """Return commands that install the package in this folder into this environment, and run its tests.

    They leave out its dependencies, which are installed: an installer would replace torch for CPUs by torch for CUDA.
    """
    is_active = shutil.which("python") == str(Path(sys.prefix, "bin", "python"))
    python = "python" if is_active else shlex.quote(sys.executable)
    install = f"{python} -m pip install" if _is_installed("pip") else f"uv pip install --python {python}"
    # An isolated build downloads hatchling.
    build = " --no-build-isolation" if _is_installed("hatchling") else ""
    return f"{install} --no-deps{build} -e . && {python} -m pytest"


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _bounds(version: str) -> str:
    """Return version constraints on the core: the current minor version."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"
