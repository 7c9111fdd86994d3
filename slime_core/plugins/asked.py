"""Whether somebody is there whom a reward model asks: a service, or a model that the run serves beside the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_core.config.schema import RolloutConfig, RunConfig
from slime_core.config.secrets import secret_names, unset
from slime_core.config.serving import EngineModel
from slime_core.errors import PluginError
from slime_core.plugins.component import Component
from slime_core.plugins.discovery import PluginIdentity, nearest

__all__ = ["check_asked"]


def check_asked(component: Component, plugin: PluginIdentity, *, by: str, config: RunConfig) -> None:
    """Returns if whom the reward model asks is there, as far as the settings say.

    Arguments:
        by: the setting that names it.

    Raises:
        PluginError: a setting that it needs is not given; the run serves no such model, or serves it for something
            else; or a secret that an address names is not in the environment.
    """
    traits: Any = component.traits
    who = f"reward model {component.name!r} of {plugin}"
    named = f"rm_type = {config.rollout.rm_type}" if by == "rm_type" else by
    for setting in sorted(traits.needs):
        if dict(config.rollout)[setting] is None:
            raise PluginError(
                f"{named}: {who} needs {setting}, which is not set. Add --{setting.replace('_', '-')}, or choose "
                "another reward model."
            )
    if "rm_url" in traits.needs:
        _refuse_unset(config.rollout, f"{named}: {who}")
    if "rm_model" in traits.needs:
        _refuse_other_model(traits.asks_for, config, f"{named}: {who}")


def _refuse_unset(rollout: RolloutConfig, who: str) -> None:
    for setting, name in _secrets(rollout):
        for one in unset(name):
            raise PluginError(
                f"{who} is asked with the secret that {setting} names, the environment variable {one}, and it is not "
                "set. Export it before the run, on a cluster in the runtime environment of the job."
            )


def _secrets(rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    if rollout.rm_token_env is not None:
        yield "rm_token_env", rollout.rm_token_env
    for setting, urls in {"rm_url": [rollout.rm_url or ""], "rm_row_urls": rollout.rm_row_urls}.items():
        yield from ((setting, name) for url in urls for name in secret_names(url))


def _refuse_other_model(asks_for: str | None, config: RunConfig, who: str) -> None:
    name, served = str(config.rollout.rm_model), {model.name: model for model in config.engine.engine_models}
    others = ", ".join(f"{one} ({_gives(model)})" for one, model in sorted(served.items())) or "none"
    if name not in served:
        raise PluginError(
            f"{who} asks rm_model = {name}{nearest(name, served)}, and beside the policy the run serves {others}. Name "
            "one of them with --rm-model, or serve it: a table [[engine.engine_models]] with name and model_path."
        )
    if asks_for is not None and _gives(served[name]) != asks_for:
        wanted = "is_embedding = true" if asks_for == "scores" else "is_embedding = false"
        raise PluginError(
            f"{who} asks for {asks_for}, and rm_model = {name} is served for {_gives(served[name])}; beside the policy "
            f"the run serves {others}. Give {wanted} in its table [[engine.engine_models]], name another with "
            "--rm-model, or choose another reward model."
        )


def _gives(model: EngineModel) -> str:
    return "scores" if model.is_embedding else "texts"
