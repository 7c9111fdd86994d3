"""Runs SGLang's tool call parsers without a server: each line of the input is a request, of the output an answer."""

from __future__ import annotations

import json
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

for line in sys.stdin:
    body = json.loads(line)
    tools = [Tool(**tool) for tool in body["tools"]]
    text, calls = FunctionCallParser(tools, body["tool_call_parser"]).parse_non_stream(body["text"])
    print(json.dumps({"normal_text": text, "calls": [call.model_dump() for call in calls]}), flush=True)
