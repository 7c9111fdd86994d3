"""Calls the code of components: makes objects of them, and asks model specs and data sources before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slime_core.config.schema import RunConfig
from slime_core.config.secrets import without_secrets
from slime_core.config.settings import core_values
from slime_core.errors import SlimeError
from slime_core.plugins import hooks
from slime_core.plugins.component import Kind
from slime_core.plugins.contracts import PromptFormat, PromptScreen, PromptTable, RunView
from slime_core.plugins.loading import FunctionSource, boundary, load_attribute
from slime_core.plugins.registry import Registry

Code = Mapping[str, Mapping[str, Sequence[FunctionSource]]]
"""Plugin -> option -> the functions that it names by path."""


def construct(registry: Registry, kind: Kind, name: str, options: Mapping[str, Any], run: RunView) -> Any:
    """An object of the component, made with its plugin's options and ``run``.

    Arguments:
        options: plugin name -> its options object; of a plugin that is not there, the defaults.

    Raises:
        PluginError: no active plugin offers it, it cannot be imported, or its constructor failed.
        SlimeError: its constructor raised it.
    """
    owner = registry.owner(kind, name)
    target = registry.load(kind, name)
    with boundary(owner, f"making {kind.words} {name!r}", locate=True, passes=(SlimeError,)):
        return target(registry.options_of(owner.name, options), run)


def screened(
    registry: Registry, name: str, options: Mapping[str, object], run: RunView, prompts: PromptScreen
) -> list[str]:
    """The problems that a data source reports of its own files before anything starts; see
    :class:`~slime_core.plugins.contracts.ScreenedDataSource`.

    Raises:
        PluginError: it cannot be imported, or failed.
        SlimeError: it raised it.
    """
    owner, target = registry.owner(Kind.DATA_SOURCE, name), registry.load(Kind.DATA_SOURCE, name)
    screen = getattr(target, "screen", None)
    if screen is None:
        return []
    with boundary(owner, f"data source {name!r}: screen", locate=True, passes=(SlimeError,)):
        return [str(one) for one in screen(registry.options_of(owner.name, options), run, prompts)]


def prepare_options(
    config: RunConfig, registry: Registry, options: Mapping[str, BaseModel], code: Code
) -> dict[str, Any]:
    """Plugin name -> what its components and lifecycle hooks are handed: what its ``slime_prepare`` makes of its
    options, or these.

    Raises:
        PluginError: a plugin's ``slime_prepare`` failed.
        SlimeError: it raised it.
    """
    found: dict[str, Any] = dict(options)
    plan = run_view(config, options)
    for one in registry.declarations.get(hooks.PREPARE, ()):
        name = one.plugin.name
        given = {"plan": plan, "options": options.get(name), "code": code.get(name, {})}
        with boundary(one.plugin, f"calling {hooks.PREPARE}", locate=True, passes=(SlimeError,)):
            found[name] = one(given)
    return found


def run_view(config: RunConfig, options: Mapping[str, Any] | None = None, **started: Any) -> RunView:
    """The view of the run that checks, hooks and components get; without ``started``, what is known before it starts.

    Arguments:
        options: plugin name -> its options object.
        started: what :class:`~slime_core.plugins.contracts.RunView` has in addition to the plan.
    """
    rollout = config.rollout
    models = [(plugin, one) for plugin, one in (options or {}).items() if isinstance(one, BaseModel)]
    own = {f"{plugin}.{name}": value for plugin, one in models for name, value in one}
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
        settings={**without_secrets({**core_values(config), **own}), **config.of_plugins.values},
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
        run_folder: of the run; None: there is none.
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
        """The view of the run that the process's components get."""
        return run_view(
            self.config,
            self.options,
            model_folder=self.folder,
            folder=self.run_folder,
            resumed_step=self.resumed_step,
            models=self.model_urls,
        )


class _Format:
    """A prompt format that is made when its first file is opened, so that formats of other files are not imported."""

    def __init__(self, make: Callable[[], PromptFormat]) -> None:
        self._make = cache(make)

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """See :class:`~slime_core.PromptFormat`."""
        return self._make().open(path, window=window)


def prompt_formats(registry: Registry, options: Mapping[str, object], run: RunView) -> dict[str, PromptFormat]:
    """Name -> prompt format, of every active plugin; opening a file raises as :func:`construct`."""
    names = registry.names(Kind.PROMPT_FORMAT)
    return {name: _Format(partial(construct, registry, Kind.PROMPT_FORMAT, name, options, run)) for name in names}


def refusals(registry: Registry, architecture: str, config: Mapping[str, Any]) -> list[str]:
    """The parts of a checkpoint that the model spec of its architecture does not build, each text with its plugin.

    Empty: nothing, or it says so only when it builds, or there is no such spec.

    Arguments:
        config: the object of the checkpoint's ``config.json``.

    Raises:
        PluginError: what the spec's traits name as ``unsupported`` cannot be imported, fails, or returns no texts.
    """
    component = registry.model_spec(architecture)
    traits: Any = None if component is None else component.traits
    if component is None or traits.unsupported is None:
        return []
    plugin = registry.owner(Kind.MODEL_SPEC, component.name)
    action = f"asking {traits.unsupported} what model spec {component.name!r} does not build"
    step = f"Report it to the author of {plugin.distribution}: it takes the object of a config.json and returns texts."
    with boundary(plugin, action, next_step=step):
        found = list(load_attribute(traits.unsupported)(config))
        if not all(isinstance(text, str) for text in found):
            raise TypeError(f"it returned {found!r}")
    return [f"{text} by model spec {component.name!r} of {plugin}" for text in found]
