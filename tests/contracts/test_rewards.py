"""Our own reward models, held to the contract by the kit that plugin authors use."""

from slime_core.testing import RewardModelSuite


class TestExactMatch(RewardModelSuite):
    component = "exact_match"


class TestRandom(RewardModelSuite):
    component = "random"


class TestSearchR1(RewardModelSuite):
    component = "search_r1"
    label = '["42", "forty-two"]'
    responses = ("<answer>42</answer>", "<answer>Forty two</answer>", "<answer>7</answer>", "42", "<answer>42", "")


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


ASKED = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
ANSWERS = ('"Yes"', '"Yes, no"', "Yes", 'So:\n"Yes"', "")


class TestIfBench(RewardModelSuite):
    component = "ifbench"
    metadata = ASKED
    responses = ANSWERS


class TestIfEval(RewardModelSuite):
    component = "ifeval"
    metadata = ASKED
    responses = ANSWERS


class TestInstructions(RewardModelSuite):
    component = "instructions"
    metadata = ASKED
    responses = ANSWERS


class TestMath(RewardModelSuite):
    component = "math"


class TestZero(RewardModelSuite):
    component = "zero"

    def test_the_examples_get_different_rewards(self) -> None:
        """They get none: that is what the component is for."""
        assert self._scored(self._samples()) == [0.0] * len(self._samples())
