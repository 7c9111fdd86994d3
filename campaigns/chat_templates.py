"""Prints a table of chat templates: which messages each writes by itself, and what slime makes of the others.

    pip download --no-deps trl==1.16.0 && unzip trl-1.16.0-*.whl 'trl/chat_templates/*' -d FOLDER
    python -m campaigns.chat_templates FOLDER/trl/chat_templates

Each column is a function of a template (:data:`COLUMNS`). Templates are rendered with the tokenizer of the built-in
model; its vocabulary does not matter, because texts are compared, not tokens.

    yes       the template writes it whole
    mended    slime brings it to a form that the template writes whole
    refused   the row, or the request, is refused with the number of the message
    lost      slime accepts it, and the text is not in the result

Loss masks: ``yes`` if every turn is trained with its thoughts, up to a token at which engines stop.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptTokenizer
from tests.chat_families import Family, encoder_of, mask_column

Message = Mapping[str, Any]

QUESTION, ORDER, WORD = "What does it cost?", "Answer in French.", "tomatoes"

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up_price",
        "description": "Look up a price.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string", "description": "What is bought."}}},
    },
}


@dataclass(frozen=True, slots=True)
class Template:
    """A template under test.

    Arguments:
        name: of its file, without suffix.
        tokenizer: renders by the template alone.
        slime: renders as slime does.
    """

    name: str
    tokenizer: Any
    slime: PromptTokenizer

    @classmethod
    def read(cls, path: Path) -> Template:
        """Read the template in ``path``."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(ARITHMETIC / "model")
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        return cls(path.stem, tokenizer, PromptTokenizer(tokenizer, path.parent, apply_chat_template=True))

    def alone(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """Return the text by the template alone; empty if it refuses the messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
            )
        except Exception:  # a template is foreign code
            return ""
        return str(text)

    def by_slime(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str | None:
        """Return the text by slime; None if it refuses the messages."""
        try:
            return self.slime.render(messages, tools=tools, asks=messages[-1]["role"] != "assistant")
        except DataError:
            return None

    def verdict(self, messages: Sequence[Message], is_whole: Callable[[str], bool], tools: Any = None) -> str:
        """Return the word of the table for a conversation whose text must satisfy ``is_whole``."""
        text = self.by_slime(messages, tools)
        if text is None:
            return "refused"
        if not is_whole(text):
            return "lost"
        return "yes" if text == self.alone(messages, tools) else "mended"


def holds(*texts: str) -> Callable[[str], bool]:
    """Return a function that tells whether all ``texts`` are in a text, and are not quoted as data."""
    return lambda text: (
        all(one in text for one in texts) and "'type': 'text'" not in text and '"type": "text"' not in text
    )


def parts(template: Template) -> str:
    """A question as a text part."""
    return template.verdict([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], holds(QUESTION))


def developer(template: Template) -> str:
    """An instruction of role ``developer``."""
    messages = [{"role": "developer", "content": ORDER}, {"role": "user", "content": QUESTION}]
    return template.verdict(messages, holds(ORDER, QUESTION))


def later_system(template: Template) -> str:
    """A second system message, after a turn."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Two euros."},
        {"role": "system", "content": ORDER},
        {"role": "user", "content": "And there?"},
    ]
    return template.verdict(messages, holds("Be brief.", QUESTION, "Two euros.", ORDER, "And there?"))


def calls(arguments: Any) -> Callable[[Template], str]:
    """Return the column for a call with ``arguments``, its answer, and a last turn."""

    def column(template: Template) -> str:
        call: dict[str, Any] = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "look_up_price", "arguments": arguments},
        }
        messages: list[Message] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "look_up_price", "tool_call_id": "call00001", "content": "Two euros."},
            {"role": "assistant", "content": "It costs two euros."},
        ]
        whole = holds(QUESTION, WORD, "Two euros.", "It costs two euros.")
        tools = [TOOL] if template.slime.template([TOOL]).shows_tools else None
        return template.verdict(
            messages, lambda text: whole(text) and '\\"item' not in text and "'item'" not in text, tools
        )

    return column


def nulls(template: Template) -> str:
    """Fields of null, as tables export them."""
    given = [("user", QUESTION), ("assistant", "Two euros."), ("user", "And there?")]
    messages = [{"role": role, "content": content, "tool_calls": None, "name": None} for role, content in given]
    return template.verdict(messages, holds(*(content for _, content in given)))


def tools(template: Template) -> str:
    """Descriptions of tools."""
    return template.verdict([{"role": "user", "content": QUESTION}], holds(QUESTION, "look_up_price"), [TOOL])


SPECIAL = re.compile(
    r"<[|｜][^\s<>{}'\"]+[|｜]>|<eos>|</?s>|<(?:start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn)>|\[/?INST\]"
)
"""Tokens of the families' tokenizers that a template, or what it writes, may hold."""


def loss_masks(template: Template) -> str:
    """Turns for supervised fine-tuning, with a tokenizer that has the template's tokens. It stops at the first of them
    that follows an answer."""
    answer = "Two euros."
    turn = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    texts = [template.by_slime(messages) or "" for messages in (turn, [*turn, {"role": "user", "content": "Why?"}])]
    stops = [stop[0] for text in texts if (stop := SPECIAL.search(text.partition(answer)[2]))]
    if not stops:
        return "no stop token"
    source = template.tokenizer.chat_template
    tokens = dict.fromkeys([*stops, *SPECIAL.findall(source + "".join(texts))])
    with tempfile.TemporaryDirectory() as folder:
        family = Family(source, special=tuple(tokens), stops=tuple(dict.fromkeys(stops)), end=stops[0], bos="<s>")
        return mask_column(encoder_of(family, Path(folder))).partition(":")[0]


COLUMNS: dict[str, Callable[[Template], str]] = {
    "text parts": parts,
    "`developer`": developer,
    "later system message": later_system,
    "arguments as JSON text": calls(json.dumps({"item": WORD})),
    "arguments as objects": calls({"item": WORD}),
    "null fields": nulls,
    "tools": tools,
    "loss masks": loss_masks,
}
"""Head of a column -> its value for a template."""


def table(folder: Path) -> str:
    """Return the table of the templates in ``folder`` in Markdown; equal rows of adjacent templates are joined."""
    names: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(folder.glob("*.jinja")):
        template = Template.read(path)
        names.setdefault(tuple(column(template) for column in COLUMNS.values()), []).append(template.name)
    rows = [["template", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    rows += [[", ".join(templates), *values] for values, templates in names.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print the table of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of .jinja files")
    logging.disable(logging.WARNING)  # each template without developer would be named
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    main()
