"""Plugin ``searchr1``: Search-R1 (2503.09516), with an invented world to search in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_core import EvalSamples, RunPlan, Sample
    from slime_core.provisional import DerivedSetting
    from slime_core.types import JsonValue
    from slime_searchr1.options import SearchOptions

WORLD = Path(__file__).parent / "world"
"""The invented world: model, questions and passages; made by ``examples/search_r1``."""

TASK: Mapping[str, JsonValue] = {
    "hf_checkpoint": str(WORLD / "model"),
    "prompt_data": str(WORLD / "data" / "train.jsonl"),
    "num_rollout": 40,
    "rollout_max_response_len": 192,
    "max_turns": 3,
    "lr": 1e-3,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 5,
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
}
"""Settings of a run in the invented world; units as in the settings' own descriptions."""

EVALUATION: Mapping[str, JsonValue] = {
    "eval_interval": 10,
    "eval_datasets": [
        {
            "name": "held_out",
            "path": str(WORLD / "data" / "held_out.jsonl"),
            "rm_type": "search_r1",  # even if the run trains with another reward model
            "reward_key": "exact_match",
        }
    ],
}
"""Settings of the evaluations in the invented world."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.generate_function("search_r1", "slime_searchr1.generate:SearchAndAnswer")
    add.reward_model("search_r1", "slime_searchr1.reward:AnswerMatch", numbers={"score", "exact_match", "format"})
    add.options("slime_searchr1.options:SearchOptions")
    add.presets(
        advantage_estimator="grpo",
        generate_function="search_r1",
        rm_type="search_r1",
        label_key="reward_model",
        apply_chat_template=True,
    )
    add.command("searchr1", "slime_searchr1.serve:main")


@hookimpl
def slime_settings(options: SearchOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    """Select the reward's number for training and for evaluation; if neither model nor prompts are given, use those of
    the invented world."""
    from slime_core.provisional import DerivedSetting

    if _is_ours(settings.get("rm_type")):
        for key, number in (("reward_key", "score"), ("eval_reward_key", "exact_match")):
            if settings.get(key) is None:
                yield DerivedSetting(key, number)
    if _is_ours(settings.get("generate_function")) and not any(map(settings.get, ("hf_checkpoint", "prompt_data"))):
        reads = settings.get("debug_train_only") or settings.get("load_debug_rollout_data")  # starts no engine
        evaluates = not reads and "eval_prompt_data" not in settings
        task = {**TASK, **(EVALUATION if evaluates else {})}
        yield from (DerivedSetting(key, value) for key, value in task.items() if key not in settings)


def _is_ours(component: JsonValue) -> bool:
    return component in ("search_r1", "searchr1:search_r1")


@hookimpl
def slime_check(plan: RunPlan, options: SearchOptions) -> Iterator[str]:
    url = options.search_url
    if url is not None:
        from slime_core.services import missing_secrets, url_mistakes  # imports aiohttp

        yield from (f"--search-url {mistake}" for mistake in url_mistakes(url))
        for name in missing_secrets(url):
            yield f"--search-url names the environment variable {name}, which is not set; export it before the run"
    if options.corpus is not None and not options.corpus.is_file():
        yield f"--searchr1.corpus {options.corpus} is not a file; give a JSON Lines file of passages"
    if _is_ours(plan.settings.get("generate_function")):
        if plan.settings.get("max_turns") == 1:
            yield "--max-turns 1 leaves no turn after a search; give 2 or more"
        if plan.settings.get("hf_checkpoint") is None:
            yield (
                "--prompt-data needs the model that reads the prompts: --hf-checkpoint FOLDER. Leave --prompt-data out "
                "for the questions and the model of the invented world"
            )


@hookimpl
def slime_log_rollout(samples: Sequence[Sample], metrics: dict[str, float]) -> None:
    """Add ``search_r1/searches``, ``failures``, ``invalid`` and, with this plugin's reward, ``exact_match`` and
    ``format``: averages over responses."""
    metrics |= {f"search_r1/{name}": value for name, value in _averages(samples).items()}


@hookimpl
def slime_log_evaluation(sets: Mapping[str, EvalSamples], metrics: dict[str, float]) -> None:
    """Add the metrics of each evaluation set, under ``eval/SET/search_r1/``."""
    for name, evaluated in sets.items():
        metrics |= {f"eval/{name}/search_r1/{key}": value for key, value in _averages(evaluated.samples).items()}


def _averages(samples: Sequence[Sample]) -> dict[str, float]:
    """Return averages over the samples of generate function ``search_r1``; empty if there are none."""
    counts = [entry for sample in samples if isinstance(entry := sample.metadata.get("search_r1"), Mapping)]
    if not counts:
        return {}
    averages = {
        name: fmean(float(str(entry.get(name, 0))) for entry in counts) for name in ("searches", "failures", "invalid")
    }
    rewards = [sample.reward for sample in samples if isinstance(sample.reward, Mapping)]
    for name in ("exact_match", "format"):
        if numbers := [reward[name] for reward in rewards if name in reward]:
            averages[name] = fmean(numbers)
    return averages
