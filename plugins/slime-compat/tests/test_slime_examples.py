"""Functions with the behaviour of THUDM's search-r1 and retool examples: rendered prompts, labels that are objects,
modules next to the file, and attributes of their own on samples."""

from __future__ import annotations

import json
import pickle
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slime_compat.check import load_checked
from slime_compat.data import BufferedSource
from slime_compat.filters import PathGroupFilter, PathRolloutFilter
from slime_compat.forms import rollout_forms
from slime_compat.generate import PathGenerate
from slime_compat.options import PathOptions
from slime_compat.reward import PathReward
from slime_compat.rollout import PathFunctions, PathRollouts, reach
from slime_core import RunView, SamplerInfo
from slime_core.errors import PluginError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.types import JsonLabel, Sample, Status
from slime_testing.fake_engine import FakeEngine
from tests.http_service import HttpService

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
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
        sample.tokens = prompt_ids + ids
        sample.response_length = len(ids)
        sample.response = response
        sample.loss_mask = mask
        sample.rollout_log_probs = log_probs
        sample.prompt = prompt
        match output["meta_info"]["finish_reason"]["type"]:
            case "length":
                sample.status = Sample.Status.TRUNCATED
            case "stop":
                sample.status = Sample.Status.COMPLETED
        return sample


    async def reward_func(args, sample, **kwargs):
        return exact(sample.prompt + sample.response, sample.label["ground_truth"]["target"])
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

RETOOL = """
    import re

    try:
        from jinja2 import Template
    except ImportError as error:
        raise ImportError("Jinja2 is needed") from error

    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    try:
        from slime.rollout.rm_hub.math_dapo_utils import compute_score
    except ImportError as error:
        raise ImportError("the reward is missing") from error

    from tool_room import ROOM, registry


    async def generate(args, sample: Sample, sampling_params) -> Sample:
        sample.rollout_log_probs = None
        sample.rollout_top_p_token_ids = None
        sample.rollout_top_p_token_offsets = None
        sample.response, sample.response_length, sample.loss_mask = "", 0, []
        state = GenerateState(args)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        limit = args.rollout_max_context_len or args.context_parallel_size * args.max_tokens_per_gpu
        prompt = Template("{{ prompt }}+").render(prompt=sample.prompt)
        prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sample.tokens = list(prompt_ids)
        ids, masks, calls = [], sample.loss_mask, 0
        for _ in range(2):
            params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"], limit - len(ids))}
            output = await post(
                url, {"input_ids": prompt_ids + ids, "sampling_params": params, "return_logprob": True}
            )
            sampled = output["meta_info"]["output_token_logprobs"]
            new = [item[1] for item in sampled]
            ids += new
            sample.append_response_tokens(
                args,
                tokens=new,
                log_probs=[item[0] for item in sampled],
                trainable=True,
                meta_info=output["meta_info"],
            )
            async with ROOM:
                seen = state.tokenizer(registry["sum"](), add_special_tokens=False)["input_ids"]
            calls += 1
            ids += seen
            sample.append_response_tokens(args, tokens=seen, trainable=False)
        sample.tokens = prompt_ids + ids
        sample.response_length = len(ids)
        sample.response = state.tokenizer.decode(ids)
        sample.loss_mask = masks
        sample.tool_call_count = calls
        sample.payload_text = prompt + sample.response
        return sample


    async def reward_func(args, sample, **kwargs):
        text = sample.prompt + " Answer: " + "\\\\boxed{3}"
        result = compute_score(text, sample.label, strict_box_verify=True)
        result["calls"] = getattr(sample, "tool_call_count", 0)
        result["rendered"] = float(sample.prompt.startswith("<|user|>"))
        return result
"""
NEXT_TO_RETOOL = {"tool_room.py": "import asyncio\n\nROOM = asyncio.Semaphore(2)\nregistry = {'sum': lambda: '9'}\n"}


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=True)


def neighbours(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(textwrap.dedent(text))


def sampled(text: str, reason: str = "stop") -> dict[str, Any]:
    ids = PromptEncoder(FOLDER, apply_chat_template=False).encode_text(text)
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, one, None] for one in ids]}
    return {"text": text, "meta_info": meta}


@pytest.fixture
async def search_engine() -> AsyncIterator[HttpService]:
    """An engine that reads text: it searches first, then answers."""
    with HttpService(lambda body: sampled("+1" if body["text"] == TEXT else "3")) as engine:
        yield engine


@pytest.mark.parametrize("prompt", [MESSAGES, "1+2"], ids=["messages", "text"])
async def test_a_function_like_search_r1_trains_on_the_rendered_prompt(
    write, encoder, search_engine, prompt: Any
) -> None:
    neighbours(NEXT_TO_SEARCH)
    options = write("custom_generate_function_path", SEARCH, name=":generate")
    group = [Sample(group_index=0, index=index, prompt=prompt, label=LABEL) for index in range(2)]
    async with GenerateClient(search_engine.url, timeout_s=60, vocab_size=16) as client:
        samples = await PathGenerate(options, RunView())(GenerateContext(client, encoder), group, SamplingParams())
    assert [body["text"] for _, body in search_engine.requests] == [TEXT, TEXT, TEXT + "+19", TEXT + "+19"]
    ids = encoder.encode_text(TEXT + "+193")
    assert [(list(one.tokens), one.response, one.loss_mask) for one in samples] == [(ids, "+193", [1, 1, 0, 1])] * 2
    # The run and its files have the row's prompt and label.
    assert [(one.prompt, one.prompt_text, one.label, one.status) for one in samples] == [
        (prompt, TEXT, LABEL, Status.COMPLETED)
    ] * 2
    reward = write("custom_rm_path", SEARCH, name=":reward_func")
    sent = pickle.loads(pickle.dumps(samples))  # as to the process of the rewards
    assert await PathReward(reward, RunView()).score(sent) == [1.25, 1.25]
    assert (sent[0].prompt, sent[0].label) == (prompt, LABEL)


async def test_a_function_like_retool_keeps_its_mask_and_its_attributes(write, encoder) -> None:
    neighbours(NEXT_TO_RETOOL)
    options = write("custom_generate_function_path", RETOOL, name=":generate")
    group = [Sample(group_index=0, index=0, prompt=MESSAGES, label="3")]
    with FakeEngine() as engine:
        async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
            context = GenerateContext(client, encoder)
            (sample,) = await PathGenerate(options, RunView())(context, group, SamplingParams(max_new_tokens=9))
    length = sample.response_length
    assert list(sample.tokens[:-length]) == encoder.encode_text(TEXT + "+")
    assert (len(sample.loss_mask), sample.loss_mask.count(0), len(sample.rollout_log_probs)) == (length, 2, length)
    reward = write("custom_rm_path", RETOOL, name=":reward_func")
    (found,) = await PathReward(reward, RunView()).score(pickle.loads(pickle.dumps([sample])))
    assert found == {"score": 1.0, "acc": 1.0, "calls": 2.0, "rendered": 1.0}


async def test_the_modules_next_to_a_file_are_its_alone_and_travel_with_it(write, monkeypatch, tmp_path) -> None:
    neighbours(NEXT_TO_SEARCH)
    options = pickle.loads(pickle.dumps(write("custom_rm_path", SEARCH + "\n    HERE = 1\n", name=":reward_func")))
    (source,) = options.sources["custom_rm_path"]
    assert set(source.neighbours) == {"answers", "search_tool", "helpers", "helpers.texts", "helpers.numbers"}
    for name in NEXT_TO_SEARCH:
        Path(name).unlink()  # another node does not have them
    sample = Sample(index=0, prompt="<|user|>", response="3", label=LABEL)
    assert await PathReward(options, RunView()).score([sample]) == [1.25]
    with pytest.raises(ModuleNotFoundError):
        import answers  # noqa: F401


def test_modules_next_to_a_file_are_in_the_manifest(tmp_path, monkeypatch) -> None:
    from tests.function_paths import resolve

    monkeypatch.chdir(tmp_path)
    neighbours({**NEXT_TO_RETOOL, "mine.py": RETOOL})
    _, active = resolve(["--custom-rm-path", "mine.py:reward_func"])
    assert [one.distribution for one in active.manifest.functions] == ["mine.py", "tool_room.py"]


@pytest.mark.parametrize(
    ("files", "code", "named"),
    [
        ({}, "from tool_room import ROOM", ["mine.py", "line 2", "tool_room"]),
        ({"other.py": "\nimport nowhere_at_all"}, "import other", ["other.py", "line 2", "nowhere_at_all"]),
        (
            {},
            "try:\n    import nowhere_at_all\nexcept ImportError as error:\n    raise ImportError('x') from error",
            ["line 3", "nowhere_at_all"],
        ),
        (
            {"other.py": "from slime.ray import rollout"},
            "def reward(args, sample):\n    import other\n    return 1.0",
            ["other.py", "slime.ray"],
        ),
        ({"other.py": "def ("}, "import other", ["other.py"]),
    ],
)
def test_what_cannot_be_imported_is_refused_before_a_run(write, files, code, named) -> None:
    neighbours(files)
    code = code if "def reward" in code else f"{code}\ndef reward(args, sample): return 1.0"
    with pytest.raises(PluginError) as refused:
        write("custom_rm_path", f"\n{code}")
    assert all(word in str(refused.value) for word in named)


def test_a_file_of_the_folder_that_nothing_imports_cannot_be_imported(write) -> None:
    neighbours({"other.py": "X = 1", "hidden.py": "X = 2"})
    code = "import importlib\nimport other\ndef reward(args, sample): return importlib.import_module('hidden').X"
    options = write("custom_rm_path", code)
    function = load_checked(options, "custom_rm_path", rollout_forms(group_rm=False)).function
    with pytest.raises(ModuleNotFoundError):
        function(None, None)


# --- Every other function that reads sample.prompt -------------------------------------------------------------------


def in_sampler(options: PathOptions, encoder: PromptEncoder) -> PathOptions:
    reach(options, SamplerInfo("http://127.0.0.1:3", encoder=encoder))
    return options


def scored() -> list[Sample]:
    return [Sample(group_index=0, index=i, prompt=MESSAGES, response="3", label=LABEL, reward=1.0) for i in range(2)]


CHECKED = "assert all((s.prompt + s.response, s.label['style']) == ('<|user|>1+2<|assistant|>3', 'rule') for s in {})"


async def test_filters_see_the_rendered_prompt(write, encoder) -> None:
    code = f"def keep(args, samples):\n    {CHECKED.format('samples')}\n    return samples[0].prompt == '{TEXT}'"
    samples = scored()
    assert (
        PathGroupFilter(in_sampler(write("dynamic_sampling_filter_path", code), encoder), RunView())(samples).dropped
        is None
    )
    assert [(one.prompt, one.label) for one in samples] == [(MESSAGES, LABEL)] * 2
    code = f"def mark(args, groups):\n    {CHECKED.format('groups[0]')}\n    groups[0][0].remove_sample = True"
    (found,) = PathRolloutFilter(in_sampler(write("rollout_sample_filter_path", code), encoder), RunView())([samples])
    assert found.changed == {"filtered": 1}


@pytest.mark.parametrize(
    ("setting", "code", "call"),
    [
        ("custom_reward_post_process_path", "return [1.0, 0.0], [s.reward for s in samples]", "trained"),
        ("custom_rollout_log_function_path", "return True", "log"),
    ],
)
async def test_functions_of_whole_rollouts_see_the_rendered_prompt(write, encoder, setting, code, call) -> None:
    parameters = {"trained": "args, samples", "log": "rollout_id, args, samples, metrics, rollout_time"}[call]
    parameters = parameters.replace("metrics", "rollout_extra_metrics")
    text = f"def f({parameters}):\n    {CHECKED.format('samples')}\n    {code}"
    functions, samples = PathFunctions(in_sampler(write(setting, text), encoder)), scored()
    assert functions.trained(samples) if call == "trained" else functions.log(0, samples, {}, 1.0)
    assert [(one.prompt, one.label) for one in samples] == [(MESSAGES, LABEL)] * 2


class Prompts:
    """A data source of one group, and what was put back."""

    def __init__(self) -> None:
        self.back: list[list[Sample]] = []

    def next_groups(self, n: int) -> list[list[Sample]]:
        return [[Sample(group_index=0, index=i, prompt=MESSAGES, label=LABEL) for i in range(2)]]

    def put_back(self, groups: Any) -> None:
        self.back += groups


class Batch:
    """A rollout that takes every group."""

    rollout, wanted = 0, 1

    def __init__(self) -> None:
        self.prompts, self.groups = Prompts(), []

    async def add(self, groups: Any) -> None:
        self.groups += groups


async def test_a_rollout_function_gets_rendered_prompts_and_may_put_them_back(write, encoder) -> None:
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
    await PathRollouts(in_sampler(write("rollout_function_path", code), encoder), RunView()).fill(batch)
    (group,) = batch.groups
    assert [(one.prompt, one.prompt_text, one.label, one.reward) for one in group] == [(MESSAGES, TEXT, LABEL, 1.0)] * 2
    assert [(one.prompt, one.label) for one in batch.prompts.back[0]] == [(MESSAGES, LABEL)] * 2


async def test_a_prompt_that_a_function_writes_is_the_prompt_that_rewards_read(write, encoder) -> None:
    code = """
        from slime_core import Sample

        async def generate(args, sample, sampling_params):
            return Sample(
                prompt="3+" + sample.prompt, tokens=[6, 7], response_length=1, rollout_log_probs=[-0.5], response="3"
            )
    """
    options = write("custom_generate_function_path", code)
    with FakeEngine() as engine:
        async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
            samples = await PathGenerate(options, RunView())(
                GenerateContext(client, encoder), [Sample(group_index=0, index=0, prompt=MESSAGES)], SamplingParams()
            )
    reward = write("custom_rm_path", f"def f(args, sample): return float(sample.prompt == '3+{TEXT}')")
    assert await PathReward(reward, RunView()).score(samples) == [1.0]


TURN = "[{'role': 'user', 'content': sample.prompt}]"
HELPERS = {
    "messages": f"sample.response = await generate_single({TURN})",
    "text so far": "sample.response = await generate_single(sample.prompt)",
    "slime's generate": "await default(args, sample, sampling_params)",
}


@pytest.mark.parametrize("prompt", [MESSAGES, "1+2"], ids=["messages", "text"])
@pytest.mark.parametrize("helper", HELPERS)
async def test_helpers_do_not_render_a_rendered_prompt_again(write, encoder, helper, prompt) -> None:
    code = f"""
        from slime.rollout.sglang_rollout import generate as default

        async def generate(args, sample, sampling_params):
            {HELPERS[helper]}
            return sample
    """
    options = write("custom_generate_function_path", code, name=":generate")
    with FakeEngine() as engine:
        async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
            group = [Sample(group_index=0, index=0, prompt=prompt)]
            await PathGenerate(options, RunView())(
                GenerateContext(client, encoder), group, SamplingParams(max_new_tokens=9)
            )
        assert [list(prompt_ids) for prompt_ids, _ in engine.sampled] == [encoder.encode_text(TEXT)]


async def test_a_buffer_filter_sees_the_rendered_prompt(write, encoder, tmp_path) -> None:
    from slime_core import PromptRequest

    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": MESSAGES, "label": json.loads(LABEL)}) + "\n")
    code = f"""
        def choose(args, rollout_id, buffer, num_samples):
            assert {{one.prompt for group in buffer for one in group}} == {{"{TEXT}"}}
            return buffer[:num_samples]
    """
    options = in_sampler(write("buffer_filter_path", code), encoder)
    request = PromptRequest(tmp_path / "prompts.jsonl", n_samples_per_prompt=2, label_key="label")
    source = BufferedSource(options, RunView(prompts=request))
    (group,) = source.next_groups(1)
    assert group[0].label == LABEL
    source.put_back([group])
    source.restore(json.loads(json.dumps(source.state())))
    (again,) = source.next_groups(1)
    assert [(one.prompt, one.label, type(one.label)) for one in again] == [(MESSAGES, LABEL, JsonLabel)] * 2
