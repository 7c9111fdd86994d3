"""Calls the hooks of the plugins that take part in a run, in one process.

An exception of an implementation becomes a ``PluginError`` that names the plugin, and ends the run. The exception of an
observer is recorded, and after :data:`MAX_FAILURES` of them the observer is not called again in that process.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.config.options import DerivedSetting
from slime_core.contracts import Place
from slime_core.errors import SlimeError
from slime_core.plugins import hooks
from slime_core.plugins.discovery import CORE, Plugin
from slime_core.plugins.registry import Loaded, Registry
from slime_core.track.failures import Failures
from slime_core.types import JsonValue, Sample
from slime_core.user_code.failures import boundary

if TYPE_CHECKING:
    from slime_core.generation import GenerateContext

MAX_FAILURES = 3
"""Failures of an observer in one process after which it is not called again."""

STATE, RESTORE = "slime_checkpoint_state", "slime_checkpoint_restore"

PlaceStates = Mapping[str, JsonValue]
"""Plugin -> what its ``slime_checkpoint_state`` returned at one place: ``{"mine": {"seen": 7}}``."""


class PerPlugin(dict[str, Any]):
    """An argument of a hook that differs by plugin: an implementation receives the value of its plugin, and is not
    called if there is none."""

    @classmethod
    def of(cls, registry: Registry, values: Mapping[str, Any], default: Any) -> PerPlugin:
        """Return the values of all plugins of ``registry``, those without one with ``default``."""
        return cls({name: values.get(name, default) for name in registry.loaded})


class Hooks:
    """The hooks of the plugins that take part, called through pluggy.

    Example::

        hooks = Hooks(registry, place=Place.SAMPLER, options={"grpo": GrpoOptions()})
        hooks.call("slime_before_rollout", rollout=0, groups=groups)

    Arguments:
        registry: the plugins that take part.
        place: the process that calls the hooks.
        options: plugin -> its options object, by default with default values.
        where: the process in words, for messages, such as ``rank 3``. By default the place.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        place: Place = Place.DRIVER,
        options: Mapping[str, object] | None = None,
        where: str | None = None,
    ) -> None:
        self.failures = Failures()
        self._place = place
        self._where = where or f"the {place}"
        self._options = PerPlugin({name: registry.options_of(name, options) for name in registry.loaded})
        self._counts = Counter[tuple[str, str]]()
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        for entry in registry.loaded.values():
            self._manager.register(self._attributed(entry), entry.plugin.name)

    def call(self, hook: str, **arguments: object) -> Any:
        """Call the hook and return what pluggy returns: the results that are not None, or the first one if the hook is
        ``firstresult``. An async hook gives coroutines.

        Raises:
            PluginError: an implementation failed; names plugin, hook, process, file and line.
            SlimeError: an implementation raised it.
        """
        return getattr(self._manager.hook, hook)(**arguments, options=self._options)

    async def first(self, hook: str, **arguments: object) -> object:
        """Await the coroutines of an async hook in order; return the first result that is not None, or None.

        Raises:
            PluginError, SlimeError: as :meth:`call`.
        """
        coroutines = self.call(hook, **arguments)
        try:
            for coroutine in coroutines:
                if (result := await coroutine) is not None:
                    return result
        finally:
            for coroutine in coroutines:
                coroutine.close()
        return None

    async def after_generate(self, sample: Sample, context: GenerateContext) -> Sample:
        """Return the sample, or the one that an implementation of ``slime_after_generate`` returned last.

        Raises:
            PluginError, SlimeError: as :meth:`call`.
        """
        for coroutine in self.call("slime_after_generate", sample=sample, context=context):
            sample = await coroutine or sample
        return sample

    def implementers(self, hook: str) -> str:
        """Return the names of the plugins that implement ``hook``, in the order of calls; empty if there are none."""
        return ", ".join(plugin for plugin, _ in self.implementations(hook))

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return plugin and function of each implementation, in the order of calls."""
        implementations = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        return [(entry.plugin_name, inspect.unwrap(entry.function)) for entry in implementations]

    def states(self) -> dict[str, JsonValue]:
        """Return the states of the plugins at this place by plugin, for a checkpoint.

        Raises:
            PluginError: a plugin failed, or returned something that JSON does not hold.
        """
        return {name: state for states in self.call(STATE, place=self._place) for name, state in states.items()}

    def restore(self, states: PlaceStates) -> None:
        """Give each plugin the state that it returned at this place.

        Raises:
            PluginError: a plugin failed.
        """
        self.call(RESTORE, place=self._place, state=PerPlugin(states))

    def _attributed(self, entry: Loaded) -> SimpleNamespace:
        """Return the plugin's hook implementations, each in a boundary that names the plugin."""
        guarded = SimpleNamespace()
        for name in dir(entry.holder):
            if options := self._manager.parse_hookimpl_opts(entry.holder, name):
                function = getattr(entry.holder, name)
                call = self._guarded(entry.plugin, options["specname"] or name, function, is_wrapper=options["wrapper"])
                setattr(guarded, name, call)
        return guarded

    def _guarded(self, plugin: Plugin, hook: str, function: Any, *, is_wrapper: bool) -> Callable[..., Any]:
        """Return the function in a boundary, called with the arguments of its plugin."""
        observes = not is_wrapper and (hooks.HOOKS[hook].observes or hasattr(function, hooks.OBSERVES))

        def arguments_of(values: tuple[object, ...]) -> list[Any]:
            return [value[plugin.name] if isinstance(value, PerPlugin) else value for value in values]

        def is_called(values: tuple[object, ...]) -> bool:
            has_values = all(plugin.name in value for value in values if isinstance(value, PerPlugin))
            return has_values and self._counts[plugin.name, hook] < MAX_FAILURES

        @contextmanager
        def guard() -> Iterator[None]:
            try:
                with boundary(plugin, f"{hook} on {self._where}", locate=True, passes=(SlimeError,)):
                    yield
            except SlimeError as failure:
                if not observes:
                    raise
                self._record(plugin, hook, failure)

        @wraps(function)
        def call(*values: object) -> Any:
            if is_called(values):
                with guard():
                    return _result(plugin, hook, function(*arguments_of(values)))
            return None

        @wraps(function)
        async def call_async(*values: object) -> Any:
            if is_called(values):
                with guard():
                    return _result(plugin, hook, await function(*arguments_of(values)))
            return None

        @wraps(function)
        def call_wrapper(*values: object) -> Any:
            with guard():
                return (yield from function(*arguments_of(values)))

        if is_wrapper:
            return call_wrapper
        return call_async if inspect.iscoroutinefunction(getattr(hooks, hook)) else call

    def _record(self, plugin: Plugin, hook: str, failure: SlimeError) -> None:
        self._counts[plugin.name, hook] += 1
        count = f"Failure {self._counts[plugin.name, hook]} of {MAX_FAILURES}, after which it is not called again."
        self.failures.add(plugin.name, f"{failure}\n{count}")


def _result(plugin: Plugin, hook: str, result: Any) -> Any:
    """Return the result of an implementation, checked and attributed to its plugin."""
    if hook == "slime_settings":
        return [(plugin.name, setting) for setting in _listed(result, DerivedSetting)]
    if hooks.HOOKS[hook].yields:
        suffix = "" if plugin == CORE or hook == "slime_check_row" else f" (plugin {plugin.name})"
        return [f"{message}{suffix}" for message in _listed(result, str)]
    if hook in ("slime_prepare", STATE):
        if hook == STATE and not (result is None or _is_json(result)):
            raise TypeError(f"it returned {result!r:.80}; return a dict of values that JSON can hold, or None")
        return None if result is None else {plugin.name: result}
    if hook == "slime_after_generate" and not (result is None or isinstance(result, Sample)):
        raise TypeError(f"it returned {result!r:.80}; return a slime_core.Sample, or None")
    return result


def _listed(result: Any, accepted: type) -> list[Any]:
    entries = [] if result is None else [result] if isinstance(result, str) else list(result)
    if refused := [entry for entry in entries if not isinstance(entry, accepted)]:
        raise TypeError(f"it yielded {refused[0]!r:.80}; yield values of {accepted.__name__}")
    return entries


def _is_json(value: object) -> bool:
    """Return whether ``value`` is a dict that JSON holds unchanged.

    Raises:
        TypeError, ValueError: of :func:`json.dumps`, if JSON cannot hold it.
    """
    return isinstance(value, dict) and bool(json.loads(json.dumps(value, allow_nan=False)) == value)
