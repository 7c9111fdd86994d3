"""Installed distributions give advice on flags that the core does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_core.config.engine_flags import flag_advice
from slime_core.config.load import load
from slime_core.errors import ConfigError

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, code)``: a distribution of that name, whose ``advice`` is in ``code``."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, code: str) -> None:
        (tmp_path / f"{name}_advice.py").write_text(code)
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[slime.flag_advice]\n{name} = {name}_advice:advice\n")
        sys.modules.pop(f"{name}_advice", None)
        flag_advice.cache_clear()

    yield make
    flag_advice.cache_clear()


def test_an_unknown_flag_gets_the_advice_of_a_distribution(install):
    install("acme", "def advice():\n    return {'--acme-rate': '--acme-rate is --lr'}\n")
    with pytest.raises(ConfigError, match=r"\n  - --acme-rate is --lr\n"):
        load(["--acme-rate", "1"], check_rules=False)


def test_a_flag_with_a_check_is_accepted_where_it_is_true_of_the_model(install):
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


def test_of_two_distributions_the_first_by_name_gives_the_advice(install):
    install("zulu", "def advice():\n    return {'--rate': 'zulu'}\n")
    install("acme", "def advice():\n    return {'--rate': 'acme'}\n")
    assert flag_advice()["--rate"] == "acme"


def test_a_setting_of_the_core_needs_no_advice(install):
    install("acme", "raise RuntimeError('this must not be imported')\n")
    assert load(["--lr", "0.5"], check_rules=False).config.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def advice():\n    return ['--rate']\n", r"\['--rate'\]"),
        ("def advice(): raise ValueError('no table')\n", "ValueError: no table"),
        ("", "AttributeError"),
    ],
)
def test_a_function_that_gives_no_advice_is_named(install, code, found):
    install("acme", code)
    with pytest.raises(ConfigError, match=rf"acme_advice:advice .*slime\.flag_advice .*{found}"):
        flag_advice()
