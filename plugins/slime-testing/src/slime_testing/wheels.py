"""Checks an installed plugin for ``slime plugins check`` without importing it: its metadata and its files."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from slime_core.errors import PluginError
from slime_core.harness import CORE, PluginIdentity, check_bounds, editable_source
from slime_testing.verdicts import Verdict, fails, ok, skipped, warns

__all__ = ["look_at_distribution"]

UPPER = frozenset({"<", "<=", "==", "===", "~="})
"""Operators of version constraints that exclude later versions."""

CORE_NAMED = re.compile(r"\s*slime[-_.]+rl(?![-\w.])", re.IGNORECASE)
"""The start of a requirement of the core."""

LISTED = 5
"""Number of files that a message names; the others are counted."""

PRESENT = {
    "Summary": "project.description",
    "License-Expression": "project.license",
}
"""Metadata field -> key in pyproject.toml that sets it."""

OLDER = {"License-Expression": "License"}


def look_at_distribution(plugin: PluginIdentity, installed: Sequence[PluginIdentity]) -> Iterator[Verdict]:
    """Check name, metadata and files of an installed plugin.

    Arguments:
        installed: every installed plugin, to find plugins of the same name.
    """
    yield _name(plugin, installed)
    try:
        found = metadata.distribution(plugin.distribution)
    except metadata.PackageNotFoundError:
        yield warns("metadata", f"{plugin.distribution} runs from a folder and is not installed")
        return
    yield _metadata(found)
    if plugin.distribution != CORE.distribution:
        yield _bounds(plugin, found)
    yield _files(found)


def _bounds(plugin: PluginIdentity, found: metadata.Distribution) -> Verdict:
    try:
        check_bounds(plugin, {CORE.distribution: CORE.version})
    except PluginError as mistake:
        return fails("bounds", str(mistake))
    loose = _loose_bound(plugin, [Requirement(line) for line in found.requires or () if CORE_NAMED.match(line)])
    return ok("bounds") if loose is None else warns("bounds", loose)


def _loose_bound(plugin: PluginIdentity, wanted: Sequence[Requirement]) -> str | None:
    """Return a message if the plugin has no constraint or no upper bound on the core's version; runs accept it."""
    who = f"{plugin.distribution} {plugin.version}"
    major, minor, *_ = CORE.version.split(".")
    advice = f"Its author should require '{CORE.distribution}>={major}.{minor},<{major}.{int(minor) + 1}'."
    applying = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    if not applying:
        return f"{who} does not say which versions of {CORE.distribution} it works with.\n{advice}"
    if not any(one.operator in UPPER for each in applying for one in each.specifier):
        return f"{who} requires {wanted[0]}, which has no upper bound.\n{advice}"
    return None


def _name(plugin: PluginIdentity, installed: Sequence[PluginIdentity]) -> Verdict:
    same = [str(one) for one in installed if one.name == plugin.name]
    if len(same) > 1:
        step = f"a run writes {plugin.distribution}:{plugin.name}, or one is uninstalled"
        return fails("name", f"claimed {len(same)} times: by {' and by '.join(same)}; {step}")
    return ok("name")


def _metadata(found: metadata.Distribution) -> Verdict:
    mistakes = list(_missing(found))
    try:
        Version(found.version)
    except InvalidVersion as mistake:
        return fails("metadata", f"{mistake}; a version is written like 1.2.0 (PEP 440)")
    return warns("metadata", "; ".join(mistakes)) if mistakes else ok("metadata")


def _missing(found: metadata.Distribution) -> Iterator[str]:
    for field, written in PRESENT.items():
        names = (field, OLDER.get(field, field))
        if not any(name in found.metadata and found.metadata[name].strip() for name in names):
            yield f"no {field}; pyproject.toml writes it with {written}"


def _files(found: metadata.Distribution) -> Verdict:
    source = editable_source(found.metadata["Name"])
    if source is not None:
        return skipped("files", f"an editable install of {source}: its files are meant to change")
    try:
        files = list(_recorded(found))
    except (ValueError, csv.Error) as problem:  # wrong encoding or columns
        return fails("files", f"its RECORD cannot be read ({problem}); reinstall {found.metadata['Name']}")
    if not files:
        return warns("files", "no RECORD of what was installed, so changes cannot be seen")
    hashed = [file for file in files if file.digest]
    wrong = [f"{file.name} {mistake}" for file in hashed if (mistake := file.mistake)]
    if wrong:
        more = f", and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        return fails("files", f"{'; '.join(wrong[:LISTED])}{more}; reinstall {found.metadata['Name']}")
    if not hashed:
        return warns("files", "its RECORD holds no hashes, so changes cannot be seen")
    return ok("files", f"{len(hashed)} as they were installed")


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A row of RECORD: ``acme/plugin.py,sha256=...``."""

    name: str
    path: Path
    algorithm: str
    digest: str

    @property
    def mistake(self) -> str | None:
        """Description of what is wrong with the file; None: it is unchanged."""
        if not self.path.is_file():
            return "is missing"
        try:
            found = hashlib.new(self.algorithm, self.path.read_bytes()).digest()
        except (ValueError, TypeError):  # an unknown hash, or one without a fixed length
            return f"has a hash of the unknown kind {self.algorithm}"
        except OSError as problem:
            return f"cannot be read ({problem.strerror})"
        digest = base64.urlsafe_b64encode(found).rstrip(b"=").decode()
        return None if digest == self.digest else "is not what was installed"


def _recorded(found: metadata.Distribution) -> Iterator[_Recorded]:
    """Yield the rows of RECORD; unlike ``Distribution.files``, including missing files.

    Raises:
        ValueError, csv.Error: RECORD cannot be read.
    """
    for name, kind, _ in csv.reader((found.read_text("RECORD") or "").splitlines()):
        algorithm, _, digest = kind.partition("=")
        yield _Recorded(name, Path(str(found.locate_file(name))), algorithm, digest)
