from __future__ import annotations

import json
import pickle
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from slime_core import Place, RunInfo, Sample
from slime_core.errors import NonFiniteError, PluginError, RunError
from slime_core.plugins import hooks as specs
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Failures, LifecycleHooks, lifetime, unclaimed_states

HEAD = "from slime_core import hookimpl\nfrom pydantic import BaseModel, ConfigDict, Field\nseen = []\n"


def hook(name: str, *parameters: str, body: str) -> str:
    return f"@hookimpl\ndef slime_{name}({', '.join(parameters)}):\n    {body}\n"


@pytest.fixture
def plugin(tmp_path):
    """Writes a single-file plugin; returns its path."""

    def write(name: str, *parts: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + "".join(parts))
        return str(path)

    yield write
    for module in [name for name in sys.modules if name.startswith("slime_local_")]:
        del sys.modules[module]  # named after its bytes: the same text in another test would be the same module


def made(*names: str, place: Place = Place.DRIVER, options=None, where=None) -> LifecycleHooks:
    return LifecycleHooks(activate(names).registry, place=place, options=options or {}, where=where)


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(PluginError) as failure:
        call(*arguments, **named)
    return str(failure.value)


def test_plugins_are_called_in_the_order_in_which_the_run_names_them(plugin):
    body = "groups.append({!r})"
    names = [plugin(name, hook("before_rollout", "groups", body=body.format(name))) for name in ("b", "c", "a")]
    groups: list[str] = []
    made(*names, place=Place.SAMPLER).call("slime_before_rollout", rollout=0, groups=groups)
    assert groups == ["b", "c", "a"]


def test_first_and_last_of_pluggy_change_nothing_between_strangers(plugin):
    eager = HEAD + "@hookimpl(tryfirst=True)\ndef slime_before_rollout(groups):\n    groups.append('late')\n"
    names = [plugin("early", hook("before_rollout", "groups", body="groups.append('early')")), plugin("late")]
    Path(names[1]).write_text(eager)
    groups: list[str] = []
    made(*names, place=Place.SAMPLER).call("slime_before_rollout", rollout=0, groups=groups)
    assert groups == ["early", "late"]


def test_an_implementation_gets_what_it_names_and_the_options_of_its_own_plugin(plugin):
    names = [
        plugin("one", hook("run_start", "options", "run", body="run.settings['calls'].append((options, run.step))")),
        plugin("two", hook("run_start", "run", "options", body="run.settings['calls'].append(options)")),
        plugin("three", hook("run_start", body="pass")),
    ]
    calls: list[object] = []
    run = RunInfo(Path("run"), {"calls": calls}, step=3)
    made(*names, options={"one": "its own"}).call("slime_run_start", run=run)
    assert calls == [("its own", 3), None]


def test_methods_of_an_object_are_hooks_like_functions_of_a_module(install):
    code = (
        "class Plugin:\n    def __init__(self):\n        self.seen = []\n"
        "    @hookimpl\n    def slime_after_weight_sync(self, version):\n        self.seen.append(version)\n"
        "    @staticmethod\n    @hookimpl\n    def slime_run_start(run):\n        plugin.seen.append(run)\n"
        "plugin = Plugin()\n"
    )
    install("acme", plugins={"acme": "acme:plugin"}, files={"acme.py": HEAD + code})
    hooks = made("acme")
    hooks.call("slime_run_start", run="run")
    hooks.call("slime_after_weight_sync", version=7)
    import acme  # type: ignore[import-not-found]

    assert acme.plugin.seen == ["run", 7]


def test_a_participant_that_fails_ends_the_call_and_says_who_what_and_where(plugin):
    path = plugin("toy", hook("before_train_step", "step", body="raise ValueError('no')"))
    after = plugin("after", hook("before_train_step", "step", body="step.append('called')"))
    hooks = made(path, after, place=Place.RANK, where="learner rank 1")
    step: list[str] = []
    text = refusal(hooks.call, "slime_before_train_step", step=step)
    assert re.search(rf"'toy' .*slime_before_train_step .*learner rank 1 .*ValueError: no \({path}:6, ", text)
    assert step == []


def test_a_participants_hook_that_is_marked_as_an_observer_never_ends_the_run(plugin):
    marked = hook("after_rollout", "samples", body="raise OSError('disk full')").replace(
        "@hookimpl\n", "from slime_core import observer\n@hookimpl\n@observer\n"
    )
    hooks = made(plugin("stores", marked), place=Place.SAMPLER)
    for _ in range(5):
        hooks.call("slime_after_rollout", rollout=0, samples=[])
    failures = hooks.failures.take()
    assert failures.counts == {"stores": 3}
    assert re.search("'stores' .*slime_after_rollout .*OSError: disk full", failures.warnings[0])


@pytest.mark.parametrize("name", ["before_training", "checkpoint_state", "after_weight_sync"])
def test_a_hook_that_takes_part_by_its_answer_cannot_be_marked_as_an_observer(plugin, name):
    text = "from slime_core import observer\n@observer\n" + hook(name, body="pass")
    with pytest.raises(PluginError, match=rf"'stores' .*slime_{name} .*\n.* slime_run_start, "):
        made(plugin("stores", text), place=Place.SAMPLER)


def test_answers_come_in_the_order_of_plugins_without_those_that_say_nothing(plugin):
    bodies = {"one": "return 1", "two": "return None", "three": "return 3"}
    names = [plugin(name, hook("log_rollout", "samples", body=body)) for name, body in bodies.items()]
    assert made(*names, place=Place.SAMPLER).results("slime_log_rollout", samples=[]) == [1, 3]


async def test_an_async_hook_stops_at_the_first_answer(plugin):
    bodies = {"one": "seen.append(step)", "two": "return {'eval/two': 2.0}", "three": "raise ValueError"}
    head = "@hookimpl\nasync def slime_evaluate(step):\n    "
    names = [plugin(name, f"{head}{body}\n") for name, body in bodies.items()]
    hooks = made(*names, place=Place.SAMPLER)
    assert await hooks.first("slime_evaluate", step=7, prompts=None) == {"eval/two": 2.0}


async def test_a_sample_passes_through_every_plugin_that_sees_it_before_its_reward(plugin):
    code = "from slime_core import Sample\n@hookimpl\nasync def slime_after_generate(sample, context):\n    "
    one = plugin("one", code + "sample.response += context\n")
    two = plugin("two", code + "return Sample(index=sample.index, response=sample.response + '!')\n")
    given = Sample(index=3, response="a")
    made_of = await made(one, two, place=Place.SAMPLER).after_generate(given, "b")  # type: ignore[arg-type]
    assert (given.response, made_of.response, made_of.index) == ("ab", "ab!", 3)


@pytest.mark.parametrize(
    ("body", "names"),
    [("return 3", "'toy' .*TypeError: .* 3"), ("raise KeyError('x')", "'toy' .*slime_after_generate .*KeyError: 'x'")],
)
async def test_an_error_in_an_async_hook_names_the_plugin(plugin, body, names):
    path = plugin("toy", f"@hookimpl\nasync def slime_after_generate(sample):\n    {body}\n")
    with pytest.raises(PluginError, match=names):
        await made(path, place=Place.SAMPLER).after_generate(Sample(), None)  # type: ignore[arg-type]


def test_an_error_of_slimes_own_passes_a_hook_that_answers_as_it_is(plugin):
    body = "from slime_core.errors import RunError; raise RunError('too few rows')"
    hooks = made(plugin("toy", hook("before_shards", body=body)), place=Place.SAMPLER)
    with pytest.raises(RunError, match=r"^too few rows$"):
        hooks.results("slime_before_shards", rollout=0, samples=[])


def test_an_observer_that_fails_is_recorded_and_off_after_the_third_time(plugin):
    path = plugin("toy", hook("after_weight_sync", "version", body="seen.append(version); raise KeyError(len(seen))"))
    other = plugin("other", hook("after_weight_sync", "version", body="seen.append(version)"))
    registry = activate([path, other]).registry
    hooks = LifecycleHooks(registry, place=Place.DRIVER, options={})
    for version in range(5):
        hooks.call("slime_after_weight_sync", version=version)
    assert seen(registry, "toy") == [0, 1, 2]
    assert seen(registry, "other") == [0, 1, 2, 3, 4]
    assert hooks.failures.counts == {"toy": 3}
    for number, warning in enumerate(hooks.failures.warnings, 1):
        assert re.search(rf"'toy' .*slime_after_weight_sync .*KeyError: {number} \({path}:6, ", warning)


def test_an_observer_is_off_for_one_hook_only(plugin):
    path = plugin("toy", hook("after_weight_sync", body="raise ValueError"), hook("run_end", body="seen.append('end')"))
    registry = activate([path]).registry
    hooks = LifecycleHooks(registry, place=Place.DRIVER, options={})
    for _ in range(4):
        hooks.call("slime_after_weight_sync", version=0)
    hooks.call("slime_run_end", run=None, error=None)
    assert seen(registry, "toy") == ["end"]


def test_failures_are_reported_once_and_survive_the_way_to_the_driver():
    failures = Failures()
    failures.add("toy", "first")
    failures.merge(pickle.loads(pickle.dumps(Failures(Counter(toy=2, other=1), ["second"]))))
    warnings: list[str] = []
    assert failures.report(warnings.append) == {"plugins/failures/toy": 3.0, "plugins/failures/other": 1.0}
    assert warnings == ["first", "second"]
    assert failures.report(warnings.append) == {}


def test_a_run_that_fails_calls_the_end_hook_and_keeps_its_own_error(plugin):
    path = plugin("toy", hook("run_end", "error", body="raise RuntimeError(f'saw {error}')"))
    warnings: list[str] = []
    with (
        pytest.raises(NonFiniteError, match="loss is NaN"),
        lifetime(made(path), RunInfo(Path("run"), {}), warn=warnings.append),
    ):
        raise NonFiniteError("loss is NaN")
    assert re.search("'toy' .*slime_run_end .*RuntimeError: saw loss", warnings[0])


def test_a_run_that_was_interrupted_calls_the_end_hook(plugin):
    path = plugin("toy", hook("run_end", "error", "run", body="run.settings['calls'].append(repr(error))"))
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt), lifetime(made(path), RunInfo(Path("r"), {"calls": calls}), warn=print):
        raise KeyboardInterrupt
    assert calls == ["KeyboardInterrupt()"]


def test_a_start_hook_that_fails_is_followed_by_the_end_hooks(plugin):
    bad = plugin("bad", hook("run_start", body="raise ValueError('no')"))
    path = plugin("toy", hook("run_end", "error", "run", body="run.settings['calls'].append(str(error))"))
    calls: list[str] = []
    with (
        pytest.raises(PluginError, match=r"'bad' .*slime_run_start .*ValueError: no"),
        lifetime(made(bad, path), RunInfo(Path("r"), {"calls": calls}), warn=print),
    ):
        raise AssertionError("the block of a run that did not start")
    assert len(calls) == 1


STATE = hook("checkpoint_state", "place", body="return {'at': place, 'seen': list(seen)} if place != 'rank' else None")
RESTORE = hook("checkpoint_restore", "state", "place", body="seen.append([place, state])")


def test_a_state_comes_back_at_its_place_and_only_where_there_was_one(plugin):
    path = plugin("toy", STATE, RESTORE)
    registry = activate([path, plugin("idle", RESTORE)]).registry
    states = {place: LifecycleHooks(registry, place=place, options={}).states() for place in Place}
    written = json.loads(json.dumps(states))
    assert written == {
        "driver": {"toy": {"at": "driver", "seen": []}},
        "sampler": {"toy": {"at": "sampler", "seen": []}},
        "rank": {},
    }
    for place in Place:
        LifecycleHooks(registry, place=place, options={}).restore(written[place])
    assert seen(registry, "toy") == [[place, {"at": place, "seen": []}] for place in ("driver", "sampler")]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("[1]", "[1]"),
        ("{'a': {'b': [0, (1, 2)]}}", "{'a': {'b': [0, (1, 2)]}}"),
        ("{'a': {3: 1}}", "{'a': {3: 1}}"),
        ("{3: 1}", "{3: 1}"),
        ("{'a': float('nan')}", "{'a': nan}"),
        ("{'a': len}", "{'a': <built-in function len>}"),
    ],
)
def test_a_state_that_json_does_not_carry_is_refused(plugin, value, wrong):
    path = plugin("toy", hook("checkpoint_state", body=f"return {value}"), RESTORE)
    text = refusal(made(path).states)
    assert re.search(rf"'toy' .*slime_checkpoint_state .*: {re.escape(wrong)}\. ", text)


def test_a_plugin_that_saves_and_cannot_restore_is_refused_at_start(plugin):
    path = plugin("toy", STATE)
    assert re.search("'toy' .*slime_checkpoint_state .*slime_checkpoint_restore", refusal(activate, [path]))


def test_state_of_a_plugin_that_is_not_active_is_reported():
    states = {"driver": {"gone": {"n": 1}}, "rank": {}}
    (text,) = unclaimed_states(states, activate([]).registry)
    assert re.search("'gone' .* driver.*--plugin gone", text)


def test_two_functions_of_one_plugin_for_one_hook_are_refused(plugin):
    second = "@hookimpl(specname='slime_run_start')\ndef another(run):\n    pass\n"
    path = plugin("toy", hook("run_start", body="pass"), second)
    assert re.search("'toy' .*another .*slime_run_start", refusal(activate, [path]))


def test_a_hook_without_implementations_calls_nothing():
    hooks = made()
    for name, lifecycle in specs.LIFECYCLE_HOOKS.items():
        if Place.DRIVER in lifecycle.places and name not in (specs.STATE, specs.RESTORE):
            hooks.call(name)
    assert hooks.states() == {}


def seen(registry, name: str) -> list[object]:
    """The list ``seen`` in the module of plugin ``name``."""
    identity = next(plugin for plugin in registry.plugins if plugin.name == name)
    found: list[object] = sys.modules[identity.entry_point].seen
    return found
