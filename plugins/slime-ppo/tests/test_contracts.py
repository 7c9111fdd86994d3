"""The components of the plugin, held to their contracts by the kit that plugin authors use."""

from slime_testing import AdvantageEstimatorSuite, TokenAdvantageEstimatorSuite


class TestReinforcePlusPlusBaseline(AdvantageEstimatorSuite):
    component = "reinforce_plus_plus_baseline"


class TestPpo(TokenAdvantageEstimatorSuite):
    component = "ppo"


class TestReinforcePlusPlus(TokenAdvantageEstimatorSuite):
    component = "reinforce_plus_plus"
