"""Images of prompts become inputs of the learner's model, by a real processor of the checkpoint's folder (CLIP)."""

from __future__ import annotations

import base64
import shutil
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from slime_core.builtin.rollout import SingleTurn
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError, RunError
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import CheckpointProcessor, PromptEncoder, has_processor
from slime_core.rollout.components import SamplerComponents
from slime_core.types import Sample, Status

PLACEHOLDER = 16
"""Id of ``<image>``, the only one beyond those of the arithmetic tokenizer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic checkpoint with ``<image>`` and a processor of pictures of 8 x 8, four patches each."""
    from transformers import AutoTokenizer, LlavaProcessor
    from transformers.models.clip import CLIPImageProcessorPil

    target = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token="<image>",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(target)
    shutil.copy(ARITHMETIC / "model" / "config.json", target)
    return target


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)


@pytest.fixture
def path(tmp_path: Path, picture: np.ndarray) -> str:
    Image.fromarray(picture).save(tmp_path / "cat.png")
    return str(tmp_path / "cat.png")


@pytest.fixture
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder(folder, apply_chat_template=False)


@pytest.fixture
def processor(encoder: PromptEncoder) -> Any:
    found = CheckpointProcessor(encoder)
    yield found
    found.close()


class Engine:
    """Answers 2, reads ``extra`` placeholders more than it is sent, and records its requests."""

    def __init__(self, extra: int = 3) -> None:
        self.extra, self.requests = extra, []

    async def generate(self, input_ids: list[int], *, n: int = 1, **more: Any) -> list[Generation]:
        more.pop("sampling")
        self.requests.append((input_ids, more))
        read = len(input_ids) + self.extra
        return [Generation(array("i", [8, 1]), array("f", [-1, -1]), "stop", prompt_tokens=read) for _ in range(n)]


def group(path: str, **more: Any) -> list[Sample]:
    return [
        Sample(index=index, prompt="<image>1+1=", multimodal_inputs={"image": [path]}, label="2", **more)
        for index in range(2)
    ]


def normalised(picture: np.ndarray) -> torch.Tensor:
    """CLIP's mean and deviation of red, green and blue."""
    mean, deviation = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    return torch.from_numpy(((picture / 255 - mean) / deviation).transpose(2, 0, 1)).float()


async def test_the_engine_is_sent_one_placeholder_and_the_learner_all_of_them(encoder, processor, path, picture):
    engine: Any = Engine()
    context = GenerateContext(engine, encoder, processor=processor)
    samples = await SingleTurn()(context, group(path), SamplingParams())
    text = encoder.encode("1+1=")
    assert engine.requests == [([PLACEHOLDER, *text], {"extra": {"image_data": [path]}})]
    for sample in samples:
        assert list(sample.tokens) == [*[PLACEHOLDER] * 4, *text, 8, 1]
        assert (sample.response_length, sample.status) == (2, Status.COMPLETED)
        pixels = sample.multimodal_train_inputs.pop("pixel_values")
        assert torch.allclose(pixels[0], normalised(picture), atol=1e-5)
        assert sample.multimodal_train_inputs == {}


async def test_an_aborted_response_resumes_from_what_the_engine_was_sent(encoder, processor, path):
    engine: Any = Engine()
    context = GenerateContext(engine, encoder, processor=processor)
    samples = await SingleTurn()(context, group(path), SamplingParams())
    samples[0].status = Status.ABORTED
    await SingleTurn()(context, samples[:1], SamplingParams())
    assert engine.requests[1][0] == [PLACEHOLDER, *encoder.encode("1+1="), 8, 1]
    assert list(samples[0].tokens) == [*[PLACEHOLDER] * 4, *encoder.encode("1+1="), 8, 1, 8, 1]


async def test_an_engine_that_reads_another_prompt_is_reported(encoder, processor, path):
    context = GenerateContext(Engine(extra=1), encoder, processor=processor)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"sample 0: .* 6 prompt tokens.* 8 "):
        await SingleTurn()(context, group(path), SamplingParams())


async def test_evaluations_and_samples_without_images_are_not_processed(encoder, processor, path):
    engine: Any = Engine(extra=0)
    measured = GenerateContext(engine, encoder, evaluation=True, processor=processor)
    (sample,) = await SingleTurn()(measured, group(path)[:1], SamplingParams())
    (text,) = await SingleTurn()(
        GenerateContext(engine, encoder, processor=processor), [Sample(prompt="1+1=")], SamplingParams()
    )
    assert (sample.multimodal_train_inputs, text.multimodal_train_inputs) == (None, None)
    assert text.prompt_length == len(encoder.encode("1+1="))


async def test_images_in_base_64_are_the_same_images(processor, path):
    data = base64.b64encode(Path(path).read_bytes()).decode()
    found = [
        (await processor("<image>1", {"image": one})).inputs["pixel_values"]
        for one in ([path], path, data, f"data:image/png;base64,{data}")
    ]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        ({"image": ["http://127.0.0.1/cat.png"]}, "the image 'http://127.0.0.1/cat.png' .*base64"),
        ({"video": ["cat.mp4"]}, r" video \(--multimodal-keys\).* multimodal_train_inputs"),
    ],
)
async def test_a_malformed_image_is_refused(processor, inputs, names):
    with pytest.raises(DataError, match=names):
        await processor("<image>1+1=", inputs)


async def test_a_prompt_without_a_place_for_its_image_is_refused(processor, folder, path):
    with pytest.raises(DataError, match=f"the processor in {folder}: "):
        await processor("<image><image>1+1=", {"image": [path]})


async def test_a_sample_whose_image_cannot_be_read_is_named(encoder, processor):
    context = GenerateContext(None, encoder, processor=processor)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^sample 0 of group 7: the image 'absent\.png': .*ValueError: "):
        await SingleTurn()(context, group("absent.png", group_index=7), SamplingParams())


def test_a_checkpoint_says_whether_it_has_a_processor(folder: Path, tmp_path: Path) -> None:
    assert has_processor(folder)
    assert not has_processor(ARITHMETIC / "model")
    assert not has_processor(tmp_path)


@pytest.mark.parametrize(("keys", "trains", "made"), [("{}", True, True), (None, True, False), ("{}", False, False)])
def test_only_a_run_that_trains_on_images_loads_the_processor(folder, encoder, keys, trains, made):
    config = SimpleNamespace(data=SimpleNamespace(multimodal_keys=keys), model=SimpleNamespace(trust_remote_code=False))
    parts: Any = SimpleNamespace(
        _config=config, encoder=encoder, _settings=SimpleNamespace(trains=trains, folder=folder)
    )
    found = SamplerComponents._make_processor(parts)
    assert (found is not None) == made
    if found is not None:
        found.close()
