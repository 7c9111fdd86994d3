"""The core's advantage estimator, held to the contract by the kit that plugin authors use."""

from slime_testing import AdvantageEstimatorSuite


class TestSft(AdvantageEstimatorSuite):
    component = "sft"
