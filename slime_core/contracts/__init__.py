"""Contracts of components: one Protocol a kind, and the records that they take and return.

A component is built once and used for the whole run. Its class may name ``options`` (the plugin's options object, or
None) and ``run`` (a :class:`RunView`) in its constructor. numpy and torch appear in annotations only, so importing this
package is cheap.
"""

from slime_core.contracts import learning, rollouts, run
from slime_core.contracts.learning import *
from slime_core.contracts.rollouts import *
from slime_core.contracts.run import *

__all__ = learning.__all__ + rollouts.__all__ + run.__all__
