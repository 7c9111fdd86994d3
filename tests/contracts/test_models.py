"""Our own model specs, held to the contract by the kit that plugin authors use."""

from slime_testing import ModelSpecSuite


class TestQwen3(ModelSpecSuite):
    component = "qwen3"


class TestLlama(ModelSpecSuite):
    component = "llama"


class TestQwen2(ModelSpecSuite):
    component = "qwen2"


class TestQwen3Moe(ModelSpecSuite):
    component = "qwen3_moe"
    variants = ({"tie_word_embeddings": False},)  # each tensor is moved and loaded again; tied ones are those of qwen3
