"""The core's sample transforms, held to the contract by the kit that plugin authors use."""

from slime_testing import SampleTransformSuite


class TestDropZeroStd(SampleTransformSuite):
    component = "drop_zero_std"


class TestMaskTruncated(SampleTransformSuite):
    component = "mask_truncated"


class TestPunishOverlong(SampleTransformSuite):
    component = "punish_overlong"
