"""Every TOML file of the examples is one that ``slime run`` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.plugins.activation import activate

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(path for path in EXAMPLES.rglob("*.toml") if path.name != "pyproject.toml")


def resolve(argv: list[str]) -> Resolved:
    seen = peek(argv)
    active = activate(seen.plugins, choices=seen.choices, flags=seen.flags)
    return load(argv, **active.for_settings, check_rules=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_resolves(path: Path) -> None:
    assert resolve(["--config", str(path)]).config.run.plugins


def test_the_arithmetic_example_is_the_embedded_run_spelt_out() -> None:
    spelt_out = resolve(["--config", str(EXAMPLES / "arithmetic" / "run.toml")])
    embedded = resolve(["--plugin", "grpo"])
    assert (spelt_out.config, spelt_out.plugin_options) == (embedded.config, embedded.plugin_options)


def test_a_run_with_a_real_plugin_is_repeated_by_its_written_file(tmp_path: Path) -> None:
    resolved = resolve(["--plugin", "grpo", "--grpo.std-normalization", "false", "--seed", "3"])
    path = tmp_path / "config.toml"
    path.write_text(to_toml(resolved))
    repeated = resolve(["--config", str(path)])
    assert (repeated.config, repeated.plugin_options) == (resolved.config, resolved.plugin_options)
