"""Megatron's and SGLang's own flags: found by name, read by type, refused with the reason, passed on as given."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import explain, help_topic
from slime_core.config.layout_rules import REARRANGING, rearranges_weights
from slime_core.config.load import load
from slime_core.config.schema import RunConfig
from slime_core.config.tables import rows
from slime_core.errors import ConfigError
from tests.unit.config.broken import refused


def config_of(line: str) -> RunConfig:
    return load(line.split(), check_rules=False).config


def test_megatrons_flags_become_fields_of_its_configs() -> None:
    config = config_of(
        "--recompute-granularity selective --recompute-modules core_attn mlp --decoupled-lr 1e-5"
    ).megatron
    assert config.transformer == {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    assert config.optimizer == {"decoupled_lr": 1e-5}


def test_a_switch_of_megatrons_parser_sets_what_it_stands_for() -> None:
    assert config_of("--recompute-activations").megatron.transformer == {"recompute_granularity": "selective"}
    assert config_of("--no-recompute-activations").megatron.transformer == {}


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("--sglang-attention-backend triton", ("--attention-backend=triton",)),
        ("--sglang-disable-radix-cache", ("--disable-radix-cache",)),
        ("--sglang-disable-radix-cache false", ()),
        ("--sglang-enable-tf32-matmul", ("--enable-tf32-matmul",)),
        ("--sglang-no-enable-tf32-matmul", ("--no-enable-tf32-matmul",)),
        ("--no-sglang-enable-tf32-matmul", ("--no-enable-tf32-matmul",)),
        ("--sglang-max-total-tokens 32k", ("--max-total-tokens=32000",)),
        ("--sglang-max-total-tokens 1Ki", ("--max-total-tokens=1024",)),
        ("--sglang-gc-threshold 700 10", ("--gc-threshold", "700", "10")),
        ("--sglang-data-parallel-size 2", ("--dp-size=2",)),
        ("--sglang-log-requests-level 3", ("--log-requests-level=3",)),
        ('--sglang-preferred-sampling-params {"top_k":5}', ('--preferred-sampling-params={"top_k":5}',)),
    ],
)
def test_sglangs_flags_become_arguments_of_its_server(line: str, arguments: tuple[str, ...]) -> None:
    assert config_of(line).sglang.arguments == arguments


def test_flags_that_are_settings_of_the_core_stay_so() -> None:
    config = config_of("--sglang-mem-fraction-static 0.4 --sglang-context-length 64")
    assert (config.engine.sglang_mem_fraction_static, config.engine.sglang_context_length) == (0.4, 64)
    assert config.sglang.given == ()


@pytest.mark.parametrize(
    ("text", "place", "names"),
    [
        ("[megatron]\nrecompute_granularty = 'full'", "[megatron] recompute_granularty: ", " recompute_granularity?"),
        ("[sglang]\nlog_levl = 'info'", "[sglang] log_levl: ", " log_level?"),
        ("[sglang]\nhost = '0.0.0.0'", "[sglang] host: ", "SGLang"),
        ("[sglang]\ngc_threshold = 3", "[sglang] gc_threshold: ", " 3;"),
        ("[megatron]\nlr = 1e-3", "[megatron] lr: ", "[optimizer]"),
        ("[model]\ndecoupled_lr = 1e-5", "[model] decoupled_lr: ", "[megatron]"),
        ("[engine]\nsglang_log_level = 'info'", "[engine] sglang_log_level: ", "[sglang] as log_level"),
    ],
)
def test_a_mistake_in_a_file_says_where(text: str, place: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    (mistake,) = refused("--config", str(path))
    assert str(mistake).startswith(f"run.toml:2 {place}")
    assert names in str(mistake)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "megatron.recompute_granularity",
            ["megatron.recompute_granularity = full", "  from     flag --recompute-granularity"],
        ),
        ("--recompute-method", ["megatron.recompute_method = (not given)", "  from     default"]),
        ("sglang.log_level", ["sglang.log_level = (not given)"]),
        ("--sglang-log-level", ["  file     [sglang] log_level"]),
        ("tensor_model_parallel_size", ["parallel.tensor_model_parallel_size = 1"]),
    ],
)
def test_an_engines_flag_is_explained_by_any_of_its_names(name: str, lines: list[str]) -> None:
    explained = explain(name, load(["--recompute-granularity", "full"], check_rules=False)).splitlines()
    assert [line for line in lines if line not in explained] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("--sglang-port", "--sglang-port: .*SGLang"),
        ("megatron.fp8", "--fp8: .*TransformerEngine"),
        ("release_train", "--release-train: .*not built"),
    ],
)
def test_explaining_a_refused_flag_gives_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explain(name, load([], check_rules=False))


def test_help_lists_the_engines_flags_only_on_request() -> None:
    assert "--recompute-method" not in help_topic("all")
    assert "  --recompute-method NAME " in help_topic("megatron")
    assert "--fp8 " not in help_topic("megatron")
    assert "  --sglang-log-level NAME " in help_topic("sglang")
    assert "--sglang-port" not in help_topic("sglang")


def test_the_order_of_flags_does_not_matter() -> None:
    first, second = "--sglang-log-level info --recompute-activations", "--sglang-page-size 1 --decoupled-lr 1e-5"
    assert config_of(f"{first} {second}") == config_of(f"{second} {first}")


def test_attention_in_parallel_copies_is_passed_on() -> None:
    line = ["--advantage-estimator", "grpo", "--sglang-dp-size", "2", "--sglang-enable-dp-attention"]
    assert load(line).config.sglang.arguments == ("--dp-size=2", "--enable-dp-attention")


@pytest.mark.parametrize(
    ("line", "rearranged"),
    [
        ("", False),
        ("--sglang-attention-backend triton", False),
        ("--sglang-quantization fp8", True),
        ("--sglang-ep-size 2", True),
        ("--sglang-ep-size 1 --sglang-moe-runner-backend triton", False),
        ("--sglang-enable-dp-attention --sglang-dp-size 2", True),
        ("--sglang-enable-dp-attention false", False),
        ("--sglang-moe-runner-backend auto --sglang-moe-a2a-backend none", False),
        ("--sglang-moe-runner-backend flashinfer_trtllm", True),
        ("--rollout-external-engine-addrs 10.0.0.1:30000", True),
    ],
)
def test_flags_that_change_how_an_engine_holds_its_weights_are_known(line: str, rearranged: bool) -> None:
    assert rearranges_weights(config_of(line)) is rearranged


def test_every_flag_that_rearranges_weights_is_one_of_sglangs() -> None:
    assert {row.name for row in rows("sglang")} >= REARRANGING
