"""Whose samples those are that a generate function returned: of the group that it was handed, and of which sample.

One generation may fan out into several samples (turns of a conversation, agents that work together), which share a
``rollout_id``. However a function numbers them, they keep the number of the sample that they were made from: the ledger
knows samples by it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from slime_core.types import PromptGroup, Sample

__all__ = ["Parents"]


@dataclass(frozen=True, slots=True)
class Parents:
    """The samples that a generate function is handed, with their numbers, which it may change in place.

    Example, samples 4 and 5 of group 3 became two siblings each, numbered 0 and 1 by the function::

        parents = Parents.of(group)
        parents.adopt(made)
        [one.index for one in made] == [4, 4, 5, 5]

    Arguments:
        samples: in order, at least one.
        numbers: their numbers then.
    """

    samples: tuple[Sample, ...]
    numbers: tuple[int | None, ...]

    @staticmethod
    def of(samples: Sequence[Sample]) -> Parents:
        """Those of ``samples``, as they are called now."""
        return Parents(tuple(samples), tuple(sample.index for sample in samples))

    def adopt(self, made: Sequence[Sample]) -> None:
        """Give every sample of ``made`` the number of the one that it was made from, and a group where it has none.

        Siblings are those of the parent among them, or of the one whose number they all have. The others, as they come,
        are those of the parents that have none yet; what is left then is the last one's.
        """
        generations = _generations(made)
        claims = [self._claim(siblings) for siblings in generations]
        free = iter([number for number in self.numbers if number not in claims])
        for siblings, claim in zip(generations, claims, strict=True):
            number = next(free, self.numbers[-1]) if claim is None else claim
            for sample in siblings:
                sample.index = number
                sample.group_index = self.samples[0].group_index if sample.group_index is None else sample.group_index
        for sample, own in self:
            sample.index = own

    def _claim(self, siblings: PromptGroup) -> int | None:
        if len(self.numbers) == 1:
            return self.numbers[0]
        itself = {own for parent, own in self if any(parent is sample for sample in siblings)}
        found = itself or {sample.index for sample in siblings if sample.index is not None}
        return next(iter(found)) if len(found) == 1 and found <= set(self.numbers) else None

    def __iter__(self) -> Iterator[tuple[Sample, int | None]]:
        return zip(self.samples, self.numbers, strict=True)


def _generations(made: Sequence[Sample]) -> list[PromptGroup]:
    """Samples that share a ``rollout_id`` together, each other one alone, in the order of their coming."""
    found: dict[Hashable, PromptGroup] = {}
    for place, sample in enumerate(made):
        key = ("alone", place) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        found.setdefault(key, []).append(sample)
    return list(found.values())
