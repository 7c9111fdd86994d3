"""Auxiliary models: where user code finds them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_compat import get_model_url
from slime_core.errors import ConfigError
from slime_core.generation import GenerateContext

URLS = {"judge": "http://127.0.0.1:4000/", "teacher": "http://127.0.0.1:4001"}


def test_a_generate_function_finds_a_model_by_its_name():
    context = GenerateContext(None, None, models=URLS)  # type: ignore[arg-type]
    assert context.model_url("judge") == "http://127.0.0.1:4000"
    assert context.model_url("teacher", "/generate") == "http://127.0.0.1:4001/generate"


def test_a_function_of_slimes_users_finds_it_in_args():
    args = SimpleNamespace(sglang_model_routers={"judge": ("127.0.0.1", 4000)})
    assert get_model_url(args, "judge") == "http://127.0.0.1:4000/generate"
    assert get_model_url(args, "judge", "/v1/chat/completions") == "http://127.0.0.1:4000/v1/chat/completions"


@pytest.mark.parametrize(("models", "served"), [({}, "none"), (URLS, "judge, teacher")])
def test_a_model_that_the_run_does_not_serve_is_named(models, served):
    message = (
        rf"No auxiliary model is called 'jugde'; the run serves: {served}\. Add it as a table "
        r"\[\[engine\.engine_models\]\] with name and model_path\."
    )
    with pytest.raises(ConfigError, match=message):
        GenerateContext(None, None, models=models).model_url("jugde")  # type: ignore[arg-type]
