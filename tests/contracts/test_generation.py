"""Our own generate functions, held to the contract by the kit that plugin authors use."""

from slime_testing import GenerateFunctionSuite


class TestSingleTurn(GenerateFunctionSuite):
    component = "single_turn"


class TestSingleTurnOfChat(GenerateFunctionSuite):
    component = "single_turn"
    apply_chat_template = True
    answers = ("the answer is 42",)


class TestFromLabel(GenerateFunctionSuite):
    component = "from_label"
