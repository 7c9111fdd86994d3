"""Checks an installed plugin for ``slime plugins check`` without importing it: its metadata and its files."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from slime_testing.harness import CORE, Plugin
from slime_testing.verdicts import Verdict, fails, ok, skipped, warns

__all__ = ["check_distribution"]

UPPER = frozenset({"<", "<=", "==", "===", "~="})
"""Operators of version constraints that exclude later versions."""

LISTED = 5
"""Number of files that a message names; the others are counted."""


def check_distribution(plugin: Plugin, installed: Sequence[Plugin]) -> Iterator[Verdict]:
    """Check name, metadata and files of an installed plugin.

    Arguments:
        installed: every installed plugin, to find plugins of the same name.
    """
    yield _name(plugin, installed)
    try:
        distribution = metadata.distribution(plugin.distribution)
    except metadata.PackageNotFoundError:
        yield warns("metadata", f"{plugin.distribution} runs from a folder and is not installed")
        return
    yield _metadata(distribution)
    if plugin.distribution != CORE.distribution:
        yield _bounds(distribution)
    yield _files(distribution)


def _name(plugin: Plugin, installed: Sequence[Plugin]) -> Verdict:
    same = [str(other) for other in installed if other.name == plugin.name]
    if len(same) > 1:
        return fails("name", f"{' and '.join(same)} have one name; uninstall or rename one")
    return ok("name")


def _metadata(distribution: metadata.Distribution) -> Verdict:
    try:
        Version(distribution.version)
    except InvalidVersion as mistake:
        return fails("metadata", f"{mistake}; a version is written like 1.2.0 (PEP 440)")
    about = distribution.metadata
    fields = {key for key in about if about[key].strip()}
    missing = [] if "Summary" in fields else ["project.description"]
    missing += [] if fields & {"License-Expression", "License"} else ["project.license"]
    return warns("metadata", f"pyproject.toml lacks {' and '.join(missing)}") if missing else ok("metadata")


def _bounds(distribution: metadata.Distribution) -> Verdict:
    """Check that the distribution requires versions of the core that include this one and end at the next minor one."""
    try:
        requirements = list(map(Requirement, distribution.requires or ()))
    except InvalidRequirement as mistake:
        return fails("bounds", f"its requirements cannot be read: {mistake}")
    applying = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    core = [each for each in applying if canonicalize_name(each.name) == CORE.distribution]
    if excluding := [each for each in core if not each.specifier.contains(CORE.version, prereleases=True)]:
        return fails("bounds", f"it requires {excluding[0]}, and {CORE.distribution} {CORE.version} is installed")
    if not any(specifier.operator in UPPER for each in core for specifier in each.specifier):
        major, minor, *_ = CORE.version.split(".")
        advice = f"{CORE.distribution}>={major}.{minor},<{major}.{int(minor) + 1}"
        return warns("bounds", f"it requires no version of {CORE.distribution} below the next one; write {advice}")
    return ok("bounds")


def _files(distribution: metadata.Distribution) -> Verdict:
    advice = f"reinstall {distribution.name}"
    if _is_editable(distribution):
        return skipped("files", "an editable install: its files are meant to change")
    try:
        files = list(_recorded(distribution))
    except (ValueError, csv.Error) as problem:  # wrong encoding or columns
        return fails("files", f"its RECORD cannot be read ({problem}); {advice}")
    hashed = [file for file in files if file.digest]
    mistakes = [f"{file.name} {mistake}" for file in hashed if (mistake := file.mistake)]
    if mistakes:
        more = f", and {len(mistakes) - LISTED} more" if len(mistakes) > LISTED else ""
        return fails("files", f"{'; '.join(mistakes[:LISTED])}{more}; {advice}")
    if not hashed:
        return warns("files", "no RECORD with hashes of the installed files, so changes cannot be detected")
    return ok("files", f"{len(hashed)} as they were installed")


def _is_editable(distribution: metadata.Distribution) -> bool:
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A row of RECORD: ``acme/plugin.py,sha256=...``."""

    name: str
    path: Path
    algorithm: str
    digest: str

    @property
    def mistake(self) -> str | None:
        """Description of the change of a file; None if it is unchanged."""
        if not self.path.is_file():
            return "is missing"
        try:
            content = hashlib.new(self.algorithm, self.path.read_bytes()).digest()
        except (ValueError, TypeError):  # an unknown hash, or one without a fixed length
            return f"has a hash of the unknown kind {self.algorithm}"
        except OSError as problem:
            return f"cannot be read ({problem.strerror})"
        digest = base64.urlsafe_b64encode(content).rstrip(b"=").decode()
        return None if digest == self.digest else "is not what was installed"


def _recorded(distribution: metadata.Distribution) -> Iterator[_Recorded]:
    """Yield the rows of RECORD; unlike ``Distribution.files``, including missing files.

    Raises:
        ValueError, csv.Error: RECORD cannot be read.
    """
    for name, kind, _ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        algorithm, _, digest = kind.partition("=")
        yield _Recorded(name, Path(str(distribution.locate_file(name))), algorithm, digest)
