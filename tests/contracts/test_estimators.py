"""Our own advantage estimators, held to the contract by the kit that plugin authors use."""

from slime_testing import AdvantageEstimatorSuite, TokenAdvantageEstimatorSuite


class TestGrpo(AdvantageEstimatorSuite):
    component = "grpo"


class TestDrGrpo(AdvantageEstimatorSuite):
    component = "dr_grpo"


class TestRloo(AdvantageEstimatorSuite):
    component = "rloo"


class TestGspo(AdvantageEstimatorSuite):
    component = "gspo"


class TestCispo(AdvantageEstimatorSuite):
    component = "cispo"


class TestReinforcePlusPlusBaseline(AdvantageEstimatorSuite):
    component = "reinforce_plus_plus_baseline"


class TestPpo(TokenAdvantageEstimatorSuite):
    component = "ppo"


class TestReinforcePlusPlus(TokenAdvantageEstimatorSuite):
    component = "reinforce_plus_plus"


class TestSft(AdvantageEstimatorSuite):
    component = "sft"
