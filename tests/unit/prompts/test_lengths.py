"""Processes that count tokens give the counts of this process, name what they cannot count, and end with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError, RunError
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.requests import CHUNK, PromptLengths, RunFilter


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)


@pytest.fixture(scope="module")
def lengths(encoder: PromptEncoder) -> Iterator[PromptLengths]:
    made = PromptLengths(encoder, num_workers=2)
    yield made
    made.close()


def test_prompts_are_counted_in_order_by_several_processes(lengths, encoder):
    prompts = [("1" * (n % 7 + 1), None) for n in range(3 * CHUNK + 5)]
    assert lengths(prompts) == [len(encoder.encode(prompt)) for prompt, _ in prompts]
    assert len(lengths._workers) == 2
    assert lengths([]) == []


def test_a_prompt_that_cannot_be_counted_raises_here_and_the_process_continues(lengths):
    with pytest.raises(DataError, match="--apply-chat-template"):
        lengths([([{"role": "user", "content": "1"}], None)])
    assert lengths([("11", None)]) == [2]


def test_a_process_that_died_is_an_error_with_a_way_out(encoder):
    lengths = PromptLengths(encoder, num_workers=1)
    lengths([("1", None)])
    lengths._workers[0]._process.kill()
    with pytest.raises(RunError, match=r"exit code -9.*--num-data-workers 0"):
        lengths([("1", None)])
    lengths.close()


def test_a_process_ends_with_its_input(encoder):
    command = [sys.executable, "-m", "slime_core.prompts.requests", json.dumps(encoder.arguments)]
    done = subprocess.run(command, input='[["1+1", null], ["22", null]]\n', capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 2]\n"


def test_prompts_are_short_enough_up_to_the_bound():
    class Letters:
        def encode(self, prompt, *, tools):
            return [0] * (len(prompt) + len(tools or ()))

    chosen = RunFilter(longest=2, lengths=PromptLengths(Letters()))
    assert chosen.select([("ab", None), ("abc", None), ("ab", [{}]), ("a", [{}])]) == [True, False, False, True]


def test_left_out_prompts_are_reported_each_time_their_count_doubles():
    left_out = RunFilter()
    left_out.count_left_out("too_long", 3)
    (first,) = left_out.news()
    assert re.match("3 .*--rollout-max-prompt-len", first)
    left_out.count_left_out("too_long", 3)
    assert left_out.news() == []
    left_out.count_left_out("too_long", 1)
    left_out.count_left_out("bad", 1)
    bad, long = left_out.news()
    assert re.match("1 .*--on-bad-data skip", bad)
    assert re.match("7 .*--rollout-max-prompt-len", long)
    assert left_out.metrics() == {"data/left_out/bad": 1.0, "data/left_out/too_long": 7.0}
