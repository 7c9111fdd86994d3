"""Our own policy losses, held to the contract by the kit that plugin authors use."""

from slime_testing import PolicyLossSuite


class TestClipped(PolicyLossSuite):
    component = "clipped"


class TestSft(PolicyLossSuite):
    component = "sft"
