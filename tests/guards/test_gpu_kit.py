"""The GPU kit runs on a CPU with nothing but torch, transformers and its wheels; a part that fails hides no other."""

from __future__ import annotations

import json
import re
import subprocess
import venv
import zipfile
from importlib.metadata import distribution, distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_kit import kit


def required(names: list[str]) -> set[str]:
    """Return the distributions, and all that they depend on here."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in found and any(True for _ in distributions(name=name)):
            found.add(name)
            wanted = [Requirement(text) for text in requires(name) or ()]
            names += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python whose packages are those of a GPU machine, and those that the wheels would be."""
    venv.create(tmp_path / "bare", symlinks=True)
    (site,) = (tmp_path / "bare/lib").glob("*/site-packages")
    listed = (kit.ROOT / "gpu_kit/requirements.txt").read_text().split()
    for name in required(["torch", "transformers"]) | set(listed):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution(name).locate_file(top)))
    return tmp_path / "bare/bin/python"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_part_passes_on_a_cpu_with_the_packages_of_a_gpu_machine(bare_python: Path, tmp_path: Path) -> None:
    command = [str(kit.ROOT / "gpu_kit/run"), "--installed", "--limit-s", "6000", "--output", str(tmp_path)]
    environment = {"PYTHON": str(bare_python), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    judged = {row["part"] for row in rows if row["ok"]}
    assert judged == {f"{number}. {part}" for number, part in enumerate(kit.PARTS, 1)} - {"1. machine"}
    assert all(row["check"] for row in rows if row["ok"] is not None)
    assert (tmp_path / "table.md").read_text().count("\n") == len(rows) + 2


ROW = """
import json, os, signal, time
def row(ok, figure=7):
    with open(os.environ["SLIME_GPU_KIT_ROWS"], "a") as file:
        print(json.dumps({"check": "a check", "figure": figure, "unit": "m", "expected": "7 | 8", "ok": ok}), file=file)
"""
PARTS = {
    "good": "row(True)",
    "crashes": "row(True)\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "row(True)\nwhile True: time.sleep(1)",
    "raises": "raise ValueError",
    "fails": "row(False, 2.5)",
}
"""Stand-ins of parts, which load no torch."""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    room = tmp_path / "room"
    room.mkdir()
    for name, code in PARTS.items():
        (room / f"{name}.py").write_text(ROW + code)
    monkeypatch.setattr(kit, "PARTS", tuple(PARTS))
    monkeypatch.setattr(kit, "ROOM", "room")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("part", [name for name in PARTS if name != "hangs"])
def test_each_failure_is_a_failed_row_and_the_exit_status(part: str, parts: Path) -> None:
    status = kit.main([part, "good", "--installed", "--output", str(parts / "out")])
    rows = json.loads((parts / "out/results.json").read_text())["rows"]
    assert status == (part != "good")
    assert [row["ok"] for row in rows if row["part"].endswith(part)][-2:-1] == [part == "good"]
    assert [row["figure"] for row in rows if row["part"] == "1. good" and row["ok"]].count(7)
    lines = (parts / "out/table.md").read_text().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {6}


@pytest.mark.long
def test_a_part_that_hangs_is_stopped_and_its_rows_stay_and_one_without_time_is_not_run(
    parts: Path, tmp_path: Path
) -> None:
    rows = kit.run_part("hangs", tmp_path, kit.environment_of(tmp_path), limit_s=30.0)
    assert [row["ok"] for row in rows] == [True, False, None]
    assert [row["ok"] for row in kit.run_part("good", tmp_path, {}, limit_s=0.0)] == [False]


def test_wheels_are_installed_into_the_folder_and_plugins_are_declared(tmp_path: Path) -> None:
    files = {
        "tiny.py": "",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    kit.install(tmp_path, tmp_path / "site")
    kit.declare(tmp_path / "site")
    found = distributions(path=[str(tmp_path / "site")])
    entries = {(entry.group, entry.name): entry.value for package in found for entry in package.entry_points}
    assert (tmp_path / "site/tiny.py").exists()
    assert entries["slime", "grpo"] == "slime_grpo.plugin"
    assert entries["slime", "models"] == "slime_models.plugin"


def test_missing_wheels_and_unknown_parts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in ((["--wheels", str(tmp_path)], "make gpu-kit"), (["--installed", "attentoin"], "attentoin")):
        with pytest.raises(SystemExit):
            kit.main([*words, "--output", str(tmp_path / "out")])
        assert named in capsys.readouterr().err


def test_the_wheels_are_pinned_with_the_environment() -> None:
    pinned = {line.partition("==")[0] for line in (kit.ROOT / "requirements/cpu.txt").read_text().splitlines()}
    assert set((kit.ROOT / "gpu_kit/requirements.txt").read_text().split()) <= pinned
