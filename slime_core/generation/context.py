"""The context that a generate function gets: the engines, the tokenizer, and the settings of the run.

GenerateContext   holds them; starts trajectories
Client, Encoder, InputProcessor   its Protocols, which rollout and prompts implement
Parents           maps the samples that a generate function returns to those that it was given
generate_group    generates one response to each sample of a group; fresh samples share one request
run_all           awaits several calls concurrently

``SamplerComponents.context`` makes the context; ``GroupAttempt`` passes it to generate functions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime_core.config.engines import model_url
from slime_core.errors import EngineError, RequestRefused, RunError
from slime_core.generation.sampling import Generation, SamplingParams, engine_inputs, fail, is_finished
from slime_core.generation.trajectory import Interrupted, Trajectory
from slime_core.types import JsonValue, PromptGroup, Sample

if TYPE_CHECKING:
    import torch


class Client(Protocol):
    """Sends token ids to the engines."""

    @property
    def url(self) -> str:
        """URL of the router, or of one engine."""
        ...

    async def engine_url(self) -> str:
        """Return the URL of one engine, for endpoints that routers do not have, such as ``/parse_function_call``."""
        ...

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        n: int = 1,
        timeout_s: float | None = None,
        extra: Mapping[str, JsonValue] | None = None,
        session: str | None = None,
    ) -> list[Generation]:
        """Generate ``n`` responses to one prompt.

        Arguments:
            input_ids: the prompt.
            sampling: how tokens are sampled.
            n: number of responses.
            timeout_s: limit in seconds. By default the client's limit since the engine's last progress.
            extra: additional fields of SGLang's request (``image_data``, ``lora_path``).
            session: id of the conversation. Its requests go to one engine if ``sglang_router_policy`` supports it.

        Raises:
            RequestRefused: an id is out of range, or the engine refused the request.
            RequestFailed: no engine answered in time.
        """
        ...


class Encoder(Protocol):
    """The checkpoint's tokenizer and chat template."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has an embedding for."""
        ...

    @property
    def uses_template(self) -> bool:
        """Return whether prompts are rendered with the chat template (``--apply-chat-template``)."""
        ...

    def encode(
        self, prompt: str | list[dict[str, JsonValue]], *, tools: Sequence[JsonValue] | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, rendered by the chat template if the run uses it.

        Raises:
            DataError: chat messages without a template, a prompt without tokens, or the template refuses the prompt.
        """
        ...

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        after: int | None = None,
        tools: Sequence[JsonValue] | None = None,
    ) -> list[int]:
        """Return the token ids that continue a conversation after a turn of the assistant, by the chat template: the
        end of that turn, ``messages``, and the start of the assistant's next turn.

        Arguments:
            after: the last id so far; if it already ends the turn, the end is not repeated.
            tools: descriptions of functions, for the chat template.

        Raises:
            DataError: there is no chat template, or it refuses the messages.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of ``text`` unchanged: no chat template, no special tokens added."""
        ...

    def encode_response(self, text: str) -> list[int]:
        """Return the token ids of a response: ``text`` and the end-of-sequence token, if there is one."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        ...

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with special tokens."""
        ...


class ProcessedPrompt(Protocol):
    """A prompt with images, as the input of the trained model."""

    @property
    def ids(self) -> list[int]:
        """Token ids, each image with all its placeholders."""
        ...

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """Tensors by name, such as ``pixel_values``."""
        ...


class InputProcessor(Protocol):
    """The checkpoint's processor of images."""

    async def __call__(
        self,
        prompt: str | list[dict[str, JsonValue]],
        inputs: Mapping[str, JsonValue],
        *,
        tools: Sequence[JsonValue] | None = None,
    ) -> ProcessedPrompt:
        """Process ``prompt`` and ``inputs`` (``Sample.multimodal_inputs``).

        Raises:
            DataError: the images cannot be read, or the processor refuses them.
        """
        ...


@dataclass(frozen=True, slots=True)
class GenerateContext:
    """The engines, tokenizer and settings that a generate function uses.

    Arguments:
        client: sends token ids to the engines.
        encoder: prompt to ids, ids to text.
        evaluation: whether the samples are of an evaluation.
        rollout: number of the rollout. For an evaluation, the number of training steps so far.
        masks_resumed: exclude the earlier tokens of a resumed response from training.
        models: name -> URL of every auxiliary model.
        processor: converts a prompt's images into inputs of the trained model. None leaves inputs of samples unchanged.
        max_response_len: limit on a response in tokens, over all turns and appended text. The core sets it to
            ``sampling.max_new_tokens``. None means no limit but the context length.
        context_length: longest sequence of the model in tokens. None: unknown.
        warn: tells a person what is wrong with the data; a run prints each text once, with the rollout.
    """

    client: Client
    encoder: Encoder
    evaluation: bool = False
    rollout: int = 0
    masks_resumed: bool = False
    models: Mapping[str, str] = field(default_factory=dict)
    processor: InputProcessor | None = None
    max_response_len: int | None = None
    context_length: int | None = None
    warn: Callable[[str], None] = logging.getLogger(__name__).warning

    def start(self, sample: Sample, *, prompt_ids: Sequence[int] | None = None) -> Trajectory:
        """Start the response to ``sample``, which is then generated turn by turn.

        An aborted sample resumes with the tokens that it has: finished turns are restored, and the next
        :meth:`Trajectory.generate` resumes the aborted turn.

        Arguments:
            sample: only :meth:`Trajectory.finish` changes it.
            prompt_ids: token ids of its prompt. Encoded from the sample's prompt if None.

        Raises:
            DataError: the encoder refuses the prompt.
        """
        return Trajectory(self, sample, prompt_ids=prompt_ids)

    def model_url(self, name: str, endpoint: str = "") -> str:
        """Return the URL of auxiliary model ``name`` (such as a judge), followed by ``endpoint``.

        Raises:
            ConfigError: the run serves no such model.
        """
        return model_url(self.models, name, endpoint)


@dataclass(frozen=True, slots=True)
class Parents:
    """The samples that a generate function was given, with their ``index``, because the function may change it.

    Example, the function turned each of samples 4 and 5 of group 3 into two siblings, and numbered them 0 and 1::

        parents = Parents.of(group)
        parents.adopt(made)
        [sample.index for sample in made] == [4, 4, 5, 5]

    Arguments:
        samples: in order, at least one.
        numbers: their ``index`` before the function was called.
    """

    samples: tuple[Sample, ...]
    numbers: tuple[int | None, ...]

    @staticmethod
    def of(samples: Sequence[Sample]) -> Parents:
        """Record ``samples`` with their current ``index``."""
        return Parents(tuple(samples), tuple(sample.index for sample in samples))

    def adopt(self, samples: Sequence[Sample]) -> None:
        """Give every sample the ``index`` of its parent, and the group of the parents if it has no group.

        The parent of siblings is the parent that is one of them, or the parent whose index they all have. The other
        siblings are assigned, in order, to the parents without samples, and the remaining ones to the last parent.
        """
        generations = _generations(samples)
        parent_numbers = {id(parent): number for parent, number in self}
        claims = [self._claim(siblings, parent_numbers) for siblings in generations]
        free = iter([number for number in self.numbers if number not in claims])
        for siblings, claim in zip(generations, claims, strict=True):
            number = next(free, self.numbers[-1]) if claim is None else claim
            for sample in siblings:
                sample.index = number
                sample.group_index = self.samples[0].group_index if sample.group_index is None else sample.group_index
        for sample, number in self:
            sample.index = number

    def _claim(self, siblings: PromptGroup, parent_numbers: Mapping[int, int | None]) -> int | None:
        if len(self.numbers) == 1:
            return self.numbers[0]
        of_parents = {parent_numbers[id(sample)] for sample in siblings if id(sample) in parent_numbers}
        numbers = of_parents or {sample.index for sample in siblings if sample.index is not None}
        return next(iter(numbers)) if len(numbers) == 1 and numbers <= set(self.numbers) else None

    def __iter__(self) -> Iterator[tuple[Sample, int | None]]:
        return zip(self.samples, self.numbers, strict=True)


def _generations(samples: Sequence[Sample]) -> list[PromptGroup]:
    """Group samples by ``rollout_id``, in order. A sample without one is a separate generation."""
    generations: dict[Hashable, PromptGroup] = {}
    for place, sample in enumerate(samples):
        key = ("alone", place) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        generations.setdefault(key, []).append(sample)
    return list(generations.values())


async def generate_group(context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
    """Generate one turn for every unfinished sample of a prompt group. Fresh samples share one request; each aborted
    sample resumes with a separate request.

    If an engine fails, the samples of its request are ``FAILED``.

    Returns:
        ``samples``, each finished, ``ABORTED`` or ``FAILED``.

    Raises:
        RequestRefused: the engine refused the request, and would refuse it again.
        DataError: the encoder refuses the prompt, or its images cannot be read.
    """
    unfinished = [sample for sample in samples if not is_finished(sample)]
    fresh = [sample for sample in unfinished if not sample.response_length]
    requests = [_generate_fresh(context, fresh, sampling)] if fresh else []
    requests += [_resume(context, sample, sampling) for sample in unfinished if sample.response_length]
    await run_all(requests)
    return samples


async def _generate_fresh(context: GenerateContext, samples: Sequence[Sample], sampling: SamplingParams) -> None:
    # The samples of a group have one prompt: it is encoded once, and its images are read once.
    first = context.start(samples[0])
    others = [context.start(sample, prompt_ids=first._sent_prompt) for sample in samples[1:]]
    trajectories = [first, *others]
    with _failures_of(samples):
        await first.read_inputs()
        answers = await context.client.generate(
            first._sent(), sampling=sampling, n=len(samples), **engine_inputs(samples[0])
        )
        if len(answers) != len(samples):
            raise RunError(f"{len(samples)} responses were requested, the engine returned {len(answers)}")
        for trajectory, answer in zip(trajectories, answers, strict=True):
            trajectory._use(first._processed)
            trajectory._take(answer, sampling)
            trajectory.finish()


async def _resume(context: GenerateContext, sample: Sample, sampling: SamplingParams) -> None:
    trajectory = context.start(sample)
    trajectory._session = None  # one turn: the client chooses the engine as for fresh samples
    with _failures_of([sample]), suppress(Interrupted):  # aborted again: the sample has its tokens so far
        await trajectory.generate(sampling)
        trajectory.finish()


@contextmanager
def _failures_of(samples: Sequence[Sample]) -> Iterator[None]:
    """Context in which an :class:`EngineError` fails ``samples``; a refused request is raised."""
    try:
        yield
    except RequestRefused:
        raise
    except EngineError as failure:
        for sample in samples:
            fail(sample, failure)


T = TypeVar("T")


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await ``works`` concurrently; return their results in order.

    If one of them raises, cancel the others and raise its error at once, without waiting for them to end.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # without effect on a task that is done
