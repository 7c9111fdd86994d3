"""Hooks are called through pluggy; failures and results carry the name of their plugin."""

from __future__ import annotations

import inspect
import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from slime_core import Place, RunInfo, Sample
from slime_core.errors import NonFiniteError, PluginError, RunError
from slime_core.launch import lifetime, unclaimed_states
from slime_core.plugins.hooks import HOOKS
from slime_core.plugins.lifecycle import Hooks, PerPlugin
from slime_core.track.failures import Failures
from tests.plugin_files import Site, activated


def hook(name: str, *parameters: str, body: str = "pass", mark: str = "@hookimpl", word: str = "def") -> str:
    return f"{mark}\n{word} slime_{name}({', '.join(parameters)}):\n    {body}\n"


def hooks_of(
    site: Site, plugins: Mapping[str, str] | str, *, place: Place = Place.SAMPLER, where: str | None = None
) -> Hooks:
    """The hooks of single-file plugins by name, registered in this order, or of one that is called ``toy``."""
    codes = {"toy": plugins} if isinstance(plugins, str) else plugins
    registry = activated(*(site.file(name, code) for name, code in codes.items()))
    return Hooks(registry, place=place, where=where)


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> str:
    with pytest.raises(PluginError) as failure:
        call(*arguments, **named)
    return str(failure.value)


# --- Calls as in pluggy -----------------------------------------------------------------------------------------------


def test_a_wrapper_surrounds_the_others_and_sees_their_results(site: Site) -> None:
    body = "metrics['before'] = len(metrics); results = yield; metrics['after'] = len(metrics); return [*results, True]"
    wrapper = hook("log_rollout", "metrics", body=body, mark="@hookimpl(wrapper=True)")
    inner = hook("log_rollout", "metrics", body="metrics['inner'] = len(metrics)")
    metrics: dict[str, float] = {}
    hooks = hooks_of(site, {"outer": wrapper, "inner": inner})
    assert hooks.call("slime_log_rollout", rollout=0, samples=[], metrics=metrics, seconds=1.0) == [True]
    assert metrics == {"before": 0, "inner": 1, "after": 2}


def test_the_failure_of_a_wrapper_is_its_own_and_it_sees_those_of_others(site: Site) -> None:
    catches = "\n    ".join(["try:", "    yield", "except Exception as failure:", "    seen.append(str(failure))"])
    codes = {
        "catches": hook("before_rollout", body=catches, mark="@hookimpl(wrapper=True)"),
        "fails": hook("before_rollout", body="raise KeyError('x')"),
    }
    hooks = hooks_of(site, codes)
    assert hooks.call("slime_before_rollout", rollout=0, groups=[]) is None
    late = hooks_of(site, {"late": hook("before_rollout", body="yield; 1 / 0", mark="@hookimpl(wrapper=True)")})
    text = refusal(late.call, "slime_before_rollout", rollout=0, groups=[])
    assert text.startswith("plugin 'late'")
    assert "ZeroDivisionError" in text


def test_the_first_result_of_before_shards_counts(site: Site) -> None:
    bodies = {"a": "seen.append(1); return 'a'", "b": "return 'b'", "c": "return None"}
    hooks = hooks_of(site, {name: hook("before_shards", body=body) for name, body in bodies.items()})
    assert hooks.call("slime_before_shards", rollout=0, samples=[]) == "b"
    assert seen(hooks, "a") == []
    assert hooks_of(site, {"c": hook("before_shards")}).call("slime_before_shards", rollout=0, samples=[]) is None


def test_an_implementation_gets_what_it_names_and_the_options_of_its_plugin(site: Site) -> None:
    declared = "class O(PluginOptions):\n    x: int = Field(1, description='x')\n" + hook(
        "register", "add", body="add.options(O)"
    )
    codes = {
        "one": declared
        + hook("run_start", "options", "run", body="run.settings['calls'].append((options.x, run.step))"),
        "two": declared + hook("run_start", "run", "options", body="run.settings['calls'].append(options.x)"),
        "three": hook("run_start", "run", "options", body="run.settings['calls'].append(options)"),
        "four": hook("run_start"),
    }
    registry = activated(*(site.file(name, code) for name, code in codes.items()))
    calls: list[Any] = []
    options = registry.options["one"](x=7)
    Hooks(registry, options={"one": options}).call("slime_run_start", run=RunInfo(Path("r"), {"calls": calls}, step=3))
    assert calls == [None, 1, (7, 3)]


# --- Failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_ends_the_call_and_names_plugin_hook_process_and_place(site: Site) -> None:
    codes = {
        "last": hook("before_train_step", "step", body="step.append('called')"),
        "toy": hook("before_train_step", "step", body="raise ValueError('no')"),
    }
    step: list[str] = []
    hooks = hooks_of(site, codes, place=Place.RANK, where="learner rank 1")
    text = refusal(hooks.call, "slime_before_train_step", step=step)
    for name in ("plugin 'toy' (", "slime_before_train_step", "learner rank 1", "ValueError: no", "toy.py:7"):
        assert name in text
    assert step == []


def test_an_error_of_slime_passes_unchanged(site: Site) -> None:
    body = "from slime_core.errors import RunError; raise RunError('too few rows')"
    hooks = hooks_of(site, hook("before_shards", body=body))
    with pytest.raises(RunError, match=r"^too few rows$"):
        hooks.call("slime_before_shards", rollout=0, samples=[])


@pytest.mark.parametrize(
    ("name", "mark"),
    [("before_rollout", "@hookimpl\n@observer"), ("after_weight_sync", "@hookimpl"), ("run_end", "@hookimpl")],
)
def test_an_observer_fails_three_times_and_is_not_called_again(site: Site, name: str, mark: str) -> None:
    codes = {
        "other": hook(name, body="seen.append(0)"),
        "toy": hook(name, body="seen.append(0); raise KeyError(len(seen))", mark=mark)
        + hook("after_train_step", body="seen.append('step')"),
    }
    hooks = hooks_of(site, codes)
    by_hook: dict[str, dict[str, Any]] = {
        "before_rollout": {"rollout": 0, "groups": []},
        "after_weight_sync": {"version": 0},
        "run_end": {"run": None, "error": None},
    }
    for _ in range(5):
        hooks.call(f"slime_{name}", **by_hook[name])
    assert (len(seen(hooks, "toy")), len(seen(hooks, "other"))) == (3, 5)
    failures = hooks.failures.take()
    assert failures.counts == {"toy": 3}
    for number, warning in enumerate(failures.warnings, 1):
        assert [text in warning for text in ("'toy'", f"slime_{name}", f"KeyError: {number}", "toy.py:")] == [True] * 4
    hooks.call("slime_after_train_step", step=None)
    assert seen(hooks, "toy")[-1] == "step"  # off for one hook only


def test_failures_are_reported_once_and_cross_processes() -> None:
    failures = Failures()
    failures.add("toy", "first")
    failures.merge(pickle.loads(pickle.dumps(Failures(Counter(toy=2, other=1), ["second"]))))
    warnings: list[str] = []
    assert failures.report(warnings.append) == {"plugins/failures/toy": 3.0, "plugins/failures/other": 1.0}
    assert warnings == ["first", "second"]
    assert failures.report(warnings.append) == {}


@pytest.mark.parametrize("error", [NonFiniteError("loss is NaN"), KeyboardInterrupt()])
def test_a_run_that_ends_with_an_error_calls_the_end_hook_and_keeps_the_error(site: Site, error: BaseException) -> None:
    body = "run.settings['calls'].append(error); raise RuntimeError('in the hook')"
    hooks = hooks_of(site, hook("run_end", "error", "run", body=body), place=Place.DRIVER)
    calls: list[Any] = []
    warnings: list[str] = []
    with pytest.raises(type(error)), lifetime(hooks, RunInfo(Path("run"), {"calls": calls}), warn=warnings.append):
        raise error
    assert calls == [error]
    assert len(warnings) == 1
    assert "RuntimeError: in the hook" in warnings[0]


def test_the_end_hook_follows_a_start_hook_that_fails(site: Site) -> None:
    codes = {
        "toy": hook("run_end", "error", "run", body="run.settings['calls'].append(error)"),
        "bad": hook("run_start", body="raise ValueError('no')"),
    }
    hooks = hooks_of(site, codes, place=Place.DRIVER)
    calls: list[Any] = []
    with (
        pytest.raises(PluginError, match=r"'bad' .*slime_run_start .*ValueError: no"),
        lifetime(hooks, RunInfo(Path("r"), {"calls": calls}), warn=print),
    ):
        raise AssertionError("the block of a run that did not start")
    assert [type(error) for error in calls] == [PluginError]


# --- Async hooks ------------------------------------------------------------------------------------------------------


async def test_an_async_hook_stops_at_the_first_result(site: Site) -> None:
    bodies = {"one": "raise ValueError", "two": "return {'eval/two': float(step)}", "three": "seen.append(step)"}
    codes = {name: hook("evaluate", "step", body=body, word="async def") for name, body in bodies.items()}
    hooks = hooks_of(site, codes)
    assert await hooks.first("slime_evaluate", step=7, prompts=None) == {"eval/two": 7.0}
    assert seen(hooks, "three") == [7]
    assert await hooks_of(site, {"three": codes["three"]}).first("slime_evaluate", step=7, prompts=None) is None


async def test_a_sample_passes_through_every_plugin_before_its_reward(site: Site) -> None:
    codes = {
        "two": hook("after_generate", "sample", body="return Sample(index=3, response=sample.response + '!')"),
        "one": hook("after_generate", "sample", "context", body="sample.response += context"),
    }
    hooks = hooks_of(site, {name: code.replace("def ", "async def ") for name, code in codes.items()})
    sample = Sample(index=3, response="a")
    result = await hooks.after_generate(sample, cast("Any", "b"))
    assert (sample.response, result.response) == ("ab", "ab!")


@pytest.mark.parametrize("body", ["return 3", "raise KeyError('x')"])
async def test_an_async_failure_names_the_plugin(site: Site, body: str) -> None:
    hooks = hooks_of(site, hook("after_generate", body=body, word="async def"))
    with pytest.raises(PluginError, match=r"'toy' .*slime_after_generate .*(TypeError|KeyError)"):
        await hooks.after_generate(Sample(), cast("Any", None))


async def test_an_async_observer_fails_three_times_and_is_not_called_again(site: Site) -> None:
    body = "seen.append(0); raise KeyError('x')"
    hooks = hooks_of(site, hook("after_generate", body=body, mark="@hookimpl\n@observer", word="async def"))
    sample = Sample(response="a")
    for _ in range(5):
        assert await hooks.after_generate(sample, cast("Any", None)) is sample
    assert seen(hooks, "toy") == [0, 0, 0]
    assert hooks.failures.take().counts == {"toy": 3}


# --- Results that carry their plugin ----------------------------------------------------------------------------------


def checked(hooks: Hooks) -> Any:
    return hooks.call("slime_check", plan=None, trains=True, code=PerPlugin())


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ("yield 'a'; yield 'b'", ["a (plugin toy)", "b (plugin toy)"]),
        ("return ['a']", ["a (plugin toy)"]),
        ("return 'a'", ["a (plugin toy)"]),
        ("return []", []),
    ],
)
def test_mistakes_in_settings_name_the_plugin_that_found_them(site: Site, body: str, messages: list[str]) -> None:
    assert messages in checked(hooks_of(site, hook("check", body=body)))
    rows = hooks_of(site, hook("check_row", "metadata", body=body.replace("'a'", "metadata['key']")))
    texts = [message.removesuffix(" (plugin toy)") for message in messages]
    assert rows.call("slime_check_row", metadata={"key": "a"}, plan=None) == [texts]


def test_settings_come_with_the_plugin_that_derives_them(site: Site) -> None:
    bodies = {"b": "yield DerivedSetting('lr', 0.5)", "a": "return [DerivedSetting('gamma', 0.5)]", "c": "return None"}
    hooks = hooks_of(site, {name: hook("settings", body=body) for name, body in bodies.items()})
    results = hooks.call("slime_settings", settings={})
    assert [(plugin, setting.name) for entries in results for plugin, setting in entries] == [
        ("a", "gamma"),
        ("b", "lr"),
    ]


def test_prepared_options_come_with_their_plugin(site: Site) -> None:
    hooks = hooks_of(site, {"a": hook("prepare", body="return 3"), "b": hook("prepare", body="return None")})
    assert hooks.call("slime_prepare", plan=None, code=PerPlugin()) == [{"a": 3}]


@pytest.mark.parametrize("name", ["check", "settings", "check_row"])
@pytest.mark.parametrize("body", ["yield 3", "return 3", "yield 'a'; 1 / 0"])
def test_a_wrong_result_is_attributed(site: Site, name: str, body: str) -> None:
    good = "DerivedSetting('lr', 1)" if name == "settings" else "'a'"
    hooks = hooks_of(site, hook(name, body=body.replace("'a'", good)))
    by_hook: dict[str, dict[str, Any]] = {
        "check": {"plan": None, "trains": True, "code": PerPlugin()},
        "settings": {"settings": {}},
        "check_row": {"metadata": {}, "plan": None},
    }
    text = refusal(hooks.call, f"slime_{name}", **by_hook[name])
    assert "'toy'" in text
    assert f"slime_{name}" in text
    assert "ZeroDivisionError" in text if "1 / 0" in body else "TypeError" in text


# --- State in checkpoints ---------------------------------------------------------------------------------------------

STATE = hook("checkpoint_state", "place", body="return {'at': place, 'n': len(seen)} if place != 'rank' else None")
RESTORE = hook("checkpoint_restore", "state", "place", body="seen.append([place, state])")


def test_a_state_returns_to_its_place_and_to_its_plugin(site: Site) -> None:
    registry = activated(site.file("toy", STATE + RESTORE), site.file("idle", RESTORE))
    states = {place: Hooks(registry, place=place).states() for place in Place}
    written = json.loads(json.dumps(states))
    assert written == {
        "driver": {"toy": {"at": "driver", "n": 0}},
        "sampler": {"toy": {"at": "sampler", "n": 0}},
        "rank": {},
    }
    for place in Place:
        Hooks(registry, place=place).restore(written[place])
    assert seen(Hooks(registry), "toy") == [[place, {"at": place, "n": 0}] for place in ("driver", "sampler")]
    assert seen(Hooks(registry), "idle") == []


@pytest.mark.parametrize(
    "value",
    ["[1]", "{'a': [0, (1, 2)]}", "{'a': {3: 1}}", "{3: 1}", "{'a': float('nan')}", "{'a': len}"],
)
def test_a_state_that_json_does_not_hold_is_refused(site: Site, value: str) -> None:
    text = refusal(hooks_of(site, hook("checkpoint_state", body=f"return {value}") + RESTORE).states)
    assert "'toy'" in text
    assert "slime_checkpoint_state" in text


def test_a_restore_that_fails_is_attributed(site: Site) -> None:
    hooks = hooks_of(site, STATE + hook("checkpoint_restore", body="1 / 0"))
    assert "'toy'" in refusal(hooks.restore, {"toy": {"n": 1}})


def test_state_that_no_plugin_restores_is_reported() -> None:
    states = {"driver": {"gone": {"n": 1}, "toy": {"n": 1}}, "rank": {}}
    (text,) = unclaimed_states(states, "other, toy")
    assert "'gone'" in text
    assert "--plugin gone" in text
    assert list(unclaimed_states({"driver": {}}, "")) == []


def seen(hooks: Hooks, name: str) -> list[Any]:
    """The list ``seen`` of the module of plugin ``name``."""
    functions = dict(entry for hook in HOOKS for entry in hooks.implementations(hook))
    values: list[Any] = vars(inspect.getmodule(functions[name]))["seen"]
    return values
