"""An advantage estimator with an option: the reward minus a fixed baseline."""

from __future__ import annotations

from slime_core import PluginOptions, Registration, hookimpl


class BaselineOptions(PluginOptions):
    """``--baseline.level``."""

    level: float = 0.5
    """Subtracted from every reward."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.advantage_estimator("fixed_baseline", "acme_baseline.advantage:FixedBaseline", reads={"rewards"})
    add.options(BaselineOptions)
