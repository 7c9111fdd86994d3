"""The command ``slime doctor``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from slime_doctor.finding import Finding

__all__ = ["main"]

EPILOG = """examples:
  slime doctor                         every check, then a run of two rollouts: two minutes at most
  slime doctor --quick --json          without that run, for programs
  slime doctor -- --hf-checkpoint Qwen3-0.6B --prompt-data train.jsonl --bf16
                                       the run with another model; on GPUs, where attention kernels may refuse
                                       the heads of the built-in model, whose size is 16

Exit code 0: every check is ok or warns; 1: a check failed. The run uses only this machine, also if RAY_ADDRESS is set.
"""


def main(argv: Sequence[str]) -> int:
    """Print one line for each check; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="slime doctor",
        description="Whether this machine can run slime: ok, warn or fail for each check, and the next step.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="leave out the all-reduce and the run of two rollouts")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument(
        "--output-dir", metavar="FOLDER", type=Path, default=Path("outputs"), help="where runs are to write [outputs]"
    )
    parser.add_argument("words", metavar="-- FLAG", nargs="*", help="further flags of slime run, for the self-test")
    options = parser.parse_args(argv)
    findings = []
    for finding in _findings(options.output_dir.resolve(), options.words, quick=options.quick):
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.level == "fail" for finding in findings))


def _findings(output: Path, words: Sequence[str], *, quick: bool) -> Iterator[Finding]:
    from slime_doctor import machine, self_test, software  # --help needs none of it

    yield from machine.findings(output)
    torch = software.torch_facts()
    yield from software.findings(torch)
    if not quick:
        yield from self_test.findings(0 if isinstance(torch, str) else len(torch["devices"]), words)
