"""Functions like those of THUDM's search-r1 example: rendered prompts, labels that are objects, modules next to the
file, and further attributes of samples."""

from __future__ import annotations

import json
import pickle
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_compat.data import BufferedSource
from slime_compat.filters import PathGroupFilter, PathRolloutFilter
from slime_compat.generate import PathGenerate
from slime_compat.paths import PathOptions
from slime_compat.reward import PathReward
from slime_compat.rollout import PathRollouts, log, start, trained
from slime_core import RunView
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.provisional import PromptRequest, SamplerInfo
from slime_core.rollout.engines.client import GenerateClient
from slime_core.types import JsonLabel, Sample, Status
from tests.function_paths import resolve
from tests.http_service import HttpService

MESSAGES = [{"role": "user", "content": "1+2"}]
TEXT = "<|user|>1+2<|assistant|>"
LABEL = JsonLabel(json.dumps({"ground_truth": {"target": ["3"]}, "style": "rule"}))

SEARCH = """
    import asyncio

    from answers import exact

    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    ROOM = asyncio.Semaphore(8)


    async def look_up(query, backend="local"):
        if backend == "web":
            from web_search_that_nobody_has import ask

            return await ask(query)
        from search_tool import ask

        async with ROOM:
            return await ask(query)


    async def generate(args, sample: Sample, sampling_params) -> Sample:
        assert not args.partial_rollout
        state = GenerateState(args)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        prompt = sample.prompt
        prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response, ids, log_probs, mask = "", [], [], []
        for _ in range(3):
            payload = {"text": prompt + response, "sampling_params": sampling_params, "return_logprob": True}
            output = await post(url, payload)
            sampled = output["meta_info"]["output_token_logprobs"]
            ids += [item[1] for item in sampled]
            log_probs += [item[0] for item in sampled]
            mask += [1] * len(sampled)
            response += output["text"]
            if not output["text"].startswith("+"):
                break
            found = await look_up(output["text"])
            found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
            ids, log_probs, mask = ids + found_ids, log_probs + [0.0] * len(found_ids), mask + [0] * len(found_ids)
            response += found
            sample.num_searches = 1
        sample.tokens = prompt_ids + ids
        sample.response_length = len(ids)
        sample.response = response
        sample.loss_mask = mask
        sample.rollout_log_probs = log_probs
        sample.prompt = prompt
        sample.status = Sample.Status.COMPLETED
        return sample


    async def reward_func(args, sample, **kwargs):
        return exact(sample.prompt + sample.response, sample.label["ground_truth"]["target"]) * sample.num_searches
"""
NEXT_TO_SEARCH = {
    "answers.py": """
        import search_tool


        def exact(text, targets):
            assert text.startswith("<|user|>"), text
            return float(text[-1] in targets) + search_tool.BONUS
    """,
    "search_tool.py": """
        from helpers.texts import shout

        BONUS = 0.25


        async def ask(query):
            return shout(query)
    """,
    "helpers/texts.py": "from .numbers import NINE\n\ndef shout(query): return NINE",
    "helpers/numbers.py": "NINE = '9'",
    "unused.py": "raise RuntimeError('nobody imports this')",
}


def neighbours(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(textwrap.dedent(text))


@pytest.fixture
def search_engine(plain) -> Iterator[HttpService]:
    """An engine that reads text: it searches first, then answers."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        text = "+1" if body["text"] == TEXT else "3"
        log_probs = [[-0.5, token, None] for token in plain.encode_text(text)]
        return {"text": text, "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": log_probs}}

    with HttpService(answer) as engine:
        yield engine


@pytest.mark.parametrize("prompt", [MESSAGES, "1+2"], ids=["messages", "text"])
async def test_a_function_like_search_r1_trains_on_the_rendered_prompt(write, chat, search_engine, prompt: Any) -> None:
    neighbours(NEXT_TO_SEARCH)
    options = write("custom_generate_function_path", SEARCH, name=":generate")
    group = [Sample(group_index=0, index=index, prompt=prompt, label=LABEL) for index in range(2)]
    async with GenerateClient(search_engine.url, timeout_s=60, vocab_size=16) as client:
        samples = await PathGenerate(options)(GenerateContext(client, chat), group, SamplingParams())
    # The two samples of the group run side by side: their requests arrive in any order.
    assert sorted(body["text"] for _, body in search_engine.requests) == [TEXT, TEXT, TEXT + "+19", TEXT + "+19"]
    ids = chat.encode_text(TEXT + "+193")
    assert [(list(one.tokens), one.response, one.loss_mask) for one in samples] == [(ids, "+193", [1, 1, 0, 1])] * 2
    # The run and its files have the row's prompt and label.
    assert [(one.prompt, one.prompt_text, one.label, one.status) for one in samples] == [
        (prompt, TEXT, LABEL, Status.COMPLETED)
    ] * 2
    reward = write("custom_rm_path", SEARCH, name=":reward_func")
    sent = pickle.loads(pickle.dumps(samples))  # as to the process of the rewards
    assert await PathReward(reward).score(sent) == [1.25, 1.25]
    assert (sent[0].prompt, sent[0].label) == (prompt, LABEL)


async def generated(options: PathOptions, client: GenerateClient, chat: PromptEncoder, prompt: Any) -> Sample:
    group = [Sample(group_index=0, index=0, prompt=prompt, label="3")]
    (sample,) = await PathGenerate(options)(GenerateContext(client, chat), group, SamplingParams(max_new_tokens=9))
    return sample


async def test_the_modules_next_to_a_file_are_its_alone_and_travel_with_it(write) -> None:
    neighbours(NEXT_TO_SEARCH)
    options = pickle.loads(pickle.dumps(write("custom_rm_path", SEARCH + "\n    HERE = 1\n", name=":reward_func")))
    (source,) = options.sources["custom_rm_path"]
    assert set(source.neighbours) == {"answers", "search_tool", "helpers", "helpers.texts", "helpers.numbers"}
    for name in NEXT_TO_SEARCH:
        Path(name).unlink()  # another node does not have them
    sample = Sample(index=0, prompt="<|user|>", response="3", label=LABEL)
    sample.num_searches = 2
    assert await PathReward(options).score([sample]) == [2.5]
    with pytest.raises(ModuleNotFoundError):
        import answers  # noqa: F401


def test_modules_next_to_a_file_are_in_the_manifest(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    neighbours({"mine.py": "import other\ndef f(args, sample): ...", "other.py": ""})
    _, active = resolve(["--custom-rm-path", "mine.py"])
    assert [code.distribution for code in active.manifest.functions] == ["mine.py", "other.py"]


def test_a_file_of_the_folder_that_nothing_imports_cannot_be_imported(write) -> None:
    neighbours({"other.py": "X = 1", "hidden.py": "X = 2"})
    code = "import importlib\nimport other\ndef reward(args, sample): return importlib.import_module('hidden').X"
    options = write("custom_rm_path", code)
    function = options.function("custom_rm_path").function
    with pytest.raises(ModuleNotFoundError):
        function(None, None)


# --- Every other function that reads sample.prompt -------------------------------------------------------------------


def in_sampler(options: PathOptions, chat: PromptEncoder) -> PathOptions:
    start(options, SamplerInfo("http://127.0.0.1:3", encoder=chat))
    return options


CHECKED = (
    "assert all((s.prompt + s.response, s.label['style']) == ('<|user|>1+2<|assistant|>3', 'rule') for s in samples)"
)
SEES = {
    "dynamic_sampling_filter_path": "args, samples",
    "rollout_sample_filter_path": "args, groups",
    "custom_reward_post_process_path": "args, samples",
    "custom_rollout_log_function_path": "rollout_id, args, samples, rollout_extra_metrics, rollout_time",
}


@pytest.mark.parametrize("setting", SEES)
async def test_functions_of_groups_and_rollouts_see_the_rendered_prompt(write, chat, setting: str) -> None:
    samples = [Sample(group_index=0, index=i, prompt=MESSAGES, response="3", label=LABEL, reward=1.0) for i in range(2)]
    lines = ["samples = groups[0]"] if "groups" in SEES[setting] else []
    returned = "[1.0, 0.0], [s.reward for s in samples]" if "process" in setting else "True"
    text = "\n    ".join([f"def f({SEES[setting]}):", *lines, CHECKED, f"return {returned}"])
    options = in_sampler(write(setting, text), chat)
    calls: dict[str, Callable[[], object]] = {
        "dynamic_sampling_filter_path": lambda: PathGroupFilter(options)(samples).dropped is None,
        "rollout_sample_filter_path": lambda: PathRolloutFilter(options)([samples]),
        "custom_reward_post_process_path": lambda: trained(options, samples),
        "custom_rollout_log_function_path": lambda: log(options, 0, samples, {}, 1.0),
    }
    assert calls[setting]()
    assert [(one.prompt, one.label) for one in samples] == [(MESSAGES, LABEL)] * 2


class Batch:
    """A rollout that takes every group of a data source of one group, and records what is put back."""

    rollout, wanted = 0, 1

    def __init__(self) -> None:
        self.prompts = self
        self.back: list[list[Sample]] = []
        self.groups: list[list[Sample]] = []

    def next_groups(self, n: int) -> list[list[Sample]]:
        return [[Sample(group_index=0, index=i, prompt=MESSAGES, label=LABEL) for i in range(2)]]

    def put_back(self, groups: Any) -> None:
        self.back += groups

    async def add(self, groups: Any) -> None:
        self.groups += groups


async def test_a_rollout_function_gets_rendered_prompts_and_may_put_them_back(write, chat) -> None:
    code = """
        import copy

        async def rollout(args, rollout_id, data_source):
            (group,), (other,) = data_source.get_samples(1), data_source.get_samples(1)
            assert [sample.prompt for sample in group] == ["<|user|>1+2<|assistant|>"] * 2, group
            for sample in group:
                sample.response, sample.reward = sample.prompt[-1], float(sample.label["style"] == "rule")
            data_source.add_samples([other])
            return [[group[0], copy.deepcopy(group[1])]]
    """
    batch = Batch()
    await PathRollouts(in_sampler(write("rollout_function_path", code), chat)).fill(batch)
    (group,) = batch.groups
    assert [(one.prompt, one.prompt_text, one.label, one.reward) for one in group] == [(MESSAGES, TEXT, LABEL, 1.0)] * 2
    assert [(one.prompt, one.label) for one in batch.back[0]] == [(MESSAGES, LABEL)] * 2


async def test_a_prompt_that_a_function_writes_is_the_prompt_that_rewards_read(write, client, chat) -> None:
    code = """
        from slime_core import Sample

        async def generate(args, sample, sampling_params):
            return Sample(
                prompt="3+" + sample.prompt, tokens=[6, 7], response_length=1, rollout_log_probs=[-0.5], response="3"
            )
    """
    sample = await generated(write("custom_generate_function_path", code), client, chat, MESSAGES)
    reward = write("custom_rm_path", f"def f(args, sample): return float(sample.prompt == '3+{TEXT}')")
    assert await PathReward(reward).score([sample]) == [1.0]


HELPERS = {
    "messages": "sample.response = await generate_single([{'role': 'user', 'content': sample.prompt}])",
    "text so far": "sample.response = await generate_single(sample.prompt)",
    "slime's generate": "await default(args, sample, sampling_params)",
}


@pytest.mark.parametrize("prompt", [MESSAGES, "1+2"], ids=["messages", "text"])
@pytest.mark.parametrize("helper", HELPERS)
async def test_helpers_do_not_render_a_rendered_prompt_again(write, client, engine, chat, helper, prompt) -> None:
    code = f"""
        from slime.rollout.sglang_rollout import generate as default

        async def generate(args, sample, sampling_params):
            {HELPERS[helper]}
            return sample
    """
    await generated(write("custom_generate_function_path", code, name=":generate"), client, chat, prompt)
    assert [list(prompt_ids) for prompt_ids, _ in engine.sampled] == [chat.encode_text(TEXT)]


async def test_a_buffer_filter_sees_the_rendered_prompt(write, chat, tmp_path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": MESSAGES, "label": json.loads(LABEL)}) + "\n")
    code = f"""
        def choose(args, rollout_id, buffer, num_samples):
            assert {{one.prompt for group in buffer for one in group}} == {{"{TEXT}"}}
            return buffer[:num_samples]
    """
    options = in_sampler(write("buffer_filter_path", code), chat)
    request = PromptRequest(tmp_path / "prompts.jsonl", n_samples_per_prompt=2, label_key="label")
    source = BufferedSource(options, RunView(prompts=request))
    (group,) = source.next_groups(1)
    assert group[0].label == LABEL
    source.put_back([group])
    source.restore(json.loads(json.dumps(source.state())))
    (again,) = source.next_groups(1)
    assert [(one.prompt, one.label, type(one.label)) for one in again] == [(MESSAGES, LABEL, JsonLabel)] * 2
