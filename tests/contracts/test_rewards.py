"""Our own reward models, held to the contract by the kit that plugin authors use."""

from slime_testing import RewardModelSuite


class TestExactMatch(RewardModelSuite):
    component = "exact_match"


class TestRandom(RewardModelSuite):
    component = "random"


class TestSearchR1(RewardModelSuite):
    component = "search_r1"
    label = '["42", "forty-two"]'
    responses = ("<answer>42</answer>", "<answer>Forty two</answer>", "<answer>7</answer>", "42", "<answer>42", "")


class TestZero(RewardModelSuite):
    component = "zero"

    def test_the_examples_get_different_rewards(self) -> None:
        """They get none: that is what the component is for."""
        assert self._scored(self._samples()) == [0.0] * len(self._samples())
