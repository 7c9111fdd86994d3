"""Generate function ``search_r1``: the model searches and reads until it answers (2503.09516, algorithm 1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from slime_core import RunView, Sample
from slime_core.errors import ServiceError
from slime_core.generation import GenerateContext, SamplingParams
from slime_searchr1.options import SearchOptions
from slime_searchr1.protocol import NO_ACTION, STOPS, failed, information, read_turn
from slime_searchr1.retrieval import make_retriever

__all__ = ["COUNTS", "MAX_TURNS", "SearchAndAnswer"]

MAX_TURNS = 4
"""Limit on turns if ``--max-turns`` is not set: three searches and an answer."""

COUNTS = "search_r1"
"""Metadata key of a sample's :class:`Counts`."""


@dataclass(slots=True)
class Counts:
    """Counters of one response.

    Arguments:
        searches: queries, including those that failed.
        failures: queries that the retriever did not answer.
        invalid: turns with neither a query nor an answer.
    """

    searches: int = 0
    failures: int = 0
    invalid: int = 0


class SearchAndAnswer:
    """Turns of the model with searches between them; the passages found are not trained (Search-R1, 2503.09516).

    The retriever's passages have mask 0. A response ends with an answer, after ``--max-turns`` turns, or when it is
    full. If a search fails or a turn has no action, the model gets a message about it and can continue.
    """

    def __init__(self, options: SearchOptions, run: RunView) -> None:
        self._options = options
        self._retriever = make_retriever(options)
        limit = run.settings.get("max_turns")
        self._max_turns = limit if isinstance(limit, int) else MAX_TURNS

    async def __call__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
        """Return the finished response.

        Raises:
            Interrupted: a turn was aborted.
            EngineError: no engine answered.
        """
        sampling = replace(sampling, stop=tuple(dict.fromkeys([*sampling.stop, *STOPS])))
        trajectory, counts = context.start(sample), Counts()
        while not trajectory.is_full:
            turn = await trajectory.generate(sampling)
            action = read_turn(turn.text)
            counts.invalid += action is None
            is_over = turn.finish_reason == "length" or trajectory.num_turns >= self._max_turns
            if is_over or (action is not None and action.kind == "answer"):
                break
            if action is None:
                trajectory.append_text(NO_ACTION)
                continue
            async with trajectory.tool_time():
                passages = await self._search(action.text, counts)
            trajectory.append_text(passages)
        finished = trajectory.finish()
        finished.metadata[COUNTS] = dict(asdict(counts))
        return finished

    async def _search(self, query: str, counts: Counts) -> str:
        """Search and return the text that the model reads after ``query``."""
        counts.searches += 1
        try:
            passages = await self._retriever.search(query)
        except ServiceError:
            counts.failures += 1
            return failed()
        return information([passage.contents for passage in passages], max_chars=self._options.information_max_chars)
