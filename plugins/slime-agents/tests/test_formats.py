"""Every parser of the installed SGLang: a right call, one of an unknown tool, and one inside thoughts."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_agents.formats import FORMATS
from slime_agents.parsing import CallParser
from slime_cpu.serve import server_environment
from slime_testing.fake_engine import Answer, FakeEngine, Handler
from slime_testing.harness.engines import connect

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
JSON = '{"name": "NAME", "arguments": {"a": 1}}'
XML = "<tool_call>\n<function=NAME>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>NAME\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TAGGED = f"<tool_call>\n{JSON}\n</tool_call>"
THOUGHT = "<think>\n{}\n</think>\n"
HARMONY = "<|channel|>analysis<|message|>{}<|end|>"


def dsml(block: str, tag: str = "") -> str:
    invoke = (
        f'<｜DSML｜{tag}invoke name="NAME">\n<｜DSML｜{tag}parameter name="a" string="false">1</｜DSML｜{tag}parameter>'
    )
    return f"<｜DSML｜{block}>\n{invoke}\n</｜DSML｜{tag}invoke>\n</｜DSML｜{block}>"


CALLS = {
    "apertus2509": ('<|tools_prefix|>[{"NAME": {"a": 1}}]<|tools_suffix|>', "<|inner_prefix|>{}<|inner_suffix|>"),
    "beam": ('<|start|>assistant to=NAME<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="a">\n1\n'
        "</rfl:parameter><|call|>", HARMONY),
    "cohere_command4": ('<|START_ACTION|>[{"tool_name": "NAME", "parameters": {"a": 1}}]<|END_ACTION|>',
        "<|START_THINKING|>{}<|END_THINKING|>"),
    "deepseekv3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', THOUGHT),
    "deepseekv31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        THOUGHT),
    "deepseekv32": (dsml("function_calls"), THOUGHT),
    "deepseekv4": (dsml("tool_calls"), THOUGHT),
    "deepseekv41": (dsml(" calls", " "), THOUGHT),
    "dots": ('<dots_function_call>\n<invoke name="NAME">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</dots_function_call>", THOUGHT),
    "glm": (GLM, THOUGHT),
    "glm45": (GLM, THOUGHT),
    "glm47": (GLM.replace("\n", ""), THOUGHT),
    "gpt-oss": (
        '<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>',
        HARMONY),
    "k2_horizon": (f"<ifm|tool_calls>\n<ifm|tool_call>{JSON}</ifm|tool_call>\n</ifm|tool_calls>",
        "<ifm|think>{}</ifm|think>"),
    "kimi_k2": ("<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>', THOUGHT),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        "<|open|>think<|sep|>{}<|close|>think<|sep|>"),
    "lfm2": ("<|tool_call_start|>[NAME(a=1)]<|tool_call_end|>", THOUGHT),
    "ling3": (GLM, THOUGHT),
    "llama3": ('<|python_tag|>{"name": "NAME", "parameters": {"a": 1}}', THOUGHT),
    "mimo": (XML, THOUGHT),
    "minicpm5": ('<function name="NAME"><param name="a">1</param></function>', THOUGHT),
    "mistral": ('[TOOL_CALLS] [{"name": "NAME", "arguments": {"a": 1}}]', "[THINK]{}[/THINK]"),
    "muse": ('<|start|>assistant to=functions<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n'
        '<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        " to=self<|message|>{}<|eom|>"),
    "poolside_v1": (GLM, THOUGHT),
    "pythonic": ("[NAME(a=1)]", THOUGHT),
    "qwen": (TAGGED, THOUGHT),
    "qwen25": (TAGGED, THOUGHT),
    "qwen3_coder": (XML, THOUGHT),
    "spark25": (GLM.replace("\n<arg_value>", "<arg_value>"), THOUGHT),
    "step3": ('<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n'
        '<steptml:parameter name="a">1</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
        THOUGHT),
    "step3p5": (XML, THOUGHT),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
        THOUGHT),
    "minimax-m3": (']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="NAME">]<]minimax[>[<a>1]<]minimax[>[</a>'
        "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>", "<mm:think>{}</mm:think>"),
    "nanbeige": (XML, THOUGHT),
    "trinity": (TAGGED, THOUGHT),
    "interns1": (f"<|action_start|> <|plugin|>\n{JSON}<|action_end|>", THOUGHT),
    "hermes": (TAGGED, THOUGHT),
    "hunyuan": (
        "<tool_calls>\n<tool_call>NAME<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "</tool_calls>", THOUGHT),
    "gigachat3": (f"function call<|role_sep|>\n{JSON}", THOUGHT),
    "gigachat35": ('<｜GCML｜tool_calls><｜GCML｜invoke name="NAME"><｜GCML｜parameter name="a" string="false">1'
        "</｜GCML｜parameter></｜GCML｜invoke></｜GCML｜tool_calls>", THOUGHT),
    "gemma4": ("<|tool_call>call:NAME{a:1}<tool_call|>", "<|channel>thought\n{}<channel|>"),
    "inkling": ('<|message_model|>NAME<|content_invoke_tool_json|>{"name":"NAME","args":{"a":1}}<|end_message|>',
        "<|content_thinking|>{}<|end_message|>"),
    "iquest_q1": (GLM.replace("tool_call>", "iquest_tool_call>"), THOUGHT),
}  # fmt: skip
"""Parser -> a call of the tool NAME, and thoughts in the format of the family."""


class ParsingEngine(FakeEngine):
    """A fake engine with SGLang's parsers, in a process that has imported them."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("real_parsers.py"))],
            env=os.environ | server_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def stop(self) -> None:
        super().stop()
        self._process.communicate()

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "/parse_function_call": self._parse}

    async def _parse(self, body: dict[str, Any]) -> Answer:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps(body), file=self._process.stdin, flush=True)
            return 200, json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def parsers() -> Iterator[FakeEngine]:
    with ParsingEngine() as engine:
        yield engine


def test_the_formats_are_those_of_the_installed_sglang() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    found = runpy.run_path(str(Path(spec.origin).parent / "srt" / "function_call" / "parser_names.py"))
    assert set(found["TOOL_CALL_PARSER_NAMES"]) == set(FORMATS)
    assert set(CALLS) == set(FORMATS) - {"response_template"}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_is_found_with_its_name_and_only_outside_of_thoughts(parsers, name) -> None:
    call, thought = CALLS[name]
    right, unknown = call.replace("NAME", "add"), call.replace("NAME", "sum")
    opening, closing = thought.split("{}")
    texts = {
        right: ["add"],
        unknown: ["sum"],
        f"{opening}{right}{closing}The answer is 4.": [],
        f"{opening}{unknown}{closing}{right}": ["add"],
        f"{opening}{right}": [],
        f"{right}{closing}{right}": ["add"],  # the prompt opens the thoughts
    }
    async with connect(parsers.url, vocab_size=16) as client:
        for text, names in texts.items():
            prompt = opening if text.startswith(f"{right}{closing}") else ""
            parsed = await CallParser(name).parse(client, text, [ADD], prompt=prompt)
            assert ([call.name for call in parsed.calls], parsed.unreadable) == (names, 0), text
            assert [json.loads(call.arguments) for call in parsed.calls if call.name == "add"] == [{"a": 1}] * (
                names == ["add"]
            )
