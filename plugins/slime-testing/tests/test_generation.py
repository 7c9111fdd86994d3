"""A generate function of single turns and one of several turns that branches, right and broken in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_testing import GenerateFunctionSuite
from slime_testing.pairs import letters, pairing_encoder

SINGLE = (Path(__file__).with_name("by_hand.py")).read_text(encoding="utf-8")
ADDED = 'generate_function("mine", SingleTurn, scope="group")'
RESUMING = ADDED.replace(")", ", resumes=True)")
TOKENS = "sample.tokens = TokenIds([*prompt_ids, *ids])"
LOG_PROBS = "sample.rollout_log_probs = LogProbs(answer.log_probs)"
UNFINISHED = "unfinished = [sample for"
GATHER = "await asyncio.gather("
RETURNED = "        return samples\n"
IDS = "token_ids_are_those_that_the_engine_sampled"
MASKS = "the_loss_mask_has_one_entry_a_response_token"
SIBLINGS = "siblings_share_a_rollout_id"
ENDED = "what_the_engine_ended_is_not_called_finished"
SINGLES = {
    "text encoded again": (
        "ids = list(answer.token_ids)",
        "ids = context.encoder.encode(context.encoder.decode(list(answer.token_ids)))",
        IDS,
    ),
    "no log-probabilities": (LOG_PROBS, "pass", "log_probs_are_those_of_the_engine"),
    "other log-probabilities": (
        LOG_PROBS,
        LOG_PROBS.replace("answer.log_probs", "[0.0] * len(ids)"),
        "log_probs_are_those_of_the_engine",
    ),
    "a mask of all tokens": (TOKENS, f"{TOKENS}\n        sample.loss_mask = [1] * len(sample.tokens)", MASKS),
    "no versions": ("= list(answer.weight_versions)", "= []", "weight_versions_are_recorded"),
    "still pending": ("FINISHED[answer.finish_reason]", "Status.PENDING", "every_sample_is_finished"),
    "always completed": ("FINISHED[answer.finish_reason]", "Status.COMPLETED", ENDED),
    "the prompt counts as response": ("= len(ids)", "= len(sample.tokens)", "every_sample_is_finished"),
    "the label is lost": (TOKENS, f"{TOKENS}\n        sample.label = None", "label_metadata_and_group_stay"),
    "branches without a common id": (
        RETURNED,
        "        import copy\n        return [*samples, *map(copy.copy, samples)]\n",
        SIBLINGS,
    ),
    "one id for all": (TOKENS, f"{TOKENS}\n        sample.rollout_id = 1", SIBLINGS),
    "one prompt for all": (
        UNFINISHED,
        f"for each in samples: each.prompt = self.__dict__.setdefault('prompt', each.prompt)\n        {UNFINISHED}",
        "prompts_generated_at_once_are_not_mixed_up",
    ),
    "swallows its cancellation": (
        GATHER,
        "import contextlib\n        with contextlib.suppress(asyncio.CancelledError): " + GATHER,
        "it_can_be_cancelled",
    ),
    "an evaluation is left out": (
        "prompt_ids = context",
        "if context.evaluation: return\n    prompt_ids = context",
        "samples_of_an_evaluation_are_finished_too",
    ),
}

ADDING = "sample.response_length = before + len(added)"
RESUMED = "sample.rollout_log_probs = LogProbs([*(sample.rollout_log_probs or ()), *answer.log_probs])"
RESUMES = {
    "sampled again from the prompt": (
        "generate(list(sample.tokens)",
        "generate(list(sample.tokens)[: sample.prompt_length]",
    ),
    "restarted": (
        UNFINISHED,
        f"for each in samples: each.response_length *= each.status is not Status.ABORTED\n        {UNFINISHED}",
    ),
    "left as it was": ("for sample in aborted]", "for sample in aborted if False]"),
    "its tokens are lost": (
        "TokenIds([*sample.tokens, *added])",
        "TokenIds([*sample.tokens[:2], *sample.tokens[4:], *added])",
    ),
    "its log-probabilities are lost": (RESUMED, "sample.rollout_log_probs = LogProbs([-1.0] * (before + len(added)))"),
    "only what was added counts": (ADDING, "sample.response_length = len(added)"),
    "only the new weights": ("[*sample.weight_versions, *answer", "[*answer"),
    "finished ones continue too": (
        UNFINISHED,
        f"for each in samples: each.status = Status.PENDING\n        {UNFINISHED}",
    ),
    "finished ones are dropped": (RETURNED, "        return unfinished\n"),
}

TURNS = """
import dataclasses
from slime_core import Status

class Search:
    async def __call__(self, context, sample, sampling):
        prompt_ids = context.encoder.encode(sample.prompt)
        ids, mask, log_probs = [], [], []
        for turn in range(3):
            (answer,) = await context.client.generate([*prompt_ids, *ids], sampling=sampling)
            ids, mask = [*ids, *answer.token_ids], [*mask, *[1] * len(answer.token_ids)]
            log_probs = [*log_probs, *answer.log_probs]
            if answer.finish_reason == "abort" or "search" not in context.encoder.decode(list(answer.token_ids)):
                break
            found = context.encoder.encode_text(" found it. ")
            ids, mask, log_probs = [*ids, *found], [*mask, *[0] * len(found)], [*log_probs, *[0.0] * len(found)]
        sample.tokens, sample.response_length, sample.loss_mask = [*prompt_ids, *ids], len(ids), mask
        sample.rollout_log_probs = log_probs
        sample.status = Status.ABORTED if answer.finish_reason == "abort" else Status.COMPLETED
        sample.weight_versions = list(answer.weight_versions)
        sample.rollout_id = sample.index
        return [sample, dataclasses.replace(sample)]
"""
SEARCH = 'generate_function("mine", Search)'
TALK = {"answers": ("let me search", "search again", "it is 42")}
SEVERAL = {
    "the text of a tool is trained": ("[0] * len(found)", "[1] * len(found)", IDS),
    "history encoded again": (
        "generate([*prompt_ids, *ids]",
        "generate([*prompt_ids, *context.encoder.encode(context.encoder.decode(ids))] if ids else prompt_ids",
        IDS,
    ),
    "a mask of the sampled tokens only": ("[*mask, *[0] * len(found)]", "mask", MASKS),
    "the text of a tool as a prompt": (
        "encode_text(",
        "encode(",
        "tool_text_is_not_a_new_conversation_of_the_chat_template",
    ),
    "always completed": ('Status.ABORTED if answer.finish_reason == "abort" else ', "", ENDED),
    "branches without a common id": ("sample.rollout_id = sample.index", "pass", SIBLINGS),
}

TRAJECTORY = """
class Search:
    async def __call__(self, context, sample, sampling):
        trajectory = context.start(sample)
        while trajectory.num_turns < 3 and not trajectory.is_full:
            turn = await trajectory.generate(sampling)
            if "search" not in turn.text:
                break
            trajectory.append_text(" found it. ")
        return trajectory.finish()
"""
CHAT = TRAJECTORY.replace('append_text(" found it. ")', 'append_message({"role": "user", "content": "found it."})')


@pytest.mark.parametrize("name", SINGLES)
def test_a_broken_function_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(GenerateFunctionSuite, SINGLE, ADDED, SINGLES[name])


@pytest.mark.parametrize("name", RESUMES)
def test_a_function_that_declares_that_it_resumes_and_does_not_is_caught(
    name: str, violation: Callable[..., str]
) -> None:
    violation(GenerateFunctionSuite, SINGLE, RESUMING, (*RESUMES[name], "an_aborted_turn_resumes_from_its_tokens"))


@pytest.mark.parametrize("prop", [IDS, "weight_versions_are_recorded"])
def test_a_function_that_samples_and_declares_that_it_does_not_is_caught(
    prop: str, violation: Callable[..., str]
) -> None:
    violation(GenerateFunctionSuite, SINGLE, ADDED, ('"group")', '"group", samples_from_engine=False)', prop))


@pytest.mark.parametrize("name", SEVERAL)
def test_a_broken_conversation_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(GenerateFunctionSuite, TURNS, SEARCH, SEVERAL[name], **TALK)


@pytest.mark.parametrize("talk", [{}, TALK], ids=["any tokens", "given answers"])
def test_right_ones_hold_every_property(talk: dict[str, object], holds: Callable[..., None]) -> None:
    holds(GenerateFunctionSuite, TURNS, SEARCH, **talk)
    holds(GenerateFunctionSuite, TRAJECTORY, SEARCH.replace(")", ", resumes=True)"), **talk)


def test_a_right_single_turn_and_a_chat_hold_every_property(holds: Callable[..., None]) -> None:
    holds(GenerateFunctionSuite, SINGLE, RESUMING)
    holds(GenerateFunctionSuite, CHAT, SEARCH, **TALK, apply_chat_template=True)


def test_tokens_sampled_by_the_letter_are_encoded_in_pairs() -> None:
    encoder = pairing_encoder(apply_chat_template=False)
    assert encoder.decode(letters("once 42")) == "once 42"
    assert encoder.encode("once 42") != letters("once 42")
    assert encoder.decode(encoder.encode("once 42")) == "once 42"
