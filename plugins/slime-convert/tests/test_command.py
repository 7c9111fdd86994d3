"""The command line of ``slime convert``; what it writes is tested on ranks, in ``tests/engines/test_convert.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_convert.command import main
from slime_convert.conversion import _casts_of
from slime_convert.formats import config_of
from slime_core.cli.main import main as slime
from slime_core.errors import CheckpointError, ConfigError

HEAVY = {"torch", "megatron", "transformers", "mbridge", "safetensors"}


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_conversion_the_command_shows_all_of_them(words, capsys):
    assert slime(["convert", *words]) == 0
    shown = capsys.readouterr().out
    assert all(f"slime convert {name}" in shown for name in ("hf-to-torch-dist", "torch-dist-to-hf", "verify"))


def test_an_unknown_conversion_is_a_message_and_exit_code_two(capsys):
    assert slime(["convert", "to-gguf"]) == 2
    error = capsys.readouterr().err
    for name in ("to-gguf", "hf-to-torch-dist", "torch-dist-to-hf", "verify"):
        assert name in error


def test_help_loads_nothing_heavy():
    program = (
        f"import sys; sys.argv[1:] = ['convert']\n{MAIN}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(done.stdout.splitlines()[-1].split()) & HEAVY


MAIN = "from slime_core.cli.main import main; main()"


def test_two_checkpoints_are_compared_in_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        main(["verify", "a", "b"])


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        config_of(tmp_path)


@pytest.mark.parametrize("dtypes", [["bfloat16"], {"a": "Tensor"}, None])
def test_a_table_of_dtypes_that_is_none_is_refused(tmp_path: Path, dtypes: object):
    (tmp_path / "slime-convert.json").write_text(json.dumps({"dtypes": dtypes}))
    with pytest.raises(CheckpointError, match="dtypes"):
        _casts_of(tmp_path)


def test_a_folder_without_that_table_has_the_dtypes_of_the_model(tmp_path: Path):
    assert _casts_of(tmp_path) == {}
    (tmp_path / "slime-convert.json").write_text('{"dtypes": {"a": "bfloat16"}}')
    assert _casts_of(tmp_path) == {"a": "bfloat16"}
