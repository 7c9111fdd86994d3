from __future__ import annotations

import inspect
import re
from pathlib import Path

import slime_core.plugins
from slime_core import Kind
from slime_core.plugins import hooks


def test_every_kind_is_registered_through_exactly_one_hook():
    assert sorted(hooks.REGISTRATION_HOOKS.values()) == sorted(Kind)


def test_every_hook_takes_no_arguments_and_says_what_it_yields():
    for name in [*hooks.REGISTRATION_HOOKS, "slime_presets", "slime_options"]:
        hook = vars(hooks)[name]
        assert not inspect.signature(hook).parameters
        assert re.match(r"(Yield|Return) ", hook.__doc__)


def test_every_hook_declares_components_or_has_a_place_in_the_lifecycle():
    assert sorted(name for name in vars(hooks) if name.startswith("slime_")) == sorted(hooks.HOOKS)


def test_only_boundary_catches_everything():
    catching = re.compile(r"except\s*(Exception|BaseException|\(Exception)|except\s*:")
    files = Path(slime_core.plugins.__file__).parent.glob("*.py")
    # loading.py holds the boundary; it and neighbours.py remove a half-made module from sys.modules; lifecycle.py tells
    # slime_run_end of a failure and raises again.
    found = {path.name: len(catching.findall(path.read_text())) for path in files}
    assert {name: count for name, count in found.items() if count} == {
        "lifecycle.py": 1,
        "loading.py": 2,
        "neighbours.py": 1,
    }
