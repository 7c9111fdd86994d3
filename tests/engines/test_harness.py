"""The real engine of slime_core.harness."""

from __future__ import annotations

from slime_core.generation import SamplingParams
from slime_core.harness.engines import connect, real_engine
from tests.engines.conftest import MODEL


async def test_a_real_engine_answers_and_ends_with_the_block(tmp_path):
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with real_engine(MODEL, logs=tmp_path, dtype="float32") as url:
        async with connect(url, vocab_size=16) as client:
            (answer,) = await client.generate([3, 8, 4], sampling=sampling)
        assert len(answer.token_ids) == len(answer.log_probs) == 3
    assert (tmp_path / "engine.log").stat().st_size > 0
