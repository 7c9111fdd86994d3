"""Generate functions as slime's users write them, against an engine that listens."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from slime_compat import GenerateState, generate_single
from slime_compat.generate import PathGenerate
from slime_compat.options import PathOptions
from slime_core import RunView
from slime_core.config.secrets import engine_access, key_of_run, send_key_to
from slime_core.errors import EngineError, PluginError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
SAMPLING = SamplingParams(max_new_tokens=40)
END = 1


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=False)


@pytest.fixture
async def context(engine: FakeEngine, encoder: PromptEncoder) -> AsyncIterator[GenerateContext]:
    async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
        yield GenerateContext(client, encoder)


def group(size: int = 2) -> list[Sample]:
    return [Sample(group_index=3, index=6 + i, prompt="1+1") for i in range(size)]


async def generate(options: PathOptions, context: GenerateContext, size: int = 2) -> list[Sample]:
    return await PathGenerate(options, RunView())(context, group(size), SAMPLING)


POSTS = """
    import copy

    from slime_core import Sample
    from slime_compat import GenerateState, post

    async def generate(args, sample, sampling_params):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        ids = GenerateState(args).tokenizer(sample.prompt)["input_ids"]
        sample.tokens = ids
        for turn in range(args.max_turns):
            payload = {"input_ids": list(sample.tokens), "sampling_params": sampling_params, "return_logprob": True}
            answer = await post(url, payload)
            sampled = answer["meta_info"]["output_token_logprobs"]
            sample.append_response_tokens(
                args, tokens=[t[1] for t in sampled], log_probs=[t[0] for t in sampled], meta_info=answer["meta_info"]
            )
            if sample.status == Sample.Status.TRUNCATED:
                break
            if turn + 1 < args.max_turns:
                sample.append_response_tokens(args, tokens=[15, 5], trainable=False)
        sampling_params["max_new_tokens"] = 0
        return sample
"""


async def test_a_function_may_post_to_the_router_itself(write, context, engine) -> None:
    options = write("custom_generate_function_path", POSTS, "--max-turns", "2")
    first, second = await generate(options, context)
    assert engine.calls == ["/generate"] * 4
    assert (first.group_index, first.index, second.index) == (3, 6, 7)
    assert first.status is Status.COMPLETED
    assert list(first.tokens[:3]) == [6, 15, 6]
    assert list(first.loss_mask or ()) == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert list(first.rollout_log_probs or ()) == [-0.5] * 5 + [0.0] * 2 + [-0.5] * 5
    assert (first.response_length, first.weight_versions) == (12, ["default"])
    assert second.tokens == first.tokens


RAW = """
    {imports}

    async def generate(args, sample, sampling_params):
        url = f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}/generate"
        payload = {{"input_ids": [6, 15, 6], "sampling_params": sampling_params, "return_logprob": True}}
        {request}
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
async def keyed(encoder: PromptEncoder) -> AsyncIterator[tuple[FakeEngine, GenerateContext]]:
    """An engine that requires the key of the run."""
    with key_of_run(), FakeEngine(key=engine_access().key_text) as engine:
        send_key_to(engine.url)
        async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
            yield engine, GenerateContext(client, encoder)


@pytest.mark.parametrize("library", CLIENTS)
async def test_a_function_that_posts_with_any_library_needs_no_word_of_the_key(write, keyed, library: str) -> None:
    engine, context = keyed
    text = RAW.format(imports="", request=CLIENTS[library])
    samples = await generate(write("custom_generate_function_path", text), context)
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


async def test_evaluation_is_passed_to_a_function_that_names_it(write, context, encoder) -> None:
    text = "async def f(args, sample, sampling_params, evaluation=False):\n    sample.response = f'{evaluation}'\n"
    options = write("custom_generate_function_path", text + "    return sample")
    (sample,) = await generate(options, GenerateContext(context.client, encoder, evaluation=True), 1)
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


async def test_the_published_example_runs_without_an_import_and_its_loss_mask_is_kept(write, engine) -> None:
    encoder = PromptEncoder(FOLDER, apply_chat_template=True)
    async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
        options = write("custom_generate_function_path", AS_PUBLISHED)
        samples = await generate(options, GenerateContext(client, encoder))
    assert [list(sample.loss_mask or ()) for sample in samples] == [[1, 0, 1, 1, 0]] * 2
    assert all(len(sample.rollout_log_probs or ()) == 5 for sample in samples)


@pytest.mark.parametrize(("mask", "message"), [("[1, 0]", "has 2 entries")])
async def test_a_loss_mask_that_does_not_fit_is_refused(write, context, mask: str, message: str) -> None:
    text = f"""
    async def custom_generate(args, sample, sampling_params):
        sample.response = await generate_single(sample.prompt)
        sample.loss_mask = {mask}
        return sample
    """
    with pytest.raises(PluginError, match=message):
        await generate(write("custom_generate_function_path", text), context)


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
    write, context, first: int, num_sampled: int, added: list[int]
) -> None:
    encoder = PromptEncoder(FOLDER, apply_chat_template=True)
    options = write("custom_generate_function_path", CHAT)
    options.arguments.first = first
    (sample,) = await generate(options, GenerateContext(context.client, encoder), 1)
    # <|user|> 1+1 <|assistant|>, the sampled tokens, <|user|> 7 <|assistant|>; before it <eos>, unless it was sampled.
    assert list(sample.tokens[:5]) == [3, 6, 15, 6, 4]
    assert list(sample.tokens[5 + num_sampled : -5]) == added
    assert list(sample.loss_mask or ()) == [1] * num_sampled + [0] * len(added) + [1] * 5
    assert sample.metadata["ids"] == list(sample.tokens[-5:])
    assert sample.metadata["why"] == "stop"


async def test_the_guide_prints_a_conversation_of_two_turns(write, context) -> None:
    guide = (Path(__file__).parents[3] / "docs/plugins.md").read_text(encoding="utf-8")
    options = write("custom_generate_function_path", guide.partition("```python turns\n")[2].partition("```")[0])
    options.arguments.second_question = "7"
    encoder = PromptEncoder(FOLDER, apply_chat_template=True)
    (sample,) = await generate(options, GenerateContext(context.client, encoder), 1)
    # Both turns train, <|user|> 7 <|assistant|> between them does not.
    assert list(sample.tokens[10:13]) == [3, 12, 4]
    assert list(sample.loss_mask or ()) == [1] * 5 + [0] * 3 + [1] * 5


async def test_all_turns_together_stay_within_the_longest_response(write, context) -> None:
    sampling = SamplingParams(max_new_tokens=7)
    options = write("custom_generate_function_path", OVER_A_LIST, "--max-turns", "5")
    (sample,) = await PathGenerate(options, RunView())(context, group(1), sampling)
    assert sample.status is Status.TRUNCATED
    assert sum(sample.loss_mask or ()) == 6


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
        (
            "from slime_compat import generate_single as g; await g('1+1'); await g('2+2'); return sample",
            "2 conversations of generate_single",
        ),
    ],
)
async def test_samples_that_cannot_be_trained_are_refused(write, context, body: str, message: str) -> None:
    text = f"async def f(args, sample, sampling_params): {body}"
    with pytest.raises(PluginError) as refused:
        await generate(write("custom_generate_function_path", text), context, 1)
    assert str(refused.value).startswith("--custom-generate-function-path mine.py: ")
    assert message in str(refused.value)


async def test_a_server_that_does_not_answer_costs_the_sample_only(write, context) -> None:
    text = """
        from slime_compat import post

        async def f(args, sample, sampling_params):
            if sample.index == 6:
                await post("http://127.0.0.1:1/search", {})
            sample.tokens, sample.response_length, sample.rollout_log_probs = [6, 7], 1, [-0.5]
            return sample
        """
    failed, whole = await generate(write("custom_generate_function_path", text), context)
    assert (failed.status, whole.status) == (Status.FAILED, Status.COMPLETED)
    assert "ClientConnectorError" in str(failed.error)


@pytest.mark.parametrize(
    "failure",
    [
        "ConnectionResetError('x')",
        "asyncio.TimeoutError('x')",
        "socket.gaierror(-2, 'x')",
        "OSError(errno.EHOSTUNREACH, 'x')",
        "aiohttp.ServerDisconnectedError('x')",
        "urllib.error.URLError('x')",
        "requests.ConnectTimeout('x')",
        "requests.ConnectionError('x')",
        "httpx.ReadTimeout('x')",
        "httpx.ConnectError('x')",
        "httpx.RemoteProtocolError('x')",
    ],
)
async def test_each_librarys_error_for_no_answer_costs_the_sample_only(write, context, failure: str) -> None:
    modules = "asyncio, aiohttp, errno, socket, urllib.error"
    library = failure.partition(".")[0]
    if library in ("requests", "httpx"):
        pytest.importorskip(library)
        modules += f", {library}"
    text = f"import {modules}\nasync def f(args, sample, sampling_params): raise {failure}"
    (sample,) = await generate(write("custom_generate_function_path", text, name=":f"), context, 1)
    assert sample.status is Status.FAILED


@pytest.mark.parametrize(
    "failure", ["FileNotFoundError", "PermissionError", "IsADirectoryError", "OSError", "KeyError"]
)
async def test_a_mistake_with_files_ends_the_run(write, context, failure: str) -> None:
    text = f"async def f(args, sample, sampling_params): raise {failure}('tools.json')"
    with pytest.raises(PluginError, match=f"{failure}: .*tools.json"):
        await generate(write("custom_generate_function_path", text), context, 1)


async def test_an_engine_that_does_not_answer_costs_the_sample_only(write, context) -> None:
    text = "from slime_compat import generate_single\n"
    text += "async def f(args, sample, sampling_params):\n    await generate_single('1')\n"

    async def no_answer(*_: object, **__: object) -> object:
        raise EngineError("no engine answered")

    context.client.generate = no_answer
    (sample,) = await generate(write("custom_generate_function_path", text), context, 1)
    assert (sample.status, sample.error) == (Status.FAILED, "no engine answered")


async def test_samples_under_way_are_bounded(write, context, engine) -> None:
    engine.delay_s = 0.02
    options = write("custom_generate_function_path", POSTS, "--max-turns", "1", "--sglang-server-concurrency", "2")
    await generate(options, context, 6)
    assert engine.most_in_flight == 2


async def test_the_helpers_say_where_they_work() -> None:
    with pytest.raises(PluginError, match="--custom-generate-function-path"):
        await generate_single("1+1")
    with pytest.raises(PluginError, match="GenerateState works inside"):
        GenerateState(None)
