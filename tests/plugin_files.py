"""Plugins of tests: distributions as an installer leaves them, and single files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from slime_core.plugins.activation import activate
from slime_core.plugins.registry import Registry, load_plugins

__all__ = ["HEAD", "Site", "activated", "loaded", "site", "write_distribution"]

HEAD = (
    "from slime_core import *\nfrom slime_core.provisional import *\nfrom pydantic import BaseModel, Field\nseen = []\n"
)
"""The start of the module of every plugin that :class:`Site` writes."""


def write_distribution(
    folder: Path, name: str, version: str, files: Mapping[str, str], points: Mapping[str, str], group: str = "slime"
) -> Path:
    """Write packages and a ``.dist-info`` folder into ``folder``; return the latter."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


class Site:
    """A folder for distributions of plugins, each in a subfolder on ``sys.path``, and for single files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

    def install(
        self,
        name: str = "acme",
        source: str = "",
        *,
        version: str = "2.1",
        distribution: str | None = None,
        points: Mapping[str, str] | None = None,
        where: str | None = None,
        **files: str,
    ) -> Path:
        """Install plugin ``name`` of distribution ``NAME-dist``: package ``NAME_p`` with module ``plugin``.

        Arguments:
            files: stem -> code of further modules of the package.
        """
        folder = self.folder / (where or name)
        texts = {
            "__init__": "",
            "plugin": HEAD + dedent(source),
            **{stem: dedent(text) for stem, text in files.items()},
        }
        paths = {f"{name}_p/{stem}.py": text for stem, text in texts.items()}
        points = {name: f"{name}_p.plugin"} if points is None else points
        write_distribution(folder, distribution or f"{name}-dist", version, paths, points)
        self._monkeypatch.syspath_prepend(folder)
        return folder

    def file(self, name: str, code: str) -> str:
        """Write a single-file plugin; return its path."""
        path = self.folder / f"{name}.py"
        path.write_text(HEAD + dedent(code))
        return str(path)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A :class:`Site` whose modules are forgotten afterwards."""
    before = set(sys.modules)
    yield Site(tmp_path, monkeypatch)
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(sys.modules[module].__spec__) or module.startswith("slime_local_"):
            del sys.modules[module]


def loaded(*names: str) -> Registry:
    """Return all installed plugins and the local ones in ``names``."""
    return load_plugins(names)


def activated(*names: str) -> Registry:
    """Return ``core``, the plugin of prompt files and these plugins, as a run that names them."""
    return activate(["datasets", *names]).registry
