"""Calls the lifecycle hooks of one process. The implementations are fixed at start, in the run's order of plugins.

    LifecycleHooks    the implementations of each hook in this process, and how each is called
    Failures          errors of observers, which are sent to the driver
    lifetime          the block between a run's start and its end

A participant's exception becomes a ``PluginError`` and ends the run. An observer's exception is recorded; after
:data:`MAX_FAILURES` of them the observer is not called again for that hook in that process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.contracts import Place, RunInfo
from slime_core.plugins.hooks import LIFECYCLE_HOOKS, RESTORE, STATE
from slime_core.plugins.loading import boundary
from slime_core.plugins.registry import Implementation, Registry
from slime_core.track.track import MAX_FAILURES
from slime_core.types import JsonValue, Sample

if TYPE_CHECKING:
    from slime_core.generation import GenerateContext


GENERATED = "slime_after_generate"

PlaceStates = Mapping[str, JsonValue]
"""Plugin name -> what its ``slime_checkpoint_state`` returned at one place, JSON-ready: ``{"mine": {"seen": 7}}``."""


@dataclass(slots=True)
class Failures:
    """Errors of observers since the last :meth:`take`; survives pickling.

    Example: ``Failures(Counter(plots=1), ["plugin 'plots' (...): slime_after_weight_sync on the driver failed ..."])``.

    Arguments:
        counts: plugin name -> failures.
        warnings: one text per failure, for the user.
    """

    counts: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def add(self, plugin: str, warning: str) -> None:
        """Record a failure of ``plugin``."""
        self.counts[plugin] += 1
        self.warnings.append(warning)

    def merge(self, other: Failures) -> None:
        """Add the failures in ``other``, such as those of another process."""
        self.counts += other.counts
        self.warnings += other.warnings

    def report(self, warn: Callable[[str], None]) -> dict[str, float]:
        """Pass every warning to ``warn``, return the counts as metrics ``plugins/failures/NAME``, and empty this."""
        taken = self.take()
        for warning in taken.warnings:
            warn(warning)
        return {f"plugins/failures/{name}": float(count) for name, count in taken.counts.items()}

    def take(self) -> Failures:
        """Return everything recorded so far, and empty this."""
        taken = Failures(self.counts, self.warnings)
        self.counts = Counter()
        self.warnings = []
        return taken


@dataclass(slots=True)
class _Called:
    """An implementation with its plugin's options and, of an observer, its failures so far."""

    of: Implementation
    options: object
    failures: int = 0

    def __call__(self, given: Mapping[str, object]) -> Any:
        return self.of({**given, "options": self.options})


class LifecycleHooks:
    """The lifecycle hooks of one place.

    Example::

        hooks = LifecycleHooks(registry, place=Place.SAMPLER, options={"grpo": GrpoOptions()})
        hooks.call("slime_before_rollout", rollout=0, groups=groups)

    Arguments:
        registry: the active plugins; the order of ``registry.plugins`` is the order of calls.
        place: the place of this process; hooks of other places are not called here.
        options: plugin name -> its options object.
        where: the place in words, for messages; None: the place's name.
    """

    def __init__(
        self, registry: Registry, *, place: Place, options: Mapping[str, object], where: str | None = None
    ) -> None:
        self._place = place
        self._where = where or f"the {place}"
        self.failures = Failures()
        self._frozen = {
            hook: tuple(_Called(one, options.get(one.plugin.name)) for one in registry.lifecycle[hook])
            for hook, lifecycle in LIFECYCLE_HOOKS.items()
            if place in lifecycle.places
        }

    def call(self, hook: str, **arguments: object) -> None:
        """Call every implementation of ``hook`` with the arguments that it names.

        Raises:
            PluginError: a participant failed; names plugin, hook, place, file and line. Those after it are not called.
        """
        observed = LIFECYCLE_HOOKS[hook].policy == "observer"
        for one in self._frozen[hook]:
            if observed or one.of.observes:
                self._observe(hook, one, arguments)
            else:
                self._take_part(hook, one, arguments)

    def results(self, hook: str, **arguments: object) -> list[object]:
        """Call every implementation of ``hook``, as :meth:`call` does; return the results that are not None.

        Raises:
            SlimeError: one that an implementation raised, as it is.
            PluginError: an implementation failed otherwise.
        """
        results: list[object] = []
        for one in self._frozen[hook]:
            with self._blamed(hook, one):
                results.append(one(arguments))
        return [result for result in results if result is not None]

    async def first(self, hook: str, **arguments: object) -> object:
        """Return the first result of an ``async`` hook's implementations that is not None, or None.

        Raises:
            SlimeError: one that an implementation raised, as it is.
            PluginError: an implementation failed otherwise.
        """
        for one in self._frozen[hook]:
            with self._blamed(hook, one):
                answer: object = await one(arguments)
            if answer is not None:
                return answer
        return None

    async def after_generate(self, sample: Sample, context: GenerateContext) -> Sample:
        """Pass ``sample`` through the implementations of ``slime_after_generate``, in order, and return the result.

        Raises:
            SlimeError: one that an implementation raised, as it is.
            PluginError: an implementation failed otherwise, or returned something else than a sample or None.
        """
        for one in self._frozen[GENERATED]:
            with self._blamed(GENERATED, one):
                answer = await one({"sample": sample, "context": context})
                if not (answer is None or isinstance(answer, Sample)):
                    raise TypeError(f"it returned {answer!r:.80}; accepted: a slime_core.Sample, or None")
            sample = sample if answer is None else answer
        return sample

    def implementers(self, hook: str) -> str:
        """Return the names of the plugins that implement ``hook``, in the order of calls; empty if none does."""
        return ", ".join(one.of.plugin.name for one in self._frozen[hook])

    def states(self) -> dict[str, JsonValue]:
        """Return the states of the plugins at this place, for a checkpoint, by plugin name.

        Raises:
            PluginError: a plugin failed, or returned something that JSON does not carry as it is.
        """
        found: dict[str, JsonValue] = {}
        for one in self._frozen[STATE]:
            state = self._take_part(STATE, one, {"place": self._place})
            if state is None:
                continue
            if not (isinstance(state, dict) and _is_json(state)):
                raise PluginError(
                    f"{one.of.plugin}: {STATE} on {self._where} returned what JSON does not carry: {state!r:.80}. "
                    "Accepted is a dict of str to dicts, lists, str, int, bool, None and finite floats.\n"
                    f"Correct {one.of.plugin.distribution}; nothing of this checkpoint was kept."
                )
            found[one.of.plugin.name] = state
        return found

    def restore(self, states: PlaceStates) -> None:
        """Give each plugin the state that its ``slime_checkpoint_state`` returned at this place.

        Raises:
            PluginError: a plugin failed.
        """
        for one in self._frozen[RESTORE]:
            name = one.of.plugin.name
            if name in states:
                self._take_part(RESTORE, one, {"place": self._place, "state": states[name]})

    def _take_part(self, hook: str, one: _Called, arguments: Mapping[str, object]) -> Any:
        plugin = one.of.plugin
        step = (
            f"Nothing of an unfinished step was saved or published. Correct {plugin.distribution}, or run without it."
        )
        with boundary(plugin, f"{hook} on {self._where}", next_step=step, locate=True):
            return one(arguments)

    def _blamed(self, hook: str, one: _Called) -> AbstractContextManager[None]:
        """Context manager: an error becomes a ``PluginError`` that names the plugin; slime's own errors pass."""
        return boundary(one.of.plugin, f"{hook} on {self._where}", locate=True, passes=(SlimeError,))

    def _observe(self, hook: str, one: _Called, arguments: Mapping[str, object]) -> None:
        if one.failures >= MAX_FAILURES:
            return
        try:
            with boundary(one.of.plugin, f"{hook} on {self._where}", locate=True):
                one(arguments)
        except PluginError as failure:
            one.failures += 1
            consequence = f"It only watches, so the run goes on; after {MAX_FAILURES} failures it is off."
            if one.failures == MAX_FAILURES:
                consequence = f"It has failed {MAX_FAILURES} times and is off for this hook for the rest of the run."
            self.failures.add(one.of.plugin.name, f"{failure}\n{consequence}")


@contextmanager
def lifetime(hooks: LifecycleHooks, run: RunInfo, *, warn: Callable[[str], None]) -> Iterator[None]:
    """Call the hooks of a run's start and end around the block; an error of the block is never hidden by theirs.

    Arguments:
        hooks: of the driver.
        warn: receives the failures of observers since the last report.
    """
    error: BaseException | None = None
    try:
        hooks.call("slime_run_start", run=run)
        yield
    except BaseException as problem:
        error = problem
        raise
    finally:
        hooks.call("slime_run_end", run=run, error=error)
        hooks.failures.report(warn)


def unclaimed_states(states: Mapping[str, PlaceStates], registry: Registry) -> Iterator[str]:
    """Yield a text for each state of a checkpoint that no active plugin restores; the run goes without it.

    Arguments:
        states: place -> plugin name -> state.
    """
    takers = {one.plugin.name for one in registry.lifecycle[RESTORE]}
    for place, held in states.items():
        for name in sorted(held.keys() - takers):
            yield (
                f"the checkpoint holds state of plugin {name!r} for the {place}, and no active plugin of that name "
                f"takes it back; it is left out. Name the plugin with --plugin {name} to go on with it."
            )


def _is_json(value: object) -> bool:
    """Whether JSON carries ``value`` as it is."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
