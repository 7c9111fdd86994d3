"""The sampler without engines or clocks: samples, ledger, shards and cursors of several rollouts, stored and compared.

A client in place of the engines' finishes requests two at a time, in an order and with answers that follow from the
prompt and from the number of its requests so far; so over-sampling, partial rollouts, staleness and requeues are
the same in every run. ``python -m tests.golden.sampler --write`` stores ``sampler.json``; read the difference before
committing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.cli.activation import resolve
from slime_core.cli.run import options_of
from slime_core.generation import Generation
from slime_core.rollout import components
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import TrainSampler

HERE = Path(__file__).parent
REPO = HERE.parents[1]
STORED = HERE / "sampler.json"
ALL = """--prompt-data sums.jsonl --eval-prompt-data sums sums.jsonl --n-samples-per-prompt 2 --num-rollout 4
    --rollout-max-response-len 4 --no-apply-chat-template --no-rollout-shuffle --actor-num-gpus-per-node 2
    --num-token-samples 0"""
CASES = {
    "over-sampling": """--plugin grpo --rollout-batch-size 3 --over-sampling-batch-size 5 --partial-rollout
        --mask-offpolicy-in-partial-rollout --sample-transforms drop_zero_std""",
    "asynchronous": """--plugin grpo --rollout-batch-size 2 --async-buffer-size 2 --max-staleness 2
        --stale-samples correct --corrections tis""",
    "resuming": """--plugin grpo --advantage-estimator rloo --rollout-batch-size 2 --over-sampling-batch-size 6
        --partial-rollout --max-staleness 1 --stale-samples evict --num-steps-per-rollout 2""",
    "evicting": """--plugin grpo --rollout-batch-size 3 --over-sampling-batch-size 6 --max-staleness 0
        --stale-samples evict""",
    "requeueing": """--plugin grpo --rollout-batch-size 3 --over-sampling-batch-size 6 --max-staleness 0
        --stale-samples requeue""",
    "buffered": """--plugin grpo --plugin ./group_reward.py --rm-type rank --rollout-batch-size 3 --data-source buffered
        --buffer-filter newest --over-sampling-batch-size 4 --partial-rollout --sample-transforms mask_truncated
        punish_overlong --overlong-buffer-len 2""",
    "failures": """--plugin ppo --advantage-estimator reinforce_plus_plus --rollout-batch-size 3
        --failed-samples drop_group --calculate-per-token-loss --log-passrate""",
}
END = 1
TURNS = 60
"""Turns of the event loop after which everything that can go on has."""


@dataclass
class _Request:
    order: int
    ids: list[int]
    n: int
    longest: int
    attempt: int
    answer: asyncio.Future[list[Generation]]


class Client:
    """Finishes two requests at a time; while requests are aborted, they answer with their first token."""

    def __init__(self, *given: Any, fails: bool = False, **named: Any) -> None:
        self.version, self.fails = 0, fails
        self._attempts: Counter[str] = Counter()
        self._open: list[_Request] = []
        self._aborts = False
        self._finishing = asyncio.get_running_loop().create_task(self._finish())

    async def generate(self, input_ids: list[int], *, sampling: Any, n: int = 1, **named: Any) -> list[Generation]:
        text = " ".join(map(str, input_ids))
        self._attempts[text] += 1
        order = zlib.crc32(f"{text}/{self._attempts[text]}".encode())
        answer: asyncio.Future[list[Generation]] = asyncio.get_running_loop().create_future()
        attempt = self._attempts[text]
        self._open.append(_Request(order, list(input_ids), n, sampling.max_new_tokens, attempt, answer))
        return await answer

    @contextlib.asynccontextmanager
    async def _aborting(self) -> AsyncIterator[None]:
        self._aborts = True
        try:
            yield
        finally:
            self._aborts = False

    def aborting(self) -> Any:
        return self._aborting()

    async def close(self) -> None:
        self._finishing.cancel()

    async def _finish(self) -> None:
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            for request in sorted(self._open, key=lambda one: one.order)[:2]:
                self._open.remove(request)
                if not request.answer.done():
                    self._answer(request)

    def _answer(self, request: _Request) -> None:
        from slime_core.errors import EngineError

        if self.fails and request.order % 5 == 0:
            request.answer.set_exception(EngineError("no engine answered"))
        else:
            request.answer.set_result([self._generated(request, place) for place in range(request.n)])

    def _generated(self, request: _Request, place: int) -> Generation:
        """The right sum, one more, or a response that reaches the limit; the first token alone if aborted."""
        kind = (request.order >> 3) + place
        ids = [5 + kind % 10, END] if kind % 3 == 0 else [*self._sum(request.ids, kind % 2), END]
        reason: Any = "stop"
        if kind % 7 == 0:
            ids, reason = [5 + kind % 10] * request.longest, "length"
        if self._aborts:
            ids, reason = ids[:1], "abort"
        ids = ids[: request.longest]
        log_probs = [-0.125 * (1 + (kind + step) % 4) for step in range(len(ids))]
        spans = ((str(self.version), 0, len(ids)),)
        return Generation(array("i", ids), array("f", log_probs), reason, (str(self.version),), weight_spans=spans)

    @staticmethod
    def _sum(ids: list[int], more: int) -> list[int]:
        first = ids[: ids.index(15) + 2]
        digits = [one - 5 for one in first if one != 15]
        return [5 + int(digit) for digit in str(digits[0] + digits[-1] + more)]


async def run(name: str) -> dict[str, Any]:
    """All of one case: rollouts 0 and 1, an evaluation, then rollouts 2 and 3 by a sampler that resumes."""
    argv = f"{ALL} {CASES[name]}".split()
    resolved, active = resolve(argv)
    folder = next(REPO.glob("slime_core/**/model/model.safetensors")).parent
    settings = SamplerSettings(
        resolved.config,
        folder,
        Path("sums.jsonl").absolute(),
        "http://unused",
        num_ranks=2,
        samples_folder=Path("samples"),
        options=options_of(resolved, active),
    )
    clients: list[Client] = []

    def make_client(*given: Any, **named: Any) -> Client:
        clients.append(Client(fails=name == "failures"))
        return clients[-1]

    components.GenerateClient = make_client  # type: ignore[assignment, misc]
    steps: list[Any] = []
    cursor = None
    for rollouts in ((0, 1), (2, 3)):
        sampler = TrainSampler(settings, active.registry)
        if cursor is not None:
            sampler.restore(cursor)
        for rollout in rollouts:
            clients[-1].version = rollout
            sampler.published(rollout)
            sampled = await sampler.sample(rollout)
            for _ in range(4 * TURNS):  # the learner trains
                await asyncio.sleep(0)
            steps.append({"metrics": _metrics(sampled.metrics), "shards": [_plain(one) for one in sampled.shards]})
        cursor = json.loads(json.dumps(sampler.state().cursor))
        if rollouts == (0, 1):
            steps.append({"evaluation": _metrics(await sampler.evaluate(2))})
        await sampler.close()
    files = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(Path("samples").iterdir())
    }
    return {"steps": steps, "files": files}


def _metrics(found: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 6) for key, value in sorted(found.items()) if not key.startswith("perf/")}


def _plain(value: Any) -> Any:
    """As JSON says it; arrays with their dtype and numbers to six digits."""
    if isinstance(value, np.ndarray):
        rounded = value.round(6) if value.dtype.kind == "f" else value
        return {str(value.dtype): [round(float(one), 6) if value.dtype.kind == "f" else int(one) for one in rounded]}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def run_all() -> dict[str, Any]:
    """Every case in a folder of its own, JSON-ready."""
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            shutil.copytree(HERE / "files", folder, dirs_exist_ok=True)
            found[name] = json.loads(json.dumps(asyncio.run(run(name))))
    return found


if __name__ == "__main__":
    found = run_all()
    parts_of = {name: {"steps": one["steps"], **one["files"]} for name, one in found.items()}
    lines = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in one.items()) + "\n}"
        for name, one in parts_of.items()
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if "--write" in sys.argv:
        STORED.write_text(text)
    else:
        print(text, end="")
