"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell without job control starts background commands with Ctrl-C ignored, and children inherit that: runs that the
# tests start could then not be interrupted. A handler of our own gives every child the default again.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run several at a time: threads of one operation that wait for each other take the cores from the rest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no clock: what a busy machine holds up is no finding.
settings.register_profile("slime", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slime")


ON_ONE_ENGINE = {
    f"tests/e2e/test_{name}.py"
    for name in ("async", "evaluation", "examples", "lifecycle", "over_sampling", "parity", "ppo", "third_party")
}
"""Files whose runs take the engine of tests/e2e/conftest.py::external: one process runs them, so that one starts."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes files, as ``--dist loadfile`` does."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "one engine" if file in ON_ONE_ENGINE else file

    return Scheduling(config, log)


class _PatchesFirst:
    """Patches Megatron when a process of the tests first imports it: every file that does so may come first, and
    modules that were imported without the patches cannot get them later."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("megatron.core", "mbridge"):
            return None
        from slime_core.modeling import prepare_megatron

        sys.meta_path.remove(self)
        prepare_megatron()
        return next(filter(None, (finder.find_spec(fullname, path, target) for finder in sys.meta_path)), None)


sys.meta_path.insert(0, _PatchesFirst())
