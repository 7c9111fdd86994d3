"""Generate functions as slime's users write them, against an engine that listens."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from slime_compat import GenerateState, generate_single
from slime_compat.generate import PathGenerate
from slime_compat.paths import PathOptions
from slime_core.config.secrets import engine_access, key_of_run, send_key_to
from slime_core.errors import PluginError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

SAMPLING = SamplingParams(max_new_tokens=40)
END = 1


def group(size: int = 2) -> list[Sample]:
    return [Sample(group_index=3, index=6 + i, prompt="1+1") for i in range(size)]


async def generate(options: PathOptions, context: GenerateContext, size: int = 2) -> list[Sample]:
    return await PathGenerate(options)(context, group(size), SAMPLING)


RAW = """
    async def generate(args, sample, sampling_params):
        url = f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}/generate"
        payload = {{"input_ids": [6, 15, 6], "sampling_params": sampling_params, "return_logprob": True}}
        {}
        sample.tokens = [6, 15, 6]
        sampled = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(args, tokens=[t[1] for t in sampled], log_probs=[t[0] for t in sampled])
        return sample
"""
CLIENTS = {
    "aiohttp": """import aiohttp
        async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
            answer = await response.json()""",
    "httpx": """import httpx
        async with httpx.AsyncClient() as client:
            answer = (await client.post(url, json=payload)).json()""",
    "httpx with a key of its own": """import httpx
        with httpx.Client(headers={"Authorization": "Bearer EMPTY"}) as client:
            answer = client.post(url, json=payload).json()""",
    "requests": """import requests
        answer = requests.post(url, json=payload, timeout=60).json()""",
    "urllib": """import json, urllib.request
        body = json.dumps(payload).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)""",
}


@pytest.fixture
async def keyed(plain: PromptEncoder) -> AsyncIterator[tuple[FakeEngine, GenerateContext]]:
    """An engine that requires the key of the run."""
    with key_of_run(), FakeEngine(key=engine_access().key_text) as engine:
        send_key_to(engine.url)
        async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
            yield engine, GenerateContext(client, plain)


@pytest.mark.parametrize("library", CLIENTS)
async def test_a_function_that_posts_with_any_library_needs_no_word_of_the_key(write, keyed, library: str) -> None:
    engine, context = keyed
    samples = await generate(write("custom_generate_function_path", RAW.format(CLIENTS[library])), context)
    assert [sample.status for sample in samples] == [Status.COMPLETED] * 2, samples[0].error
    with FakeEngine() as stranger:
        assert "Authorization" not in await asyncio.to_thread(_headers_to, stranger)
    assert len(engine.headers) == 2


def _headers_to(stranger: FakeEngine) -> Mapping[str, str]:
    body = json.dumps({"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"{stranger.url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60):
        return stranger.headers[-1]


async def test_an_error_401_says_which_header_is_missing(write, keyed) -> None:
    raises = """
    import urllib.error

    async def generate(args, sample, sampling_params):
        raise urllib.error.HTTPError("http://127.0.0.1:1/generate", 401, "Unauthorized", None, None)
    """
    samples = await generate(write("custom_generate_function_path", raises), keyed[1])
    assert "engine_headers(url)" in (samples[0].error or "")


async def test_evaluation_is_passed_to_a_function_that_names_it(write, client, plain) -> None:
    text = "async def f(args, sample, sampling_params, evaluation=False):\n    sample.response = f'{evaluation}'\n"
    options = write("custom_generate_function_path", text + "    return sample")
    (sample,) = await generate(options, GenerateContext(client, plain, evaluation=True), 1)
    assert (sample.response, sample.status) == ("True", Status.COMPLETED)


OVER_A_LIST = """
    from slime_compat import generate_single

    async def custom_generate(args, samples, evaluation=False):
        for sample in samples:
            text = sample.prompt
            for turn in range(args.max_turns):
                text += await generate_single(text)
                text += "+"
            sample.response = text
        return samples
"""


async def test_a_function_over_a_list_may_use_the_generate_of_the_core(write, context, engine) -> None:
    samples = await generate(write("custom_generate_function_path", OVER_A_LIST, "--max-turns", "2"), context)
    assert [sample.index for sample in samples] == [6, 7]
    for sample in samples:
        prompt, response = list(sample.tokens[:3]), list(sample.tokens[3:])
        first = [sum(prompt) % 14 + 2]
        while len(first) < 4:
            first.append(sum([*prompt, *first]) % 14 + 2)
        # The first answer with its end, and then only what was added: nothing is encoded twice.
        assert (prompt, response[:6]) == ([6, 15, 6], [*first, END, 15])
        assert list(sample.loss_mask or ()) == [1] * 5 + [0] + [1] * 5
        assert sample.status is Status.COMPLETED
        assert len(sample.rollout_log_probs or ()) == sample.response_length == 11


AS_PUBLISHED = """
    from slime.data import Sample

    async def custom_generate(args, samples, evaluation=False):
        for sample in samples:
            conversation = [{"role": "user", "content": sample.prompt}]
            sample.response = await generate_single(conversation)
            sample.loss_mask = [1, 0, 1, 1, 0]
        return samples
"""


async def test_the_published_example_runs_without_an_import_and_its_loss_mask_is_kept(write, client, chat) -> None:
    samples = await generate(write("custom_generate_function_path", AS_PUBLISHED), GenerateContext(client, chat))
    assert [list(sample.loss_mask or ()) for sample in samples] == [[1, 0, 1, 1, 0]] * 2
    assert all(len(sample.rollout_log_probs or ()) == 5 for sample in samples)


SLIMES = """
    from slime.rollout.sglang_rollout import GenerateState, generate
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    async def custom_generate(args, sample, sampling_params):
        state = GenerateState(args)
        sample = await generate(args, sample, sampling_params)
        sample.metadata = {"text": state.tokenizer.decode(sample.tokens[-2:])}
        if len(sample.tokens) < 12:
            sample = await generate(args, sample, sampling_params)
        return sample
"""


async def test_slimes_generate_fills_a_sample_and_goes_on_from_one_that_has_a_response(write, context) -> None:
    samples = await generate(write("custom_generate_function_path", SLIMES), context)
    for sample in samples:
        assert sample.response_length == len(sample.rollout_log_probs or ()) == sum(sample.loss_mask or ()) == 10
        assert len(sample.tokens) == 13
        assert sample.status is Status.COMPLETED
        assert list(sample.tokens[3:8])[-1] == END


CHAT = """
    from slime_compat import generate_single

    async def custom_generate(args, sample, sampling_params):
        turns = [{"role": "user", "content": sample.prompt}]
        answer = await generate_single(turns, {"max_new_tokens": args.first})
        turns.append({"role": "assistant", "content": answer.strip() + " "})
        turns.append({"role": "user", "content": "7"})
        answer = await generate_single(turns)
        sample.metadata = {"ids": answer.token_ids, "why": answer.finish_reason, "text": answer.text}
        return sample
"""


@pytest.mark.parametrize(("first", "num_sampled", "added"), [(3, 3, [END, 3, 12, 4]), (8, 5, [3, 12, 4])])
async def test_a_chat_continues_from_the_ids_that_were_sampled(
    write, client, chat, first: int, num_sampled: int, added: list[int]
) -> None:
    options = write("custom_generate_function_path", CHAT)
    options.arguments.first = first
    (sample,) = await generate(options, GenerateContext(client, chat), 1)
    # <|user|> 1+1 <|assistant|>, the sampled tokens, <|user|> 7 <|assistant|>; before it <eos>, unless it was sampled.
    assert list(sample.tokens[:5]) == [3, 6, 15, 6, 4]
    assert list(sample.tokens[5 + num_sampled : -5]) == added
    assert list(sample.loss_mask or ()) == [1] * num_sampled + [0] * len(added) + [1] * 5
    assert (sample.metadata["ids"], sample.metadata["why"]) == (list(sample.tokens[-5:]), "stop")


async def test_the_guide_prints_a_conversation_of_two_turns(write, client, chat) -> None:
    guide = (Path(__file__).parents[3] / "docs/plugins.md").read_text(encoding="utf-8")
    options = write("custom_generate_function_path", guide.partition("```python turns\n")[2].partition("```")[0])
    options.arguments.second_question = "7"
    (sample,) = await generate(options, GenerateContext(client, chat), 1)
    # Both turns train, <|user|> 7 <|assistant|> between them does not.
    assert list(sample.tokens[10:13]) == [3, 12, 4]
    assert list(sample.loss_mask or ()) == [1] * 5 + [0] * 3 + [1] * 5


async def test_siblings_of_a_fan_out_share_a_rollout(write, context) -> None:
    text = """
        import copy
        from slime_compat import generate_single

        async def fan_out(args, sample, sampling_params):
            other = copy.deepcopy(sample)
            for one, prompt in ((sample, "1+2"), (other, "1+3")):
                answer = await generate_single(prompt)
                one.tokens, one.response_length = [6, 15, 7, *answer.token_ids], len(answer.token_ids)
                one.rollout_log_probs, one.response = answer.log_probs, answer
            return [sample, other]
        """
    samples = await generate(write("custom_generate_function_path", text), context)
    assert [(one.group_index, one.index, one.rollout_id) for one in samples] == [(3, 6, 6)] * 2 + [(3, 7, 7)] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "it returned builtins.NoneType"),
        ("return []", "it returned no sample"),
        ("return sample", "with 0 tokens"),
        ("sample.tokens, sample.response_length = [6, 7], 1; return sample", "no rollout_log_probs"),
        (
            "sample.append_response_tokens(tokens=[6], log_probs=[-1.0]); sample.tokens = [5, 6]; "
            "sample.loss_mask = [1, 1]; return sample",
            "2 entries of loss_mask",
        ),
        ("import copy; b = copy.copy(sample); b.rollout_id = 1; return [sample, b]", "rollout ids ['1', 'None']"),
        ("sample.append_response_tokens(tokens=[6]); return sample", "ValueError: sample 6: 1 more"),
        ("await generate_single('1+1'); await generate_single('2+2'); return sample", "2 conversations"),
    ],
)
async def test_samples_that_cannot_be_trained_are_refused(write, context, body: str, message: str) -> None:
    text = f"async def f(args, sample, sampling_params): {body}"
    with pytest.raises(PluginError) as refused:
        await generate(write("custom_generate_function_path", text), context, 1)
    assert str(refused.value).startswith("--custom-generate-function-path mine.py: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "failure",
    [
        "await post('http://127.0.0.1:1/search', {})",
        "raise EngineError('x')",
        "raise ConnectionResetError('x')",
        "raise asyncio.TimeoutError('x')",
        "raise socket.gaierror(-2, 'x')",
        "raise OSError(errno.EHOSTUNREACH, 'x')",
        "raise aiohttp.ServerDisconnectedError('x')",
        "raise urllib.error.URLError('x')",
        "raise requests.ConnectionError('x')",
        "raise httpx.ReadTimeout('x')",
    ],
)
async def test_a_server_that_does_not_answer_costs_the_sample_only(write, context, failure: str) -> None:
    text = f"""
        import asyncio, aiohttp, errno, httpx, requests, socket, urllib.error
        from slime_compat import post
        from slime_core.errors import EngineError

        async def f(args, sample, sampling_params):
            if sample.index == 6:
                {failure}
            sample.tokens, sample.response_length, sample.rollout_log_probs = [6, 7], 1, [-0.5]
            return sample
        """
    failed, other = await generate(write("custom_generate_function_path", text, name=":f"), context)
    assert (failed.status, bool(failed.error), other.status) == (Status.FAILED, True, Status.COMPLETED)


@pytest.mark.parametrize(
    "failure", ["FileNotFoundError", "PermissionError", "IsADirectoryError", "OSError", "KeyError"]
)
async def test_a_mistake_with_files_ends_the_run(write, context, failure: str) -> None:
    text = f"async def f(args, sample, sampling_params): raise {failure}('tools.json')"
    with pytest.raises(PluginError, match=f"{failure}: .*tools.json"):
        await generate(write("custom_generate_function_path", text), context, 1)


async def test_samples_under_way_are_bounded(write, context, engine) -> None:
    engine.delay_s = 0.02
    text = RAW.format(CLIENTS["aiohttp"])
    options = write("custom_generate_function_path", text, "--sglang-server-concurrency", "2")
    await generate(options, context, 6)
    assert engine.most_in_flight == 2


async def test_helpers_do_not_work_outside_of_a_call() -> None:
    with pytest.raises(PluginError, match="generate_single"):
        await generate_single("1+1")
    with pytest.raises(PluginError, match="GenerateState"):
        GenerateState(None)
