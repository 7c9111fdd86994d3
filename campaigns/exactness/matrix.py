"""Trains every case in every layout and compares: layouts with one rank, one rank with plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from campaigns.exactness import models, plain, rank
from campaigns.exactness.cases import CASES, Case
from campaigns.exactness.jobs import Job, run_jobs
from campaigns.exactness.layouts import LAYOUTS, ONE, PLAIN, Layout
from campaigns.exactness.mutants import Mutant
from campaigns.exactness.outcome import Difference, Outcome, compare, failed
from campaigns.exactness.rollout import Rollout, make_rollout
from tests.ranks import free_address

__all__ = ["FLOAT64", "Matrix"]

FLOAT64 = "torch, float64"
"""Of the case ``trained`` only: how much float32 itself leaves open."""


@dataclass
class Matrix:
    """One rollout and its models in ``folder``, and what was trained so far."""

    folder: Path
    rollout: Rollout
    failures: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path) -> Matrix:
        models.make_models(folder / "models")
        mixtures = [models.load(folder / "models" / "experts" / name) for name in ("actor", "reference", "second")]
        return cls(folder, make_rollout(models.load(folder / "models" / "trained" / "actor"), mixtures))

    def run(self, wanted: Mapping[str, Iterable[str]], mutants: Sequence[Mutant] = ()) -> list[Difference]:
        """All cases by layout; the rows of the matrix first, then one a mutant, in order.

        The single-rank layouts that the others are compared with are trained even where ``wanted`` does not name them.
        """
        every = {name for names in wanted.values() for name in names} | {mutant.case for mutant in mutants}
        needed = [CASES[name] for name in CASES if name in every]
        others = {LAYOUTS[name]: [CASES[case] for case in cases] for name, cases in wanted.items() if name != ONE}
        # In two halves, which run concurrently.
        alone = [self._ranks(LAYOUTS[ONE], part) for part in (needed[::2], needed[1::2]) if part]
        jobs = [self._ranks(layout, cases) for layout, cases in others.items()]
        self._run(
            [
                *alone,
                *self._plain([case for case in needed if case.has_plain]),
                *jobs,
                *(self._broken(mutant) for mutant in mutants),
            ]
        )
        one = [case for case in needed if case.name in wanted.get(ONE, ()) and case.has_plain]
        rows = [self._compare(LAYOUTS[ONE], case, PLAIN) for case in one]
        rows += [self._compare(LAYOUTS[ONE], case, FLOAT64) for case in one if case.name == "trained"]
        rows += [self._compare(layout, case, ONE) for layout, cases in others.items() for case in cases]
        return [*rows, *(self._compare_broken(mutant) for mutant in mutants)]

    # --- Jobs --------------------------------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[Job]) -> None:
        run_jobs(jobs)
        self.failures |= {job.folder: job.failure for job in jobs if job.failure}

    def _ranks(self, layout: Layout, cases: Sequence[Case], mutant: Mutant | None = None) -> Job:
        target = self._target(layout.name, mutant)
        train = partial(
            rank.train_all,
            layout,
            cases,
            self.rollout,
            address=free_address(),
            models=self.folder / "models",
            target=target,
        )

        def run(number: int) -> None:
            if mutant is not None:
                mutant.apply()
            train(rank=number)

        return Job(layout.ranks, run, target)

    def _broken(self, mutant: Mutant) -> Job:
        return self._ranks(LAYOUTS[mutant.layout], [CASES[mutant.case]], mutant)

    def _plain(self, cases: Sequence[Case]) -> list[Job]:
        """One process a case."""
        as_trained = [self._plain_job(case, PLAIN, torch.float32) for case in cases]
        return as_trained + [self._plain_job(case, FLOAT64, torch.float64) for case in cases if case.name == "trained"]

    def _plain_job(self, case: Case, name: str, dtype: torch.dtype) -> Job:
        target = self._target(name) / case.name

        def run(_: int) -> None:
            model = self.folder / "models" / case.model
            plain.train(case, self.rollout, model, dtype).save(target / f"{case.name}.0.pt")

        return Job(1, run, target)

    # --- Comparing ---------------------------------------------------------------------------------------------------

    def _target(self, layout: str, mutant: Mutant | None = None) -> Path:
        return self.folder / "found" / (layout if mutant is None else f"mutant, {mutant.name}")

    def _compare_broken(self, mutant: Mutant) -> Difference:
        expected = PLAIN if mutant.layout == ONE else ONE
        return self._compare(LAYOUTS[mutant.layout], CASES[mutant.case], expected, mutant=mutant)

    def _compare(self, layout: Layout, case: Case, expected: str, *, mutant: Mutant | None = None) -> Difference:
        name = f"{layout.name} to {expected}" if layout.name == ONE else layout.name
        target = self._target(layout.name, mutant)
        other = self._target(expected) if expected == ONE else self._target(expected) / case.name
        failure = self.failures.get(target) or self.failures.get(other)
        if failure:
            return failed(name, case.name, failure)
        found = [Outcome.load(target / f"{case.name}.{number}.pt") for number in range(layout.ranks)]
        seconds = float((target / f"{case.name}.0.seconds").read_text())
        try:
            return compare(name, case.name, found, Outcome.load(other / f"{case.name}.0.pt"), seconds=seconds)
        except ValueError as error:  # other weights or metrics than those of what it is compared with
            return failed(name, case.name, str(error))
