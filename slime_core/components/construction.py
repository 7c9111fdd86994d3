"""Builds components, and asks model specs and data sources about their input before a run starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from slime_core.components.fit import check_fit, contract_of, methods_of, passed_by_name
from slime_core.components.functions import Code
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import without_secrets
from slime_core.config.settings import core_values
from slime_core.contracts import PromptScreen, RunView
from slime_core.errors import SlimeError
from slime_core.plugins.lifecycle import Hooks, PerPlugin
from slime_core.plugins.loading import load_attribute, load_target
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.user_code.failures import boundary


def load(registry: Registry, kind: Kind, name: str) -> Any:
    """Return the target of the component, imported and checked against the contract of its kind.

    Raises:
        PluginError: no plugin offers it, it cannot be imported, or it does not fit its contract.
    """
    plugin, component = registry.find(kind, name)
    target = load_target(component, plugin)
    check_fit(component, plugin, target)
    return target


def construct(registry: Registry, kind: Kind, name: str, options: Mapping[str, Any], run: RunView) -> Any:
    """Build the component: an object of its class, or its function as the one method of its contract.

    Arguments:
        options: plugin -> its options object; a plugin without one gets its defaults.
        run: passed, like the plugin's options, if the class or function names it.

    Raises:
        PluginError: no plugin offers it, it cannot be imported, or its constructor failed.
        SlimeError: its constructor raised it.
    """
    plugin, component = registry.find(kind, name)
    target = load(registry, kind, name)
    values = {"options": registry.options_of(plugin.name, options), "run": run}
    passed = {argument: values[argument] for argument in passed_by_name(target)}
    if inspect.isclass(target):
        with boundary(plugin, f"building {kind.words} {name!r}", locate=True, passes=(SlimeError,)):
            return target(**passed)
    call = partial(target, **passed) if passed else target
    (method,) = methods_of(contract_of(component))
    return (
        call
        if method == "__call__"
        else SimpleNamespace(**{method: call, "check_row": getattr(target, "check_row", None)})
    )


def screened(
    registry: Registry, name: str, options: Mapping[str, object], run: RunView, screen: PromptScreen
) -> list[str]:
    """Return the mistakes that a data source finds in its files before anything starts; see
    :class:`~slime_core.contracts.DataSource`.

    Raises:
        PluginError: it cannot be imported, or failed.
        SlimeError: it raised it.
    """
    owner, target = registry.owner(Kind.DATA_SOURCE, name), load(registry, Kind.DATA_SOURCE, name)
    look = getattr(target, "screen", None)
    if look is None:
        return []
    with boundary(owner, f"data source {name!r}: screen", locate=True, passes=(SlimeError,)):
        return [str(mistake) for mistake in look(registry.options_of(owner.name, options), run, screen)]


def prepare_options(
    config: RunConfig, registry: Registry, options: Mapping[str, BaseModel], code: Code
) -> dict[str, Any]:
    """Return plugin -> the object that its components and hooks receive as ``options``: the result of its
    ``slime_prepare``, or its options object.

    Raises:
        PluginError: a plugin's ``slime_prepare`` failed.
        SlimeError: it raised it.
    """
    prepared: dict[str, Any] = dict(options)
    hooks = Hooks(registry, options=options)
    for result in hooks.call("slime_prepare", plan=run_view(config, options), code=PerPlugin.of(registry, code, {})):
        prepared |= result
    return prepared


def run_view(config: RunConfig, options: Mapping[str, Any] | None = None, **started: Any) -> RunView:
    """Return the view of the run for checks, hooks and components; without ``started``, its plan.

    Arguments:
        options: plugin name -> its options object.
        started: the fields of :class:`~slime_core.contracts.RunView` that the plan does not have.
    """
    rollout = config.rollout
    models = {plugin: entry for plugin, entry in (options or {}).items() if isinstance(entry, BaseModel)}
    of_plugins = {f"{plugin}.{name}": value for plugin, entry in models.items() for name, value in entry}
    return RunView(
        seed=config.run.seed,
        device=config.cluster.device,
        rollout_batch_size=rollout.rollout_batch_size,
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        max_prompt_len=config.data.rollout_max_prompt_len,
        max_response_len=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        reward_key=rollout.reward_key,
        samples_per_step=config.samples_per_step,
        steps_per_rollout=config.steps_per_rollout,
        num_data_ranks=config.num_data_ranks,
        num_engines=config.num_engines,
        settings={**without_secrets({**core_values(config), **of_plugins}), **config.of_plugins.values},
        **started,
    )


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of a process that has components of the run: a learner rank, a sampler.

    Arguments:
        config: the run's settings.
        folder: Hugging Face folder with the start weights, tokenizer and chat template.
        options: plugin name -> its options object.
        model_urls: name -> URL of every auxiliary model.
        run_folder: of the run, or None.
        resumed_step: training steps done when this start of the run began.
    """

    config: RunConfig
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    model_urls: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    run_folder: Path | None = field(default=None, kw_only=True)
    resumed_step: int = field(default=0, kw_only=True)

    @property
    def run(self) -> RunView:
        """The view of the run for the components of the process."""
        return run_view(
            self.config,
            self.options,
            model_folder=self.folder,
            folder=self.run_folder,
            resumed_step=self.resumed_step,
            models=self.model_urls,
        )


def refusals(registry: Registry, architecture: str, config: Mapping[str, Any], run: RunView) -> list[str]:
    """Return a text, with the plugin, for each part of a checkpoint that the model spec does not build.

    Empty if the spec builds everything, or only finds out when it builds, or if there is no spec.

    Arguments:
        config: the object of the checkpoint's ``config.json``.
        run: passed if the function names it; its settings choose the implementation.

    Raises:
        PluginError: the function in the spec's trait ``unsupported`` cannot be imported, fails, or returns no texts.
    """
    spec = registry.model_spec(architecture, implementation=str(run.settings.get("model_impl", "auto")))
    if spec is None or spec[1].traits.unsupported is None:
        return []
    plugin, component = spec
    path = component.traits.unsupported
    step = f"Report it to the author of {plugin.distribution}: it takes the object of a config.json and returns texts."
    with boundary(plugin, f"calling {path} for model spec {component.name!r}", next_step=step):
        function = load_attribute(path)
        texts = list(function(config, **({"run": run} if "run" in passed_by_name(function) else {})))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"it returned {texts!r}")
    return [f"{text} by model spec {component.name!r} of {plugin}" for text in texts]
