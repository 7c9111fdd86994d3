"""The suite of model specs: logits equal to Hugging Face's model, and weights that survive a round trip bit for bit."""

from __future__ import annotations

import json
import subprocess
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slime_testing.fork_server import ForkServer
from slime_testing.harness import Kind
from slime_testing.subject import default_run
from slime_testing.suite import ComponentSuite, require

__all__ = ["ModelSpecSuite"]

TAIL = 3000
"""Characters of a failed process's output that a message contains."""


class ModelSpecSuite(ComponentSuite):
    """For model specs; one process builds the model and tests all properties, on the CPU.

    Attributes:
        tiny: fields of the Hugging Face config that override ``slime_testing.model_process.TINY``.
        variants: additional fields, for one checkpoint each.
        limit_s: time limit of the process, in seconds.
    """

    kind: ClassVar[Kind] = Kind.MODEL_SPEC
    tiny: ClassVar[Mapping[str, Any]] = {}
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({"tie_word_embeddings": False}, {"tie_word_embeddings": True})
    limit_s: ClassVar[float] = 300.0
    _findings: ClassVar[dict[str, str]]

    def test_an_architecture_is_declared(self) -> None:
        architectures = self.traits().architectures
        require(
            bool(architectures),
            "no checkpoint would find this spec; add it with architectures={'Qwen3ForCausalLM'}",
        )

    def test_the_model_is_built_and_loaded(self) -> None:
        require("built" not in self._tested(), self._tested().get("built", ""))

    def test_what_is_built_is_not_refused_before_the_start(self) -> None:
        self._require("refused")

    def test_weights_come_back_bit_for_bit(self) -> None:
        self._require("exported")

    def test_logits_are_those_of_hugging_face(self) -> None:
        self._require("logits")

    def test_packed_rows_do_not_see_each_other(self) -> None:
        self._require("packed")

    def test_every_tensor_acts_as_in_hugging_face(self) -> None:
        self._require("tensors")

    def _require(self, name: str) -> None:
        findings = self._tested()
        if "built" in findings and name not in findings:
            raise unittest.SkipTest("the model was not built")
        require(name not in findings, findings.get(name, ""))

    @classmethod
    def _tested(cls) -> dict[str, str]:
        """Return property -> description of its violation; the process runs once."""
        if "_findings" not in vars(cls):
            cls._findings = cls._run()
        return cls._findings

    @classmethod
    def _run(cls) -> dict[str, str]:
        subject = cls.subject()
        task = {
            "component": subject.component.name,
            "plugin": subject.active.to_json(subject.options),
            "run": default_run(subject).to_json(),
            "tiny": dict(cls.tiny),
            "variants": [dict(variant) for variant in cls.variants],
        }
        with tempfile.TemporaryDirectory() as folder:
            request, report = Path(folder, "task.json"), Path(folder, "report.json")
            request.write_text(json.dumps(task), encoding="utf-8")
            failure = _failure(request, report, cls.limit_s)
            if failure is not None:
                return {"built": failure}
            findings: dict[str, str] = json.loads(report.read_text(encoding="utf-8"))
            return findings


def _failure(task: Path, report: Path, limit_s: float) -> str | None:
    """Run the process; return the reason why it wrote no report, or None if it did."""
    try:
        done = _process(task, report, limit_s)
    except subprocess.TimeoutExpired as late:
        words = (late.stderr or b"")[-TAIL:].decode(errors="replace")
        return (
            f"the process that tests the model did not end within {limit_s:.0f} s and was stopped. Does build() or a "
            f"forward pass wait for something? limit_s of the suite is the limit.\n{words}".rstrip()
        )
    if done.returncode == 0:
        return None
    return f"the process that tests the model failed with exit status {done.returncode}:\n{done.stderr[-TAIL:]}"


def _process(task: Path, report: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    return _SERVER.run(str(task), str(report), limit_s=limit_s)


_SERVER = ForkServer({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
"""Uses the CPU, because the mapping of weights does not depend on the device. Progress bars would be in messages."""
