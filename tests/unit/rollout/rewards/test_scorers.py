"""A reward model that runs in the sampler: an exception of it ends the run and names it."""

from __future__ import annotations

import pytest

from slime_core.errors import DataError, PluginError, RunError
from slime_core.rollout.reward_scoring import InProcessScorer
from slime_core.types import Sample


class Given:
    """Answers what it is made with, or raises it."""

    def __init__(self, answer):
        self._answer = answer

    async def score(self, samples):
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (ValueError("no answer"), PluginError, "^reward model 'mine': .*ValueError: no answer"),
        (None, PluginError, "^reward model 'mine': .*TypeError: 'NoneType' "),
        (DataError("no label"), DataError, "^no label$"),
        ([1.0], RunError, "^reward model 'mine' .*1 rewards .* 2 samples$"),
    ],
)
async def test_a_reward_model_that_raises_or_returns_nonsense_ends_the_run_and_is_named(answer, kind, message):
    with pytest.raises(kind, match=message):
        await InProcessScorer("mine", Given(answer)).score([Sample(), Sample()])
