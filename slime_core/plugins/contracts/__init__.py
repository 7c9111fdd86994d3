"""Contracts of components: one Protocol a kind, and the records that they take and return.

Every target is called once, as ``Target(options, run)``: with the plugin's options object (None where the plugin has no
options) and a :class:`RunView`. The result is used for the whole run. numpy and torch appear in annotations only, so
that importing this package stays cheap.
"""

from slime_core.plugins.contracts import learning, rollouts, run
from slime_core.plugins.contracts.learning import *
from slime_core.plugins.contracts.rollouts import *
from slime_core.plugins.contracts.run import *

__all__ = learning.__all__ + rollouts.__all__ + run.__all__
