"""Settings written for people, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from slime_core.config.explain import explain, help_page, help_topic, to_toml
from slime_core.config.load import Resolved, load
from slime_core.config.schema import DEMO_DEFAULTS
from slime_core.config.settings import core_settings
from slime_core.errors import ConfigError


class Options(BaseModel):
    """Options of a plugin called toy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    strength: float | None = Field(default=1.0, description="How much. None: not at all.")
    words: tuple[str, ...] = Field(default=(), description="Words.")


TOY = {"toy": Options}


def resolve(*argv: str, **layers: Any) -> Resolved:
    return load(argv, plugin_options=TOY, check_rules=False, **layers)


def again(resolved: Resolved, folder: Path, **layers: Any) -> Resolved:
    path = folder / "config.toml"
    path.write_text(to_toml(resolved), encoding="utf-8")
    return resolve("--config", str(path), **layers)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--eval-interval none --eval-prompt-data none --label-key none",
        "--hf-checkpoint model --prompt-data data.jsonl --eval-prompt-data a a.jsonl --plugin grpo ./mine.py",
        "--toy.strength none --toy.words a b --lr 3e-5 --no-save-hf --eps-clip-high 0.28",
    ],
)
def test_the_written_file_resolves_to_the_same_settings(line: str, tmp_path: Path) -> None:
    resolved = resolve(*line.split())
    repeated = again(resolved, tmp_path)
    assert repeated.config == resolved.config
    assert repeated.plugin_options == resolved.plugin_options


def test_files_that_engines_read_are_written_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").touch()
    (tmp_path / "groups.toml").write_text(
        "[[engine.engine_groups]]\nnum_gpus = 1\noverrides = { chat_template = './chat.jinja' }\n"
    )
    argv = "--config groups.toml --sglang-chat-template chat.jinja --sglang-served-model-name no/file.here"
    written = to_toml(resolve(*argv.split()))
    assert written.count(f"chat_template = '{tmp_path}/chat.jinja'") + written.count(f'"{tmp_path}/chat.jinja"') == 2
    assert "no/file.here" in written
    assert str(tmp_path / "no") not in written


def test_the_written_file_says_where_each_value_came_from() -> None:
    lines = to_toml(resolve("--seed", "7")).splitlines()
    assert "seed = 7  # flag --seed" in lines
    assert f"lr = {DEMO_DEFAULTS['lr']}  # built-in demo" in lines
    assert any(line.startswith("# ray_address ") for line in lines)


@pytest.mark.parametrize("name", ["lr", "--lr", "optimizer.lr"])
def test_a_setting_is_explained_by_any_of_its_names(name: str) -> None:
    first, *rows, _ = explain(name, resolve("--lr", "0.5")).splitlines()
    assert first == "optimizer.lr = 0.5"
    assert {row.split()[0]: row.split()[1:] for row in rows if not row.startswith("  accepts")} == {
        "from": ["flag", "--lr"],
        "default": ["1e-06"],
        "flag": ["--lr", "X"],
        "file": ["[optimizer]", "lr"],
    }


def test_explaining_what_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--lr-warmup-iter: .* lr_warmup_iters"):
        explain("--lr-warmup-iter", resolve())


def test_the_short_help_names_every_setting_on_few_narrow_lines() -> None:
    lines = help_page("run").splitlines()
    words = set(" ".join(lines).split())
    assert {setting.flag for setting in core_settings().values()} <= words
    # The few that most runs set have a line each, the others share lines: two lines describe at least three settings.
    assert len(lines) < 0.67 * len(core_settings())
    assert max(map(len, lines)) <= 100


def test_plugin_options_appear_in_help_when_the_plugin_is_named() -> None:
    assert "--toy.strength" not in help_page("run")
    assert "--toy.strength X" in help_page("run", TOY)
    assert "None: not at all. [1]" in help_topic("toy", TOY)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ref_load", ["  needs    use_kl_loss or kl_coef"]),
        ("lr_decay_style", ["  needs    lr_wsd_decay_iters if it is WSD"]),
        ("use_unbiased_kl", ["  needs    use_kl_loss", "  excludes kl_loss_type = k2"]),
        ("max_tokens_per_gpu", ["  excludes micro_batch_size unless hard_token_budget"]),
    ],
)
def test_conditions_are_explained(name: str, rows: list[str]) -> None:
    assert [line for line in explain(name, resolve()).splitlines() if line[2:].startswith(("needs", "excl"))] == rows


def test_a_consent_to_one_start_is_written_as_a_remark_that_no_later_start_reads(tmp_path: Path):
    resolved = resolve("--allow-plugin-change")
    assert resolved.config.run.allow_plugin_change is True
    text = to_toml(resolved)
    assert "# allow_plugin_change = true  # flag --allow-plugin-change;" in text
    (tmp_path / "written.toml").write_text(text)
    assert resolve("--config", str(tmp_path / "written.toml")).config.run.allow_plugin_change is False
