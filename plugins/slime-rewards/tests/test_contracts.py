"""Every reward model, held to the contract by the kit that plugin authors use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from slime_core import RunView
from slime_rewards.options import RewardsOptions
from slime_rewards.services import RemoteReward
from slime_testing import RewardModelSuite
from tests.http_service import HttpService, chat, embedding

URLS: list[str] = []
"""The address of services and models while these tests run."""


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    """A service, a reward model and a judge that accept responses with 42 in them."""
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


class TestMath(RewardModelSuite):
    component = "math"


class Instructed(RewardModelSuite):
    metadata: ClassVar = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    responses = ('"Yes"', '"Yes, no"', "Yes", 'So:\n"Yes"', "")


class TestIfBench(Instructed):
    component = "ifbench"


class TestIfEval(Instructed):
    component = "ifeval"


class TestInstructions(Instructed):
    component = "instructions"


class TestRemoteRm(RewardModelSuite):
    component = "remote_rm"

    @classmethod
    def make(cls, run: RunView | None = None) -> Any:
        return RemoteReward(RewardsOptions(rm_url=URLS[0]), run or RunView())


class Served(RewardModelSuite):
    @classmethod
    def make(cls, run: RunView | None = None) -> Any:
        return super().make(RunView(settings={"rm_model": "helper"}, models={"helper": URLS[0]}))


class TestServedRm(Served):
    component = "served_rm"


class TestJudge(Served):
    component = "judge"
