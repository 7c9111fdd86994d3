"""SGLang's parser checks the flags that a run passes on, before anything starts."""

from __future__ import annotations

import pytest

from slime_core.errors import ConfigError
from slime_core.rollout.engines.engine import check_sglang_flags


@pytest.mark.parametrize("flag", ["--log-levl=info", "--log-lev=info", "--page-size=many"])
def test_sglang_refuses_a_flag_that_it_cannot_read(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        check_sglang_flags([flag], "cpu")


def test_sglang_accepts_its_own_flags() -> None:
    check_sglang_flags(["--log-level=info", "--max-total-tokens=32k", "--gc-threshold", "700", "10"], "cpu")
