"""The components of this plugin, held to the contract by the kit that plugin authors use."""

from slime_testing import GenerateFunctionSuite, RewardModelSuite


class TestReward(RewardModelSuite):
    component = "search_r1"
    label = '["42", "forty-two"]'
    responses = ("<answer>42</answer>", "<answer>Forty two</answer>", "<answer>7</answer>", "42", "<answer>42", "")


class TestGenerate(GenerateFunctionSuite):
    component = "search_r1"
