"""The object of a ``config.json`` as MBridgeSpec reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core import RunView
from slime_core.errors import ConfigError
from slime_core.modeling.spec import transformers_config
from slime_core.types import JsonValue

OWN: dict[str, JsonValue] = {
    "model_type": "acme",
    "auto_map": {"AutoConfig": "configuration_acme.AcmeConfig"},
    "layers": 3,
}
CODE = """
from transformers import PretrainedConfig

class AcmeConfig(PretrainedConfig):
    model_type = "acme"

    def __init__(self, layers=1, **more):
        self.layers = layers
        super().__init__(**more)
"""


def test_fields_that_are_missing_have_the_values_of_transformers():
    given: dict[str, JsonValue] = {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 5e4}
    found = transformers_config(given, RunView())
    assert (found.num_hidden_layers, found.tie_word_embeddings, found.rope_parameters["rope_theta"]) == (2, False, 5e4)
    assert given == {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 5e4}


@pytest.mark.parametrize("settings", [{}, {"trust_remote_code": False}])
def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path, settings: dict[str, JsonValue]):
    with pytest.raises(ConfigError, match=r"model_type 'acme'.*--trust-remote-code"):
        transformers_config(OWN, RunView(model_folder=tmp_path, settings=settings))


def test_the_checkpoint_s_own_code_is_run_where_the_run_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    (tmp_path / "configuration_acme.py").write_text(CODE)
    run = RunView(model_folder=tmp_path, settings={"trust_remote_code": True})
    assert transformers_config(OWN, run).layers == 3
