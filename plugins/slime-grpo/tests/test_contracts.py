"""The components of the plugin, held to their contracts by the kit that plugin authors use."""

from slime_testing import AdvantageEstimatorSuite, PolicyLossSuite, SampleTransformSuite


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


class TestGspoLoss(PolicyLossSuite):
    component = "gspo"


class TestCispoLoss(PolicyLossSuite):
    component = "cispo"


class TestDropZeroStd(SampleTransformSuite):
    component = "drop_zero_std"


class TestMaskTruncated(SampleTransformSuite):
    component = "mask_truncated"


class TestPunishOverlong(SampleTransformSuite):
    component = "punish_overlong"
