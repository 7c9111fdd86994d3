"""slime-lora on real ranks: every layout trains the adapters of one rank, which are those of peft on transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from campaigns.gradients import complete
from slime_core.config.engines import MegatronConfig
from slime_core.errors import ConfigError
from slime_core.types import Sample, Status
from slime_lora import folder
from slime_lora.merge import merge_folder
from slime_lora.options import LoraOptions
from tests.checkpoints import write_copies
from tests.engines import families
from tests.engines.learners import KL, TEMPERATURE, VOCABULARY, Make, cut, distance, equal, settings, weights_of

RANK, ALPHA = 4, 8.0
NEAR = 1e-5
BROKEN = 1e-4
"""A mutant moves gradients or weights by more than this."""


def options(**fields: Any) -> LoraOptions:
    return LoraOptions(**{"rank": RANK, "alpha": ALPHA, **fields})


def adapted(make: Make, model: Path, lora: LoraOptions, *, config: Any = None, **layout: Any) -> Any:
    """A learner with adapters."""
    config = config or settings(clip_grad=0.0)
    return make(config, model, plugins=("lora",), options={"lora": lora}, **layout)


def shapes_of(model: Path) -> dict[str, tuple[int, int]]:
    """Module -> shape of its weight, of the linear layers in a folder; routers, embedding and head are left out."""
    from slime_core.weights import expected_specs

    named = {name.removesuffix(".weight"): spec.shape for name, spec in expected_specs(model).items()}
    return {
        name: (shape[0], shape[1])
        for name, shape in named.items()
        if (len(shape) == 2 and name.endswith("_proj")) or "_proj_with_mqa" in name
    }


def random_adapter(target: Path, model: Path) -> Path:
    """A folder of peft with random matrices for every linear layer of ``model``."""
    torch.manual_seed(3)
    tensors = []
    for module, (rows, columns) in shapes_of(model).items():
        tensors.append((folder.name_of(module, "A"), 0.3 * torch.randn(RANK, columns)))
        tensors.append((folder.name_of(module, "B"), 0.1 * torch.randn(rows, RANK)))
    folder.write(target, tensors, options=options(), base=str(model))
    return target


@pytest.fixture(scope="module")
def adapter(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tmp_path_factory.mktemp("adapters") / "qwen3", qwen3)


def gradients_of(learner: Any) -> dict[str, torch.Tensor]:
    """The gradients of all adapters after a step, by module and matrix."""
    complete(learner.actor.model)
    for chunk in learner.actor.chunks:
        for parameter in chunk.lora.parameters():
            parameter.data.copy_(parameter.main_grad)
    return dict(learner.saved_weights())


def stepped(
    make: Make, model: Path, load: Path, shards: Any, breaks: Callable[[], None] | None = None, **layout: Any
) -> Any:
    """Weights for engines after one step, the loss and its gradients."""
    if breaks is not None:
        breaks()
    learner = adapted(make, model, options(load=load), **layout)
    metrics = learner.train(shards[make.rank])
    weights = weights_of(learner)
    return weights, metrics, gradients_of(learner)


def one_step(samples: Any, **plan: Any) -> Any:
    return cut(samples, num_steps=1, max_tokens=400, **plan)


@pytest.fixture(scope="module")
def one_rank(learners: Any, qwen3: Path, adapter: Path, samples: Any) -> Any:
    ((weights, metrics, gradients),) = learners(partial(stepped, model=qwen3, load=adapter, shards=one_step(samples)))
    return weights, metrics, gradients


def differences(outcome: Any, expected: Any) -> float:
    """Largest difference of loss and gradients, and a tenth of that of weights.

    Adam divides small gradients by their size, and the learning rate is 3e-3.
    """
    weights, metrics, gradients = outcome
    loss = abs(metrics["train/loss"] - expected[1]["train/loss"])
    return max(0.1 * distance(weights, expected[0]), loss, distance(gradients, expected[2]))


RECOMPUTES = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"context": 2},
    {"tensor": 2, "sequence": True, "given": RECOMPUTES},
    {"given": (("overlap_grad_reduce", True), ("overlap_param_gather", True))},
]
"""``given``: Megatron's flags."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_step_as_one(learners, qwen3, adapter, samples, one_rank, layout) -> None:
    sizes = {name: size for name, size in layout.items() if name != "given"}
    shards = one_step(samples) * 2 if sizes else one_step(samples, num_ranks=2)
    config = settings(clip_grad=0.0).model_copy(update={"megatron": MegatronConfig(given=layout.get("given", ()))})
    scenario = partial(stepped, model=qwen3, load=adapter, shards=shards, config=config, **sizes)
    for outcome in learners(scenario, ranks=2):
        assert differences(outcome, one_rank) < NEAR


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {"expert": 2}),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 2}),
        ("deepseek_v3", {"tensor": 2, "sequence": True}),
        ("qwen2, tied", {"pipeline": 2}),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}),
    ],
    ids=str,
)
def test_mixtures_and_latent_attention_step_as_one_rank(learners, tmp_path, family, layout) -> None:
    model = families.write(family, tmp_path / "model", num_hidden_layers=4 if "virtual_pipeline" in layout else 2)
    load = random_adapter(tmp_path / "adapter", model)
    (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
    samples = four_samples(vocabulary=16)
    scenario = partial(stepped, model=model, load=load, architecture=architecture)
    (expected,) = learners(partial(scenario, shards=one_step(samples, advantages=ADVANTAGES)))
    is_data_parallel = "tensor" not in layout and "pipeline" not in layout
    shards = one_step(samples, advantages=ADVANTAGES, num_ranks=2 if is_data_parallel else 1) * 2
    for outcome in learners(partial(scenario, shards=shards, **layout), ranks=2):
        assert differences(outcome, expected) < NEAR


# --- Broken on purpose ------------------------------------------------------------------------------------------------


def without_scale() -> None:
    from slime_lora import wrapping

    wrapping.AdaptedForward = partial(_unscaled, wrapping.AdaptedForward)  # type: ignore[assignment, misc]


def _unscaled(kind: Any, target: Any, adapters: Any, *, scale: float) -> Any:
    return kind(target, adapters, scale=1.0)


def without_sum_over_tensor_ranks() -> None:
    from slime_lora import wrapping

    class Unsummed(wrapping.Adapter):
        def __init__(self, *words: Any, **named: Any) -> None:
            super().__init__(*words, **named)
            for parameter in self.parameters():
                vars(parameter)["sequence_parallel"] = False

    wrapping.Adapter = Unsummed  # type: ignore[misc]


def with_whole_outputs() -> None:
    """Every rank believes to hold the first rows of B."""
    from slime_lora import wrapping

    def load(self: Any, path: Path) -> None:
        stored = folder.read(path, options=self._options, modules=self._held.keys())
        for module, adapter in self._here().items():
            for name, parameter in adapter.named_parameters():
                full = stored[f"{module}.{name}"]
                parameter.data.copy_(full[tuple(map(slice, parameter.shape))])

    wrapping.LoraModel._load = load  # type: ignore[method-assign]


def with_a_base_that_trains() -> None:
    torch.nn.Module.requires_grad_ = lambda self, requires_grad=True: self  # type: ignore[method-assign]


MUTANTS = [without_scale, without_sum_over_tensor_ranks, with_whole_outputs, with_a_base_that_trains]


@pytest.mark.parametrize("breaks", MUTANTS)
def test_what_is_broken_is_noticed(learners, qwen3, adapter, samples, one_rank, breaks) -> None:
    layout = {"tensor": 2, "sequence": True}
    scenario = partial(stepped, model=qwen3, load=adapter, shards=one_step(samples) * 2, breaks=breaks, **layout)
    outcome, _ = learners(scenario, ranks=2)
    assert differences(outcome, one_rank) > BROKEN


# --- peft -------------------------------------------------------------------------------------------------------------


ADVANTAGES = np.array([1.0, -0.5, 0.7, -1.2], np.float32)


def four_samples(*, vocabulary: int = VOCABULARY) -> list[Sample]:
    random = np.random.default_rng(5)
    lengths = ((3, 4), (2, 6), (5, 3), (1, 5))
    return [
        Sample(
            group_index=index // 2,
            index=index,
            tokens=random.integers(2, vocabulary, prompt + response).tolist(),
            response_length=response,
            rollout_log_probs=[-3.0] * response,
            status=Status.COMPLETED,
        )
        for index, (prompt, response) in enumerate(lengths)
    ]


def peft_model(model: Path, adapter: Path) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)


def test_gradients_are_those_of_peft_on_transformers(learners, qwen3, adapter) -> None:
    reference = peft_model(qwen3, adapter)
    samples = four_samples()
    for sample, advantage in zip(samples, ADVANTAGES.tolist(), strict=True):
        tokens = torch.tensor([sample.tokens])
        logits = reference(tokens).logits[0, -sample.response_length - 1 : -1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(1, tokens[0, -sample.response_length :, None])
        (-advantage * log_probs.mean() / len(samples)).backward()
    expected = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    shards = one_step(samples, advantages=ADVANTAGES)
    ((_, _, gradients),) = learners(partial(stepped, model=qwen3, load=adapter, shards=shards))
    assert max(gradient.abs().max().item() for gradient in gradients.values()) > 100 * NEAR
    assert distance(gradients, expected) < NEAR


def test_peft_loads_a_checkpoint_and_computes_what_engines_get_and_what_is_merged(
    learners, qwen3, adapter, samples, tmp_path
):
    from transformers import AutoModelForCausalLM

    saved = tmp_path / "hf"

    def scenario(make: Make) -> Any:
        learner = adapted(make, qwen3, options(load=adapter))
        learner.train(cut(samples)[0])
        learner.write_hf(saved, list(learner.saved_weights()))
        return weights_of(learner)

    (published,) = learners(scenario)
    merge_folder(saved, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert equal(published, dict(merged.state_dict()))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(peft_model(qwen3, saved)(tokens).logits, merged(tokens).logits, atol=NEAR)


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_only_adapters_change_and_the_first_weights_are_the_checkpoints(learners, qwen3, samples) -> None:
    def scenario(make: Make) -> Any:
        learner = adapted(make, qwen3, options(target_modules=("q_proj", "down_proj")))
        before = weights_of(learner)
        learner.train(cut(samples)[0])
        return before, weights_of(learner), dict(learner._wrapped.spec.export_weights(learner.actor.chunks))

    ((before, after, base),) = learners(scenario)
    from safetensors.torch import load_file

    assert equal(before, load_file(qwen3 / "model.safetensors"))
    assert equal(base, before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = ("model.layers.0", "model.layers.1")
    assert changed == {f"{n}.{m}.weight" for n in layers for m in ("self_attn.q_proj", "mlp.down_proj")}


def test_a_checkpoint_holds_adapters_alone_and_continues_exactly_in_another_layout(
    learners, qwen3, samples, tmp_path
) -> None:
    first, second = cut(samples), cut(samples, rollout=1)

    def whole(make: Make) -> Any:
        learner = adapted(make, qwen3, options())
        learner.train(first[0])
        write_copies(learner.copy(tmp_path))
        learner.train(second[0])
        return weights_of(learner)

    def resumed(make: Make, **layout: Any) -> Any:
        learner = adapted(make, qwen3, options(), **layout)
        learner.load(tmp_path)
        learner.train(second[0])
        return weights_of(learner)

    (expected,) = learners(whole)
    (continued,) = learners(resumed)
    assert equal(continued, expected)
    for split in learners(partial(resumed, tensor=2, sequence=True), ranks=2):
        assert distance(split, expected) < NEAR
    from slime_core.checkpoint.sharded import StoredTensors

    held = StoredTensors(tmp_path / "torch_dist").held
    assert len(held) == 2 * len(shapes_of(qwen3))
    assert all(name.startswith("lora.") for name in held)


def test_the_reference_is_the_base_model_without_a_copy(learners, qwen3, adapter, samples) -> None:
    def scenario(make: Make, lora: LoraOptions) -> Any:
        learner = adapted(make, qwen3, lora, config=settings(algorithm=KL))
        assert not learner._frozen._snapshots._weights
        return learner.train(cut(samples, num_steps=1)[0])

    (fresh,) = learners(partial(scenario, lora=options()))
    (loaded,) = learners(partial(scenario, lora=options(load=adapter)))
    assert fresh["train/kl_loss"] == 0
    assert loaded["train/kl_loss"] > BROKEN


@pytest.mark.parametrize(
    "fields",
    [{"target_modules": ("q_proj", "c_attn")}, {"rank": 33}, {"rank": 8, "load": True}, {"alpha": 9.0, "load": True}],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_or_the_folder_are_refused(learners, qwen3, adapter, fields) -> None:
    lora = options(**{**fields, **({"load": adapter} if "load" in fields else {})})
    with pytest.raises(ConfigError):
        learners(partial(adapted, model=qwen3, lora=lora))
