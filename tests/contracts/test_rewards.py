"""Our own reward models, held to the contract by the kit that plugin authors use."""

from slime_testing import RewardModelSuite


class TestExactMatch(RewardModelSuite):
    component = "exact_match"


class TestRandom(RewardModelSuite):
    component = "random"


class TestZero(RewardModelSuite):
    component = "zero"

    def test_the_examples_get_different_rewards(self) -> None:
        """``zero`` gives every sample the same reward by design."""
        assert self._scored(self._samples()) == [0.0] * len(self._samples())
