"""Every reward model, held to the contract by the kit that plugin authors use."""

from slime_testing import RewardModelSuite


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
