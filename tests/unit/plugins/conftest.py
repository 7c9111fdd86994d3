"""Distributions as an installer leaves them: a package and a ``.dist-info`` folder in a folder on ``sys.path``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution; returns the folder that stands on ``sys.path``."""
    before = set(sys.modules)

    def write(
        name: str,
        version: str = "1.0",
        *,
        files: Mapping[str, str],
        plugins: Mapping[str, str] | None = None,
        claims: Mapping[str, str] | None = None,
        requires: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        groups: Mapping[str, Mapping[str, str]] | None = None,
        dependencies: Sequence[str] = (),
        where: str | None = None,
    ) -> Path:
        site = tmp_path / (where or name)
        for path, content in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(content)
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        depends = "".join(f"Requires-Dist: {line}\n" for line in dependencies)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{depends}")
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        points = {"slime": plugins or {}, "slime.models": claims or {}, "slime.requires": requires or {}}
        points |= {"slime.commands": commands or {}, **(groups or {})}
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(site)
        return site

    yield write
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(sys.modules[module].__spec__) or module.startswith("slime_local_"):
            del sys.modules[module]
