"""Every reward model, held to the contract by the kit that plugin authors use."""

from collections.abc import Iterator
from typing import Any

import pytest

from slime_core import RunView
from slime_rewards.options import RewardsOptions
from slime_testing import RewardModelSuite
from tests.http_service import HttpService, chat, embedding

URLS: list[str] = []
"""Where services and models answer while these tests run."""


@pytest.fixture(scope="module", autouse=True)
def answering() -> Iterator[None]:
    """A service, a reward model and a judge that find responses right which hold 42."""
    with HttpService(answer) as service:
        URLS.append(service.url)
        yield


def answer(body: dict[str, Any]) -> Any:
    if "messages" in body:
        judged = body["messages"][0]["content"].partition("Answer to judge:\n")[2].partition("Correct answer")[0]
        return chat(f"Score: {10 * ('42' in judged)}")
    if "input" in body:
        return embedding(float("42" in body["input"]))
    return float("42" in body["response"])


class TestBoxedMath(RewardModelSuite):
    component = "boxed_math"


class TestDapo(RewardModelSuite):
    component = "dapo"


class TestDeepScaler(RewardModelSuite):
    component = "deepscaler"


class TestF1(RewardModelSuite):
    component = "f1"


class TestGpqa(RewardModelSuite):
    component = "gpqa"
    label = "B"


INSTRUCTIONS = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
ANSWERS = ('"Yes"', '"Yes, no"', "Yes", 'So:\n"Yes"', "")


class TestIfBench(RewardModelSuite):
    component = "ifbench"
    metadata = INSTRUCTIONS
    responses = ANSWERS


class TestIfEval(RewardModelSuite):
    component = "ifeval"
    metadata = INSTRUCTIONS
    responses = ANSWERS


class TestInstructions(RewardModelSuite):
    component = "instructions"
    metadata = INSTRUCTIONS
    responses = ANSWERS


class TestMath(RewardModelSuite):
    component = "math"


class TestRemoteRm(RewardModelSuite):
    component = "remote_rm"

    @classmethod
    def make(cls, run: RunView | None = None) -> Any:
        subject = cls.subject()
        return subject.target(RewardsOptions(rm_url=URLS[0]), run or RunView())


class TestServedRm(RewardModelSuite):
    component = "served_rm"

    @classmethod
    def make(cls, run: RunView | None = None) -> Any:
        del run
        return super().make(RunView(settings={"rm_model": "helper"}, models={"helper": URLS[0]}))


class TestJudge(RewardModelSuite):
    component = "judge"

    @classmethod
    def make(cls, run: RunView | None = None) -> Any:
        del run
        return super().make(RunView(settings={"rm_model": "helper"}, models={"helper": URLS[0]}))
