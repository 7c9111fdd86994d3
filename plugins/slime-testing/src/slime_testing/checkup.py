"""``slime plugins check``: checks installed plugins, each in a separate process.

A plugin that hangs or ends the interpreter affects no other plugin's results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_testing.examine import STARTED, pack
from slime_testing.harness import Plugin, Source, find_plugin, installed_plugins
from slime_testing.verdicts import Verdict, fails
from slime_testing.wheels import check_distribution

__all__ = ["Checked", "check_plugins", "examined", "main", "plugins_of"]

TIMEOUT_S = 120.0
"""Time limit of one check, in seconds; building a model for the suite of model specs takes up to half of it."""

LOOK_EVERY_S = 0.1
RESULTS, LOG, WORK, HOME = "results", "log", "work", "home"
"""Files of the examining process: one line for each step; its output; its working directory; its home directory."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One plugin and the results of its checks."""

    plugin: Plugin
    verdicts: tuple[Verdict, ...]

    @property
    def failed(self) -> bool:
        """True if a check failed."""
        return any(verdict.status == "FAILED" for verdict in self.verdicts)


def main(argv: Sequence[str]) -> int:
    """Run ``slime plugins check``; return the exit code, 1 if a check failed.

    Raises:
        PluginError: no plugin has one of the names.
    """
    check = argparse.ArgumentParser(
        prog="slime plugins check",
        description="Check plugins, each in a separate process: metadata, imports, contracts and suites.",
        allow_abbrev=False,
    )
    check.add_argument("names", metavar="NAME", nargs="*", help="plugins, ./file.py or package.module; none: all")
    check.add_argument(
        "--timeout-s",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"limit for one check of a plugin [{TIMEOUT_S:g}]",
    )
    check.add_argument("--json", action="store_true", help="print a JSON list")
    options = check.parse_args(argv)
    return check_plugins(options.names, timeout_s=options.timeout_s, as_json=options.json)


def check_plugins(names: Sequence[str], *, timeout_s: float = TIMEOUT_S, as_json: bool = False) -> int:
    """Check the named plugins, or all installed, and print the results; return the exit code, 1 if a check failed.

    Raises:
        PluginError: no plugin has one of ``names``.
    """
    installed = installed_plugins()
    checked: list[Checked] = []
    for plugin in plugins_of(names, installed):
        checked.append(_checked(plugin, installed, timeout_s))
        if not as_json:
            print("\n".join(_lines(checked[-1])), flush=True)
    if as_json:
        print(json.dumps([_as_json(each) for each in checked], indent=2))
    else:
        print(_summary(checked))
    return 1 if any(each.failed for each in checked) else 0


def plugins_of(names: Sequence[str], installed: Sequence[Plugin]) -> list[Plugin]:
    """Return the named plugins; both if two distributions have one of a name, all installed if there are no names.

    Raises:
        PluginError: no plugin has one of ``names``.
    """
    if not names:
        return list(installed)
    plugins: list[Plugin] = []
    for name in names:
        plugins += [plugin for plugin in installed if plugin.name == name] or [find_plugin(name)]
    return plugins


def examined(plugin: Plugin, *, timeout_s: float) -> list[Verdict]:
    """Import the plugin and everything that it adds in another process, and return the results.

    Arguments:
        timeout_s: time limit of each check, in seconds; the process is killed at the first that exceeds it.
    """
    with tempfile.TemporaryDirectory(prefix="slime-check-") as folder:
        end = _run(plugin, Path(folder), timeout_s)
        results = Path(folder, RESULTS)
        rows = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
        log_lines = Path(folder, LOG).read_text("utf-8", errors="replace").strip().splitlines()
    verdicts = [Verdict(**row) for row in rows if STARTED not in row]
    if end:
        verdicts.append(_cut_short(rows, end, log_lines))
    return verdicts


def _checked(plugin: Plugin, installed: Sequence[Plugin], timeout_s: float) -> Checked:
    verdicts: list[Verdict] = []
    if plugin.source is Source.INSTALLED:
        verdicts += check_distribution(plugin, installed)
    verdicts += examined(plugin, timeout_s=timeout_s)
    return Checked(plugin, tuple(verdicts))


def _run(plugin: Plugin, folder: Path, timeout_s: float) -> str:
    """Run the examining process; return the reason why it did not finish, or an empty text."""
    results = folder / RESULTS
    words = [sys.executable, "-P", "-m", "slime_testing.examine", str(results)]
    (folder / "plugin").write_text(pack(plugin), encoding="utf-8")
    for name in (WORK, HOME):
        (folder / name).mkdir()
    with (folder / "plugin").open("rb") as plugin_file, (folder / LOG).open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder / WORK,  # so that files that the plugin writes do not land in the user's folder
            stdin=plugin_file,
            stdout=output,
            stderr=output,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            _wait(process, results, timeout_s)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout_s:g} s (--timeout-s)"
        finally:
            # The process group, to include processes that the plugin started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return _death(process.returncode, results)


def _wait(process: subprocess.Popen[bytes], results: Path, timeout_s: float) -> None:
    """Wait until the process ends; each check that starts or ends extends the time limit by ``timeout_s``."""
    last_size, since_s = 0, time.monotonic()
    while time.monotonic() - since_s < timeout_s:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_EVERY_S)
            return
        size = results.stat().st_size if results.exists() else 0
        if size != last_size:
            last_size, since_s = size, time.monotonic()
    raise subprocess.TimeoutExpired(process.args, timeout_s)


def _death(code: int, results: Path) -> str:
    if code < 0:
        return f"ended the interpreter with signal {signal.Signals(-code).name}"
    done = results.exists() and STARTED not in json.loads(results.read_text("utf-8").splitlines()[-1])
    return "" if code == 0 and done else f"ended the interpreter with exit code {code}"


def _cut_short(rows: Sequence[Mapping[str, str]], end: str, log_lines: Sequence[str]) -> Verdict:
    """Return the verdict on the check that was running when the process ended."""
    check = rows[-1].get(STARTED, "after the last check") if rows else "start"
    last = f"; its last line of output: {log_lines[-1]}" if log_lines else ""
    return fails(check, f"{end}{last}")


def _environment(folder: Path) -> dict[str, str]:
    """Return this process's environment, with the import folders that other Python processes would not have."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    standard = {*(sysconfig.get_path(name) for name in names), *site.getsitepackages()}
    within = tuple(folder.rstrip(os.sep) + os.sep for folder in standard)
    added = [path for path in map(os.path.abspath, filter(None, sys.path)) if not (path + os.sep).startswith(within)]
    # Without these, hypothesis leaves a folder in the working folder, and torch uses many threads for tiny tensors.
    kit = {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"), "OMP_NUM_THREADS": "1"}
    # A hook that writes below the home or the temporary directory writes into the folder of this check.
    kit |= {"HOME": str(folder / HOME), "TMPDIR": str(folder)}
    return {**os.environ, **kit, "PYTHONPATH": os.pathsep.join(added)}


def _lines(checked: Checked) -> Iterator[str]:
    plugin = checked.plugin
    yield f"{plugin.name} ({plugin.distribution} {plugin.version}, {plugin.module})"
    width = max(len(verdict.check) for verdict in checked.verdicts)
    for verdict in checked.verdicts:
        first, *others = verdict.reason.splitlines() or [""]
        yield f"  {verdict.status:<8} {verdict.check:<{width}}  {first}".rstrip()
        yield from (f"{'':<{width + 13}}{line}" for line in others)


def _summary(checked: Sequence[Checked]) -> str:
    counts = Counter(verdict.status for each in checked for verdict in each.verdicts)
    listed = ", ".join(f"{counts[status]} {status}" for status in ("FAILED", "warning", "skipped", "ok"))
    return f"{len(checked)} plugin{'s' * (len(checked) != 1)}: {listed}"


def _as_json(checked: Checked) -> dict[str, Any]:
    plugin = checked.plugin
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "failed": checked.failed,
        "checks": [verdict.as_row() for verdict in checked.verdicts],
    }
