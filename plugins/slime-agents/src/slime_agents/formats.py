"""Formats in which models write tool calls and thoughts, so that no call is lost and none runs inside thoughts.

SGLang's parsers drop a call of an unknown tool and a call that they cannot read, and they parse thoughts like any other
text. The marks here tell such a turn from one that calls nothing. They are those of sglang 0.5.23
(``srt/function_call``, ``srt/parser/reasoning_parser.py``); a test compares the names with the installed version and
gives calls in each format to its parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

__all__ = ["FORMATS", "CallFormat", "opened_thoughts", "split_thoughts"]


@dataclass(frozen=True)
class CallFormat:
    """The marks of tool calls in one format, as regular expressions.

    Arguments:
        call: start of one call.
        end: end of one call.
        block: start of a block of calls.
    """

    call: str
    end: str = r"\Z"
    block: str = r"(?!)"

    @property
    def is_known(self) -> bool:
        """True if the marks are known."""
        return self is not _NOWHERE

    @cached_property
    def spans(self) -> str:
        """Pattern of one call from start to end, or to the end of the text if the end is missing."""
        return rf"(?:{self.call})(?s:.*?)(?:{self.end}|\Z)"

    def count(self, text: str) -> int:
        """Return a lower bound of the number of calls that ``text`` contains."""
        return max(len(re.findall(self.spans, text)), int(re.search(self.block, text) is not None))


_NOWHERE = CallFormat(r"(?!)")
_MINIMAX = r"\]<\]minimax\[>\[\s*"
_TAG = CallFormat("<tool_call>", "</tool_call>")
_DSML = CallFormat("<｜DSML｜ ?invoke", "</｜DSML｜ ?invoke>", "<｜DSML｜ ?(?:function_|tool_)?calls>")
_DEEPSEEK = CallFormat("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>")

FORMATS = {
    "apertus2509": CallFormat(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
    "beam": CallFormat(r" to=[^\s<]+<\|channel\|>analysis <\|constrain\|>", r"<\|call\|>|<\|end\|>"),
    "cohere_command4": CallFormat(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    "deepseekv3": _DEEPSEEK,
    "deepseekv31": _DEEPSEEK,
    "deepseekv32": _DSML,
    "deepseekv4": _DSML,
    "deepseekv41": _DSML,
    "dots": CallFormat(r"<invoke\s", "</invoke>", "<dots_function_call>"),
    "glm": _TAG,
    "glm45": _TAG,
    "glm47": _TAG,
    "gpt-oss": CallFormat(
        r"<\|channel\|>commentary\s+to=|to=functions\.\S+?<\|channel\|>commentary", r"<\|call\|>|<\|start\|>"
    ),
    "k2_horizon": CallFormat(r"<ifm\|tool_call>", r"</ifm\|tool_call>", r"<ifm\|tool_calls>"),
    "kimi_k2": CallFormat(r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>", r"<\|tool_calls_section_begin\|>"),
    "kimi_k3": CallFormat(r"<\|open\|>call\b", r"<\|close\|>call<\|sep\|>", r"<\|open\|>tools<\|sep\|>"),
    "lfm2": CallFormat(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    "ling3": _TAG,
    # A text that starts with a brace is a call only with a name: it may be an answer in JSON.
    "llama3": CallFormat(r'<\|python_tag\|>|\A\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:'),
    "mimo": _TAG,
    "minicpm5": CallFormat(r"<function\s", "</function>"),
    "mistral": CallFormat(r"\[TOOL_CALLS", r"(?=\[TOOL_CALLS)"),
    "muse": CallFormat(r"<atem:invoke\b", "</atem:invoke>", "<atem:function_calls>"),
    "poolside_v1": _TAG,
    "pythonic": CallFormat(r"\A\s*(?:<\|python_start\|>)?\s*\[\s*[A-Za-z_][\w.]*\(|<\|python_start\|>"),
    "qwen": _TAG,
    "qwen25": _TAG,
    "qwen3_coder": _TAG,
    "spark25": _TAG,
    "step3": CallFormat("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_calls_begin｜>"),
    "step3p5": _TAG,
    "minimax-m2": CallFormat(r"<invoke\s", "</invoke>", "<minimax:tool_call>"),
    "minimax-m3": CallFormat(rf"{_MINIMAX}<invoke\s", f"{_MINIMAX}</invoke>", f"{_MINIMAX}<tool_call>"),
    "nanbeige": _TAG,
    "trinity": _TAG,
    "interns1": CallFormat(r"<\|action_start\|> <\|plugin\|>", r"<\|action_end\|>"),
    "hermes": _TAG,
    "hunyuan": CallFormat(r"<tool_call(?::[^>]+)?>", r"</tool_call(?::[^>]+)?>", r"<tool_calls(?::[^>]+)?>"),
    "gigachat3": CallFormat(r"function call<\|role_sep\|>\n|<\|function_call\|>"),
    "gigachat35": CallFormat("<｜GCML｜invoke", "</｜GCML｜invoke>", "<｜GCML｜tool_calls>"),
    "gemma4": CallFormat(r"<\|tool_call>", r"<tool_call\|>"),
    "inkling": CallFormat(r"<\|content_invoke_tool_(?:json|text)\|>", r"<\|end_message\|>"),
    "iquest_q1": CallFormat("<iquest_tool_call>", "</iquest_tool_call>"),
    # The tokenizer defines the format; an unreadable call in it is not noticed.
    "response_template": _NOWHERE,
}
"""Name of SGLang's ``--tool-call-parser`` -> marks of its calls."""

_THOUGHTS = (
    (r"<(?:\w+:)?(?:think|thinking|thought)(?::[^>]+)?>", r"</(?:\w+:)?(?:think|thinking|thought)(?::[^>]+)?>"),
    (r"<ifm\|think\w*>", r"</ifm\|think\w*>"),
    ("◁think▷", "◁/think▷"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
)
"""Marks around thoughts."""

_CHANNELS = (
    (r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
    (r"<\|channel>thought\b", r"<channel\|>"),
    (r"<\|content_thinking\|>", r"<\|end_message\|>"),
    (r" to=self<\|message\|>", r"<\|eom\|>"),
)
"""The same, if the closing mark also ends other parts of a turn."""

_PAIRS = (*_THOUGHTS, *_CHANNELS)
_OPEN = "|".join(f"(?P<open{at}>{start})" for at, (start, _) in enumerate(_PAIRS))
_CLOSE = "|".join(end for _, end in _THOUGHTS)


def opened_thoughts(prompt: str) -> str | None:
    """Return the pattern of the mark that ends the thoughts opened at the end of ``prompt``; None if none are open."""
    for start, end in _PAIRS:
        if re.search(rf"(?:{start})\s*\Z", prompt):
            return end
    return None


def split_thoughts(text: str, calls: CallFormat, *, opened: str | None = None) -> tuple[str, str]:
    """Return the thoughts of a turn, and the text outside of them.

    A mark inside the arguments of a call is text. Thoughts without an end last until the end of the turn. If a mark
    ends thoughts that none opened, they started with the turn.

    Arguments:
        opened: pattern that ends the thoughts which the prompt opened (:func:`opened_thoughts`).
    """
    marks = re.compile(rf"(?P<call>{calls.spans})|{_OPEN}|(?P<close>{_CLOSE})")
    thoughts, outside, at = "", "", 0
    has_thought = False
    while at < len(text):
        if opened is not None:
            end = re.compile(opened).search(text, at)
            stop = len(text) if end is None else end.end()
            thoughts, opened, has_thought, at = thoughts + text[at:stop], None, True, stop
            continue
        mark = marks.search(text, at)
        if mark is None:
            outside, at = outside + text[at:], len(text)
        elif mark["call"] is not None or (mark["close"] is not None and has_thought):
            outside, at = outside + text[at : mark.end()], mark.end()
        elif mark["close"] is not None:
            thoughts, outside, has_thought, at = text[: mark.end()], "", True, mark.end()
        else:
            outside, at = outside + text[at : mark.start()], mark.start()
            opened = _PAIRS[int(str(mark.lastgroup).removeprefix("open"))][1]
    return thoughts, outside
