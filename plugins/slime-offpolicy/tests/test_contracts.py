"""The off-policy corrections, held to the contract by the kit that plugin authors use."""

from slime_testing import CorrectionSuite


class TestTis(CorrectionSuite):
    component = "tis"


class TestIcePop(CorrectionSuite):
    component = "icepop"


class TestMaskedImportanceSampling(CorrectionSuite):
    component = "mis"


class TestVeto(CorrectionSuite):
    component = "veto"


class TestOffPolicySequenceMasking(CorrectionSuite):
    component = "opsm"
