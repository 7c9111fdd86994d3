"""Our own advantage estimators, held to the contract by the kit that plugin authors use."""

from slime_testing import AdvantageEstimatorSuite, TokenAdvantageEstimatorSuite


class TestReinforcePlusPlusBaseline(AdvantageEstimatorSuite):
    component = "reinforce_plus_plus_baseline"


class TestPpo(TokenAdvantageEstimatorSuite):
    component = "ppo"


class TestReinforcePlusPlus(TokenAdvantageEstimatorSuite):
    component = "reinforce_plus_plus"


class TestSft(AdvantageEstimatorSuite):
    component = "sft"
