"""Our own policy losses and corrections, held to the contract by the kit that plugin authors use."""

from slime_core.testing import CorrectionSuite, PolicyLossSuite


class TestClipped(PolicyLossSuite):
    component = "clipped"


class TestSft(PolicyLossSuite):
    component = "sft"


class TestGspo(PolicyLossSuite):
    component = "gspo"


class TestCispo(PolicyLossSuite):
    component = "cispo"


class TestTis(CorrectionSuite):
    component = "tis"
