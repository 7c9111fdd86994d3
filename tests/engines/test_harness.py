"""The real engine and the learner ranks of slime_testing.harness."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from slime_core.errors import RunError
from slime_core.generation import SamplingParams
from slime_core.types import Sample, Status
from slime_core.weights.engine_control import call
from slime_testing.harness.engines import connect, real_engine
from slime_testing.harness.learner import train_step
from tests.engines.conftest import MODEL


async def test_a_real_engine_answers_and_ends_with_the_block(tmp_path) -> None:
    with real_engine(MODEL, logs=tmp_path) as url:
        # As the checkpoint, not SGLang's float16.
        assert call(url, "/server_info", timeout_s=120.0)["dtype"] == "float32"
        async with connect(url, vocab_size=16) as client:
            (answer,) = await client.generate([3, 8, 4], sampling=SamplingParams(max_new_tokens=3, ignore_eos=True))
        assert len(answer.token_ids) == len(answer.log_probs) == 3
    assert (tmp_path / "engine.log").stat().st_size > 0


def samples() -> list[Sample]:
    """Two prompts of two responses, of different lengths."""
    responses = ([7, 1], [9, 4, 1], [5, 1], [6, 6, 2, 1])
    return [
        Sample(
            group_index=index // 2,
            index=index,
            tokens=[3, 8, 4 + index // 2, *response],
            response_length=len(response),
            rollout_log_probs=[-1.0] * len(response),
            status=Status.COMPLETED,
        )
        for index, response in enumerate(responses)
    ]


@pytest.mark.long
def test_one_step_on_two_ranks_is_the_step_of_one() -> None:
    advantages_B = np.array([1.0, -1.0, 0.5, -0.5], np.float32)
    flags = ["--plugin", "grpo", "--lr", "1e-3"]
    one, two = (train_step(samples(), advantages_B, model=MODEL, flags=flags, ranks=ranks) for ranks in (1, 2))
    start = load_file(MODEL / "model.safetensors")
    assert one.weights.keys() == start.keys()
    assert any((weight - start[name].float()).abs().max() > 1e-4 for name, weight in one.weights.items())
    assert all((weight - two.weights[name]).abs().max() < 1e-5 for name, weight in one.weights.items())
    assert one.metrics["train/grad_norm"] == pytest.approx(two.metrics["train/grad_norm"], rel=1e-4)


def test_a_rank_that_fails_ends_the_step_with_its_error(tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    with pytest.raises(RunError, match=r"learner ranks \[0\] "):
        train_step(samples(), np.zeros(4, np.float32), model=model, flags=["--plugin", "grpo"])
