"""Our own reward models, held to the contract by the kit that plugin authors use."""

from collections.abc import Iterator
from typing import Any

import pytest

from slime_core.config.schema import RolloutConfig, RunConfig
from slime_testing import RewardModelSuite
from tests.answering import Answering, chat, embedding

URLS: list[str] = []
"""Where reward models that ask somebody are answered while these tests run."""


@pytest.fixture(scope="module", autouse=True)
def answering() -> Iterator[None]:
    """A service, a reward model and a judge that find responses right which hold 42."""
    with Answering(answer) as service:
        URLS.append(service.url)
        yield


def answer(body: dict[str, Any]) -> Any:
    if "messages" in body:
        asked = body["messages"][0]["content"].partition("Answer to judge:\n")[2].partition("Correct answer")[0]
        return chat(f"Score: {10 * ('42' in asked)}")
    if "input" in body:
        return embedding(float("42" in body["input"]))
    return float("42" in body["response"])


class TestExactMatch(RewardModelSuite):
    component = "exact_match"


class TestRandom(RewardModelSuite):
    component = "random"


class TestSearchR1(RewardModelSuite):
    component = "search_r1"
    label = '["42", "forty-two"]'
    responses = ("<answer>42</answer>", "<answer>Forty two</answer>", "<answer>7</answer>", "42", "<answer>42", "")


class TestRemoteRm(RewardModelSuite):
    component = "remote_rm"

    @classmethod
    def make(cls, **more: Any) -> Any:
        return cls.subject().target(RunConfig(rollout=RolloutConfig(rm_url=URLS[0])), **more)


class TestServedRm(RewardModelSuite):
    component = "served_rm"

    @classmethod
    def make(cls, **more: Any) -> Any:
        settings = RunConfig(rollout=RolloutConfig(rm_model="helper"))
        return cls.subject().target(settings, models={"helper": URLS[0]}, **more)


class TestJudge(RewardModelSuite):
    component = "judge"

    @classmethod
    def make(cls, **more: Any) -> Any:
        settings = RunConfig(rollout=RolloutConfig(rm_model="helper"))
        return cls.subject().target(settings, models={"helper": URLS[0]}, **more)


class TestZero(RewardModelSuite):
    component = "zero"

    def test_the_examples_get_different_rewards(self) -> None:
        """They get none: that is what the component is for."""
        assert self._scored(self._samples()) == [0.0] * len(self._samples())
