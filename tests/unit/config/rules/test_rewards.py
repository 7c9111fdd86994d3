"""The rules of rewards: each broken once, with its whole text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.measuring import EvalConfig, EvalDataset
from slime_core.config.schema import EngineConfig, RolloutConfig, RunConfig
from slime_core.config.serving import EngineModel
from slime_core.errors import PluginError
from slime_core.plugins.registry import activate
from slime_core.plugins.selection import check_selection

ADDRESS = "rm_url is no address of a service; accepted is http://HOST:PORT/PATH, or the same with https"
SHOWN = (
    "{} holds {} for host written out, which the record of the run would show; export it and write ${{NAME}} in its "
    "place, or have it sent as a header with --rm-token-env NAME"
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rm_url": "localhost:8000"}, ADDRESS),
        ({"rm_url": "file:///etc/passwd"}, ADDRESS),
        (
            {"rm_url": "http://me:secret@host/score"},
            SHOWN.format("rm_url", "a password"),
        ),
        ({"rm_url": "http://token@host/score"}, SHOWN.format("rm_url", "a user")),
        ({"rm_url": "http://host/score?n=1&Api-Key=secret"}, SHOWN.format("rm_url", "Api-Key")),
        ({"rm_url": "http://host/?access_token=secret&auth=${A}"}, SHOWN.format("rm_url", "access_token")),
        (
            {"rm_url": "http://host", "rm_row_urls": ("http://host?sig=secret",)},
            SHOWN.format("rm_row_urls", "sig"),
        ),
        ({"rm_url": "http://host:port/secret"}, ADDRESS),
        (
            {"rm_token_env": "Bearer secret"},
            "rm_token_env is no name of an environment variable; accepted is the name, such as RM_TOKEN, and never the "
            "secret itself",
        ),
        (
            {"rm_row_urls": ("http://host",)},
            "rm_row_urls says which services rows may name besides rm_url, which is not set; add --rm-url URL, for "
            "rows that name none",
        ),
        (
            {"rm_retry_statuses": (429,)},
            "rm_retry_statuses says when rm_url is asked again, which is not set; add --rm-url URL, or leave it out",
        ),
        (
            {"rm_judge_pattern": "(a"},
            "rm_judge_pattern = '(a' is no regular expression: missing ) at position 2",
        ),
        (
            {"rm_judge_prompt": "lost.txt"},
            "rm_judge_prompt = lost.txt is no file; give a text file with {prompt} and {response} in it",
        ),
        (
            {"rm_tokenizer": "lost"},
            "rm_tokenizer = lost is no folder; give the Hugging Face folder of the reward model",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(settings, message):
    config = RunConfig(rollout=RolloutConfig(**settings))
    assert [one.message for one in mistakes(config) if one.message.startswith("rm_")] == [message]
    assert "secret" not in message.replace("the secret itself", "")


CONTEXT = (
    "rm_model = helper reads at most 128 tokens, question and answer together; a response may have "
    "rollout_max_response_len = {}, which leaves no room for the question. Lower {}, or name a model that reads more; "
    "with overrides = {{ allow_auto_truncate = true }} in its table [[engine.engine_models]] it is asked less"
)


@pytest.mark.parametrize(
    ("model", "response", "answer", "said"),
    [
        ({}, 64, 64, CONTEXT.format("64 and its answer rm_judge_max_tokens = 64", "one of the two")),
        ({}, 64, 63, None),
        ({"is_embedding": True}, 128, 512, CONTEXT.format("128", "it")),
        ({"is_embedding": True}, 127, 512, None),
        ({"overrides": {"allow_auto_truncate": True}}, 64, 512, None),
        ({"name": "other"}, 1024, 512, None),
    ],
)
def test_a_judge_whose_context_holds_no_response_is_refused_before_the_run(tmp_path, model, response, answer, said):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    engine = EngineConfig(engine_models=(EngineModel(**{"name": "helper", "model_path": tmp_path, **model}),))
    rollout = RolloutConfig(rm_model="helper", rollout_max_response_len=response, rm_judge_max_tokens=answer)
    found = [one.message for one in mistakes(RunConfig(rollout=rollout, engine=engine))]
    assert [one for one in found if one.startswith("rm_model")] == ([] if said is None else [said])


@pytest.mark.parametrize("url", ["http://me:${KEY}@host/score", "http://host/?token=${KEY}&tokens=&keyboard=qwerty"])
def test_a_password_may_come_from_the_environment(url):
    config = RunConfig(rollout=RolloutConfig(rm_url=url))
    assert not [one.message for one in mistakes(config) if one.message.startswith("rm_")]


@pytest.mark.parametrize(("rewards", "setting"), [("remote_rm", "rm_url"), ("1*judge+1*math", "rm_model")])
def test_a_reward_model_that_asks_nobody_is_refused_before_the_run(rewards, setting):
    config, registry = RunConfig(rollout=RolloutConfig(rm_type=rewards)), activate(["rewards"]).registry
    name = {"rm_url": "remote_rm", "rm_model": "judge"}[setting]
    refused(config, registry, f"rm_type = {rewards}", name, setting)


def test_one_of_an_evaluation_set_that_asks_nobody_is_refused_before_the_run():
    dataset = EvalDataset(name="aime", path=Path("aime.jsonl"), rm_type="1*judge+1*math")
    config = RunConfig(eval=EvalConfig(eval_datasets=(dataset,)))
    refused(config, activate(["rewards"]).registry, "evaluation set aime", "judge", "rm_model")


def refused(config, registry, by, name, setting):
    with pytest.raises(PluginError) as failure:
        check_selection(config, registry, trains=False)
    owner = registry.owner("reward_model", name)
    assert str(failure.value) == (
        f"{by}: reward model {name!r} of {owner} needs {setting}, which is not set. Add "
        f"--{setting.replace('_', '-')}, or choose another reward model."
    )


SERVED = (
    EngineModel(name="scorer", model_path=Path("m"), is_embedding=True),
    EngineModel(name="helper", model_path=Path("m")),
)
ADVICE = "is_embedding = {} in its table [[engine.engine_models]], name another with --rm-model, or choose another"


@pytest.mark.parametrize(
    ("name", "model", "said"),
    [
        (
            "judge",
            "helpr",
            "asks rm_model = helpr (did you mean 'helper'?), and beside the policy the run serves helper (texts), "
            "scorer (scores). Name one of them with --rm-model, or serve it: a table [[engine.engine_models]] with "
            "name and model_path.",
        ),
        (
            "judge",
            "scorer",
            "asks for texts, and rm_model = scorer is served for scores; beside the policy the run serves helper "
            f"(texts), scorer (scores). Give {ADVICE.format('false')} reward model.",
        ),
        (
            "served_rm",
            "helper",
            "asks for scores, and rm_model = helper is served for texts; beside the policy the run serves helper "
            f"(texts), scorer (scores). Give {ADVICE.format('true')} reward model.",
        ),
    ],
)
def test_a_model_that_is_not_served_as_it_is_asked_is_refused_before_the_run(name, model, said):
    registry = activate(["rewards"]).registry
    with pytest.raises(PluginError) as failure:
        check_selection(asking(name, model), registry, trains=False)
    owner = registry.owner("reward_model", name)
    assert str(failure.value) == f"rm_type = {name}: reward model {name!r} of {owner} {said}"


@pytest.mark.parametrize(("name", "model"), [("judge", "helper"), ("served_rm", "scorer")])
def test_a_model_that_is_served_as_it_is_asked_passes(name, model):
    check_selection(asking(name, model), activate(["rewards"]).registry, trains=False)


def asking(name, model):
    return RunConfig(rollout=RolloutConfig(rm_type=name, rm_model=model), engine=EngineConfig(engine_models=SERVED))


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"rm_url": "http://host?key=${NOT_SET}"}, "rm_url"), ({"rm_token_env": "NOT_SET"}, "rm_token_env")],
)
def test_a_secret_that_is_not_there_is_missed_before_the_run(settings, setting):
    rollout = RolloutConfig(**{"rm_type": "remote_rm", "rm_url": "http://host", **settings})
    with pytest.raises(PluginError) as failure:
        check_selection(RunConfig(rollout=rollout), activate(["rewards"]).registry, trains=False)
    assert str(failure.value).endswith(
        f"is asked with the secret that {setting} names, the environment variable NOT_SET, and it is not set. Export "
        "it before the run, on a cluster in the runtime environment of the job."
    )
