"""Every flag of slime's command line has a decision, and a command that gives the flag reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.flags import metrics, page
from slime_compat.flags import BEYOND, SlimeFlag, groups, slime_flags
from slime_compat.launch_flags import checks
from slime_core.config.engine_flags import Refusal, find_flag
from slime_core.config.load import load
from slime_core.config.settings import core_settings, plugin_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import load_plugins

DOCS = Path(__file__).parents[3] / "docs"
ROWS = list(slime_flags().values())


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag of the core, of plugins and of engines."""
    settings = [*core_settings().values(), *plugin_settings(load_plugins().options).values()]
    engines = {row.flag for row in ROWS if isinstance(find_flag(row.flag), tuple)}
    return {setting.flag for setting in settings} | engines | {"--no-grpo.std-normalization"}


def named(*verdicts: str) -> list[SlimeFlag]:
    return [row for row in ROWS if row.verdict in verdicts]


def test_the_table_holds_the_237_flags_of_slimes_parser_once_each() -> None:
    assert sum(len(rows) for group, rows in groups().items() if group not in BEYOND) == 237
    assert len(ROWS) == sum(len(rows) for rows in groups().values())


def test_every_flag_is_as_the_table_says(flags: set[str]) -> None:
    assert [row.flag for row in named("kept") if row.flag not in flags] == []
    assert [row.flag for row in named("renamed") if row.text.split()[0].rstrip(",") not in flags] == []
    assert [row.flag for row in named("renamed", "refused", "later") if row.flag in flags] == []
    assert {row.flag for row in named("no effect")} <= checks().keys()
    assert [row.flag for row in ROWS if row.verdict != "kept" and not row.text] == []


@pytest.mark.parametrize("row", named("renamed", "refused", "later"), ids=lambda row: row.flag)
def test_a_flag_that_is_not_kept_is_an_error_with_the_decision_and_nothing_else(row: SlimeFlag) -> None:
    with pytest.raises(ConfigError) as caught:
        load([row.flag, "1"], check_rules=False)
    assert str(caught.value).splitlines()[1:-1] == [f"  - {Refusal(row.message).given(['1'])}"]
    assert row.text in row.message


@pytest.mark.parametrize(
    ("flag", "verdict", "instead"),
    [
        ("--balance-data", "no effect", ["--balance-by-flops"]),
        ("--log-probs-max-tokens-per-gpu", "no effect", ["--log-probs-chunk-size"]),
        ("--loss-type", "no effect", ["--advantage-estimator", "--custom-loss-function-path"]),
        ("--eval-tool-key", "later", ["--tool-key"]),
        ("--load-forge-rollout-data", "refused", ["--load-debug-rollout-data"]),
        ("--seq-length", "no effect", ["--sglang-context-length"]),
    ],
)
def test_the_advice_of_a_flag_names_flags_that_exist(flags, flag: str, verdict: str, instead: list[str]) -> None:
    row = slime_flags()[flag]
    assert row.verdict == verdict
    assert [word for word in row.text.split() if word.startswith("--")] == instead
    assert set(instead) <= flags


def test_a_key_of_a_file_is_refused_with_the_decision_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[rollout]\nrollout_seed = 1\n")
    with pytest.raises(ConfigError, match=r"run\.toml:2 .rollout. rollout_seed"):
        load(["--config", str(tmp_path / "run.toml")], check_rules=False)


def test_slimes_metrics_lead_to_metrics_that_are_explained() -> None:
    explained = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert [ours for _, ours, _ in metrics() if ours and f"`{ours}`" not in explained] == []
    assert [theirs for theirs, ours, text in metrics() if not ours and not text] == []


def test_the_page_is_the_table() -> None:
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == page(), "run: python -m docs.flags docs/flags.md"
