"""A generate function of single turns, broken in one place; and one of several turns that branches."""

from __future__ import annotations

import pytest

from slime_testing import GenerateFunctionSuite
from slime_testing.pairs import letters, pairing_encoder
from slime_testing.suite import properties

SINGLE = """
import asyncio
from slime_core import Component, GenerateTraits, hookimpl

@hookimpl
def slime_register_generate_functions():
    yield Component("mine", target=f"{__name__}:SingleTurn", traits=GenerateTraits(scope="group"))
"""
TOKENS = "sample.tokens = TokenIds([*prompt_ids, *ids])"
LOG_PROBS = "sample.rollout_log_probs = LogProbs(answer.log_probs)"
VERSIONS = "sample.weight_versions = list(answer.weight_versions)"
UNFINISHED = "fresh, ended = unfinished(samples)"
TOGETHER = "await together([*new, *going_on])"
ENCODED = "prompt_ids = context.encoder.encode(samples[0].prompt)"
AGAIN = "ids = encoder.encode(sample.response)\n    sample.tokens = TokenIds([*prompt_ids, *ids])"
SINGLES = {
    "text encoded again": (
        "    sample.response_length = len(ids)\n    sample.rollout_log_probs = LogProbs(answer.log_probs)",
        f"    {AGAIN}\n    sample.response_length = len(ids)\n"
        "    sample.rollout_log_probs = LogProbs([-0.5] * len(ids))",
        "token_ids_are_those_that_the_engine_sampled",
    ),
    "no log-probabilities": (LOG_PROBS, "pass", "log_probs_are_those_of_the_engine"),
    "log-probabilities of its own": (
        LOG_PROBS,
        "sample.rollout_log_probs = LogProbs([0.0] * len(ids))",
        "log_probs_are_those_of_the_engine",
    ),
    "a mask of all tokens": (
        TOKENS,
        TOKENS + "\n    sample.loss_mask = [1] * len(sample.tokens)",
        "the_loss_mask_has_one_entry_a_response_token",
    ),
    "no versions": (VERSIONS, "pass", "weight_versions_are_recorded"),
    "still pending": ("sample.status = FINISHED[answer.finish_reason]", "pass", "every_sample_is_finished"),
    "finished, whatever the engine says": (
        "sample.status = FINISHED[answer.finish_reason]",
        "sample.status = Status.COMPLETED",
        "what_the_engine_ended_is_not_called_finished",
    ),
    "the prompt counts as response": (
        "sample.response_length = len(ids)",
        "sample.response_length = len(sample.tokens)",
        "every_sample_is_finished",
    ),
    "the label is lost": (TOKENS, TOKENS + "\n    sample.label = None", "label_metadata_and_group_stay"),
    "branches without a common id": (
        "        return samples\n",
        "        import dataclasses\n        return [*samples, *(dataclasses.replace(one) for one in samples)]\n",
        "siblings_share_a_rollout_id",
    ),
    "one id for all": (TOKENS, TOKENS + "\n    sample.rollout_id = 1", "siblings_share_a_rollout_id"),
    "one prompt for all": (
        UNFINISHED,
        f"for one in samples: one.prompt = self.__dict__.setdefault('prompt', one.prompt)\n        {UNFINISHED}",
        "prompts_generated_at_once_are_not_mixed_up",
    ),
    "swallows its cancellation": (
        TOGETHER,
        f"try:\n            {TOGETHER}\n        except asyncio.CancelledError:\n            return samples",
        "it_can_be_cancelled",
    ),
    "an evaluation is left out": (
        ENCODED,
        f"if context.evaluation: return\n    {ENCODED}",
        "samples_of_an_evaluation_are_finished_too",
    ),
}

RESUMED = "await context.client.generate(list(sample.tokens), sampling=rest"
ADDED = "    add(sample, answer, context.encoder, masks=context.masks_resumed)"
RESUMES = {
    "sampled again from the prompt": (
        RESUMED,
        RESUMED.replace("list(sample.tokens)", "list(sample.tokens)[: sample.prompt_length]"),
    ),
    "restarted": (
        UNFINISHED,
        f"for one in samples: one.response_length *= one.status is not Status.ABORTED\n        {UNFINISHED}",
    ),
    "left as it was": ("for sample in ended]", "for sample in ended if False]"),
    "its tokens are lost": (ADDED, f"{ADDED}\n    sample.tokens = TokenIds(sample.tokens[:2] + sample.tokens[4:])"),
    "its log-probabilities are lost": (
        ADDED,
        f"{ADDED}\n    sample.rollout_log_probs = LogProbs([-1.0] * sample.response_length)",
    ),
    "only what was added counts": (ADDED, f"{ADDED}\n    sample.response_length = len(answer.token_ids)"),
    "only the new weights": (ADDED, f"{ADDED}\n    sample.weight_versions = list(answer.weight_versions)"),
    "finished ones go on too": (UNFINISHED, f"for one in samples: one.status = Status.PENDING\n        {UNFINISHED}"),
    "finished ones are dropped": (
        "        return samples\n",
        "        return [one for one in samples if one.response_length and one in [*fresh, *ended]]\n",
    ),
}

TURNS = """
import dataclasses
from slime_core import Component, GenerateTraits, Status, hookimpl

@hookimpl
def slime_register_generate_functions():
    yield Component("mine", target=f"{__name__}:Search", traits=GenerateTraits(scope="sample"))

class Search:
    def __init__(self, options, run): pass

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
TALK = {"answers": ("let me search", "search again", "it is 42")}
SEVERAL = {
    "what a tool wrote is trained": (
        "[0] * len(found)",
        "[1] * len(found)",
        "token_ids_are_those_that_the_engine_sampled",
    ),
    "history encoded again": (
        "generate([*prompt_ids, *ids]",
        "generate([*prompt_ids, *context.encoder.encode(context.encoder.decode(ids))] if ids else prompt_ids",
        "token_ids_are_those_that_the_engine_sampled",
    ),
    "a mask of the sampled tokens only": (
        "[*mask, *[0] * len(found)]",
        "mask",
        "the_loss_mask_has_one_entry_a_response_token",
    ),
    "a tool's text as a prompt of the chat template": (
        'context.encoder.encode_text(" found it. ")',
        'context.encoder.encode(" found it. ")',
        "tool_text_is_not_a_new_conversation_of_the_chat_template",
    ),
    "finished, whatever the engine says": (
        'Status.ABORTED if answer.finish_reason == "abort" else Status.COMPLETED',
        "Status.COMPLETED",
        "what_the_engine_ended_is_not_called_finished",
    ),
    "branches without a common id": ("sample.rollout_id = sample.index", "pass", "siblings_share_a_rollout_id"),
}


@pytest.mark.parametrize("name", SINGLES)
def test_a_broken_function_is_caught_by_the_property_that_names_it(name, first_party, broken, violation):
    old, new, prop, *error = SINGLES[name]
    source = broken(first_party("plugins/slime-testing/tests/by_hand.py", SINGLE), old, new)
    violation(GenerateFunctionSuite, source, prop, *error)


@pytest.mark.parametrize("name", RESUMES)
def test_a_function_that_says_that_it_resumes_and_does_not_is_caught(name, first_party, broken, violation):
    old, new = RESUMES[name]
    source = first_party("plugins/slime-testing/tests/by_hand.py", SINGLE)
    resuming = broken(source, 'GenerateTraits(scope="group")', 'GenerateTraits(scope="group", resumes=True)')
    violation(GenerateFunctionSuite, broken(resuming, old, new), "an_aborted_turn_resumes_from_its_tokens")


@pytest.mark.parametrize("name", SEVERAL)
def test_a_broken_conversation_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = SEVERAL[name]
    violation(GenerateFunctionSuite, broken(TURNS, old, new), prop, *error, **TALK)


@pytest.mark.parametrize("prop", ["token_ids_are_those_that_the_engine_sampled", "weight_versions_are_recorded"])
def test_a_function_that_samples_and_declares_that_it_does_not_is_caught(prop, first_party, broken, violation):
    source = first_party("plugins/slime-testing/tests/by_hand.py", SINGLE)
    unsampled = broken(
        source, 'GenerateTraits(scope="group")', 'GenerateTraits(scope="group", samples_from_engine=False)'
    )
    violation(GenerateFunctionSuite, unsampled, prop)


@pytest.mark.parametrize("name", properties(GenerateFunctionSuite))
@pytest.mark.parametrize("talk", [{}, TALK], ids=["any tokens", "given answers"])
def test_the_right_conversation_holds_every_property(name, talk, suite_of):
    getattr(suite_of(GenerateFunctionSuite, TURNS, **talk)(), name)()


CALCULATOR = """
from slime_core import Component, GenerateTraits, hookimpl

@hookimpl
def slime_register_generate_functions():
    yield Component("mine", target=f"{__name__}:Search", traits=GenerateTraits(scope="sample", resumes=True))

class Search:
    def __init__(self, options, run): pass

    async def __call__(self, context, sample, sampling):
        trajectory = context.start(sample)
        while trajectory.num_turns < 3 and not trajectory.is_full:
            turn = await trajectory.generate(sampling)
            if "search" not in turn.text:
                break
            trajectory.append_text(" found it. ")
        return trajectory.finish()
"""


CHAT = CALCULATOR.replace(
    'trajectory.append_text(" found it. ")', 'trajectory.append_message({"role": "user", "content": "found it."})'
)


@pytest.mark.parametrize("name", properties(GenerateFunctionSuite))
def test_messages_that_continue_a_chat_hold_every_property(name, suite_of):
    getattr(suite_of(GenerateFunctionSuite, CHAT, **TALK, apply_chat_template=True)(), name)()


@pytest.mark.parametrize("name", properties(GenerateFunctionSuite))
@pytest.mark.parametrize("talk", [{}, TALK], ids=["any tokens", "given answers"])
def test_a_conversation_written_with_a_trajectory_holds_every_property_and_resumes(name, talk, suite_of):
    getattr(suite_of(GenerateFunctionSuite, CALCULATOR, **talk)(), name)()


def test_tokens_sampled_by_the_letter_are_encoded_in_pairs():
    encoder = pairing_encoder(apply_chat_template=False)
    assert encoder.decode(letters("once 42")) == "once 42"
    assert encoder.encode("once 42") != letters("once 42")
    assert encoder.decode(encoder.encode("once 42")) == "once 42"
