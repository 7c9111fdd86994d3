"""A client that answers from a table, and what a sampler wrote."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import EngineError
from slime_core.generation import Generation, Kept, SamplingParams
from slime_core.prompts.chat import PromptEncoder

__all__ = ["END", "FOLDER", "FakeClient", "answer", "encoder", "written"]

FOLDER = ARITHMETIC / "model"
END = 1


@cache
def encoder() -> PromptEncoder:
    """Digit d is id 5 + d, + is 15, the end is 1."""
    return PromptEncoder(FOLDER, apply_chat_template=False)


def answer(text: str, reason: Any = "stop", version: str = "3") -> Generation:
    ids = [int(digit) + 5 for digit in text] + ([END] if reason == "stop" else [])
    alone = Kept(array("i", ids), array("i", range(len(ids) + 1)))
    return Generation(array("i", ids), array("f", [-0.5] * len(ids)), reason, (version,), kept=alone)


@dataclass
class FakeClient:
    """Answers with the texts that ``answers`` holds for a prompt; a prompt without an entry fails."""

    answers: dict[str, list[Generation]]
    requests: list[tuple[str, SamplingParams, int]] = field(default_factory=list)
    made_with: dict[str, Any] = field(default_factory=dict)
    closed: bool = False
    num_in_flight: int = 0

    async def generate(
        self, input_ids: list[int], *, sampling: SamplingParams, n: int = 1, session: None = None
    ) -> list[Generation]:
        prompt = "".join("+" if token == 15 else str(token - 5) for token in input_ids)
        self.requests.append((prompt, sampling, n))
        if prompt not in self.answers:
            raise EngineError(f"no engine answered {prompt}")
        return self.answers[prompt][:n]

    async def close(self) -> None:
        self.closed = True


def written(folder: Path, rollout: int = 0, name: str = "train") -> list[dict[str, Any]]:
    """Return the samples that the sampler wrote."""
    path = folder / "samples" / f"{name}-{rollout:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
