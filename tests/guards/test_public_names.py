from __future__ import annotations

from inspect import ismodule

import slime_core


def test_all_is_exactly_what_the_package_offers():
    # A room that something has imported stands in the package's namespace as a module.
    public = {name for name, value in vars(slime_core).items() if not (name.startswith("_") or ismodule(value))}
    # PluginOptions is imported on first use, because it needs pydantic.
    assert public | {"__version__", "PluginOptions"} == set(slime_core.__all__)
    assert all(hasattr(slime_core, name) for name in slime_core.__all__)
    assert sorted(slime_core.__all__) == sorted(set(slime_core.__all__))
