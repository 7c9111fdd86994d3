"""The properties of every model spec: logits of Hugging Face's model, and weights that survive a round trip."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_mistral.plugin import refusals

from slime_testing import ModelSpecSuite


class TestMistral(ModelSpecSuite):
    component = "mistral"
    plugin = "slime_mistral.plugin"
    tiny: ClassVar[Mapping[str, Any]] = {"sliding_window": None}
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({"tie_word_embeddings": False},)


def test_the_windows_of_the_first_mistral_are_refused() -> None:
    assert list(refusals({"sliding_window": None})) == []
    assert "sliding-window attention" in next(refusals({}))
