"""Language models of the families that learn here; SGLang asks each file for its ``EntryClass``."""

from __future__ import annotations

from sglang.srt.models import llama, qwen2, qwen3, qwen3_moe

EntryClass = [*llama.EntryClass, qwen2.EntryClass, qwen3.EntryClass, qwen3_moe.EntryClass]
