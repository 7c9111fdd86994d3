"""Where the models beside the policy answer: a frozen teacher, a judge, a reward model."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.errors import ConfigError

__all__ = ["model_url"]


def model_url(models: Mapping[str, str], name: str, endpoint: str = "") -> str:
    """The address of model ``name``, followed by ``endpoint``.

    Example: ``model_url({"judge": "http://127.0.0.1:4000"}, "judge", "/generate")`` is
    ``"http://127.0.0.1:4000/generate"``.

    Arguments:
        models: name -> URL, as ``GenerateContext.models`` and ``SamplerSettings.model_urls`` hold it.

    Raises:
        ConfigError: the run serves no such model.
    """
    if name not in models:
        raise ConfigError(
            f"Asked for the address of model {name!r}; the run serves {', '.join(sorted(models)) or 'none'} beside the "
            "policy. Name it in a table [[engine.engine_models]] with its model_path."
        )
    return models[name].rstrip("/") + endpoint
