"""Megatron's and SGLang's own flags: found by name, read by type, refused with the reason, passed on as given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_core.cli.activation import prepare_flags
from slime_core.cli.main import main
from slime_core.config.engine_flags import flag_advice, use_advice
from slime_core.config.explain import explain, help_topic
from slime_core.config.layout_rules import rearranges_weights
from slime_core.config.load import load
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.discovery import local_file
from slime_core.plugins.registry import register
from tests.unit.config.broken import refused


def config_of(line: str) -> RunConfig:
    return load(line.split(), check_rules=False).config


@pytest.mark.parametrize(
    ("line", "part", "fields"),
    [
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            "transformer",
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        ),
        ("--decoupled-lr 1e-5", "optimizer", {"decoupled_lr": 1e-5}),
        ("--recompute-activations", "transformer", {"recompute_granularity": "selective"}),
        ("--no-recompute-activations", "transformer", {}),
        ("--overlap-grad-reduce", "ddp", {"overlap_grad_reduce": True}),
        ("--no-overlap-grad-reduce", "ddp", {"overlap_grad_reduce": False}),
    ],
)
def test_megatrons_flags_become_fields_of_its_configs(line: str, part: str, fields: dict[str, object]) -> None:
    megatron = config_of(line).megatron
    for name in ("transformer", "optimizer", "ddp"):
        assert getattr(megatron, name) == (fields if name == part else {})


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("--sglang-attention-backend triton", ("--attention-backend=triton",)),
        ("--sglang-disable-radix-cache", ("--disable-radix-cache",)),
        ("--sglang-disable-radix-cache false", ()),
        ("--sglang-enable-tf32-matmul", ("--enable-tf32-matmul",)),
        ("--sglang-no-enable-tf32-matmul", ("--no-enable-tf32-matmul",)),
        ("--sglang-max-total-tokens 32k", ("--max-total-tokens=32k",)),
        ("--sglang-schedule-conservativeness 0.5", ("--schedule-conservativeness=0.5",)),
        ("--sglang-gc-threshold 700 10", ("--gc-threshold", "700", "10")),
        ("--sglang-data-parallel-size 2", ("--dp-size=2",)),
        ("--sglang-log-requests-level 3", ("--log-requests-level=3",)),
        ('--sglang-preferred-sampling-params {"top_k":5}', ('--preferred-sampling-params={"top_k":5}',)),
    ],
)
def test_sglangs_flags_become_arguments_of_its_server(line: str, arguments: tuple[str, ...]) -> None:
    assert config_of(line).sglang.arguments == arguments


@pytest.mark.parametrize(
    ("text", "place", "names"),
    [
        ("[megatron]\nrecompute_granularty = 'full'", "[megatron] recompute_granularty: ", " recompute_granularity?"),
        ("[sglang]\nhost = '0.0.0.0'", "[sglang] host: ", "SGLang"),
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
    ("name", "names"),
    [
        ("--sglang-port", ["--sglang-port: ", "SGLang"]),
        ("release_train", ["--release-train: "]),
    ],
)
def test_explaining_a_refused_flag_gives_the_reason_that_slime_or_a_plugin_knows(
    name: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "explain", name]) == 2
    message = capsys.readouterr().err
    assert [part for part in names if part not in message] == []


def test_help_lists_the_engines_flags_only_on_request() -> None:
    assert "--recompute-method" not in help_topic("all")
    assert "  --recompute-method NAME " in help_topic("megatron")
    assert "--fp8 " not in help_topic("megatron")


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


# --- Advice of plugins ------------------------------------------------------------------------------------------------


Install = Callable[[str, str], None]
PLUGIN = """
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.flag_advice("{name}_advice:advice")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, code)``: load a plugin of that name, whose ``advice`` is in ``code``."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins = []

    def make(name: str, code: str) -> None:
        (tmp_path / f"{name}_advice.py").write_text(code)
        sys.modules.pop(f"{name}_advice", None)
        plugins.append(local_file(PLUGIN.format(name=name).encode(), path=f"{name}.py"))
        prepare_flags(register(plugins))

    yield make
    use_advice([])


def test_an_unknown_flag_gets_the_advice_of_a_plugin(install: Install) -> None:
    install("acme", "def advice():\n    return {'--acme-rate': '--acme-rate is --lr'}\n")
    with pytest.raises(ConfigError, match=r"\n  - --acme-rate is --lr\n"):
        load(["--acme-rate", "1"], check_rules=False)


def test_a_flag_with_a_check_is_accepted_if_it_is_true_of_the_model(install: Install) -> None:
    code = (
        "def check(words, model):\n    layers = model['num_hidden_layers']\n"
        "    return None if words == [str(layers)] else f'there are {layers}'\n"
        "def advice():\n    return {'--acme-layers': check}\n"
    )
    install("acme", code)
    plain = ["--advantage-estimator", "grpo"]
    assert load([*plain, "--acme-layers", "3"]).config == load(plain).config
    with pytest.raises(ConfigError, match=r"\n  - --acme-layers 5: there are 3\n"):
        load([*plain, "--acme-layers", "5"])


def test_of_two_plugins_the_first_gives_the_advice(install: Install) -> None:
    install("acme", "def advice():\n    return {'--rate': 'acme'}\n")
    install("zulu", "def advice():\n    return {'--rate': 'zulu'}\n")
    assert flag_advice()["--rate"] == "acme"


@pytest.mark.parametrize(
    "code",
    [
        "def advice():\n    return ['--rate']\n",
        "def advice():\n    return {'--rate': 3}\n",
        "def advice(): raise ValueError('no table')\n",
        "",
    ],
)
def test_a_function_that_gives_no_advice_is_named(install: Install, code: str) -> None:
    install("acme", code)
    with pytest.raises(PluginError, match="acme_advice:advice"):
        flag_advice()


def test_flags_that_are_settings_of_the_core_stay_so() -> None:
    config = config_of("--sglang-mem-fraction-static 0.4 --sglang-context-length 64")
    assert (config.engine.sglang_mem_fraction_static, config.engine.sglang_context_length) == (0.4, 64)
    assert config.sglang.given == ()


@pytest.mark.parametrize("line", ["--sglang-port 1", "--sglang-no-use-ray", "--sglang-tp-size 2"])
def test_what_slime_sets_is_not_passed_on(line: str) -> None:
    (mistake,) = refused(*line.split())
    assert str(mistake).startswith(line.split()[0])
