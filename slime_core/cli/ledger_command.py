"""``slime ledger``: the end of every prompt group of a run, counted from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.checkpoint.folder import Checkpoint, newest
from slime_core.errors import CheckpointError, ConfigError
from slime_core.track.ledger import ENDS, JOURNAL, Recount
from slime_core.untrusted import as_object

USAGE = """\
slime ledger RUN     where every prompt group of a run folder ended; exit code 1 if one is lost or ended twice

The files up to the newest checkpoint must account for every group: trained, filtered, failed, evicted, or held by the
checkpoint. What came after it is counted too, and comes again when the run is resumed."""


def execute(argv: Sequence[str]) -> int:
    """Print the ledger of the run folder that ``argv`` names.

    Raises:
        ConfigError: there is no such run folder, or it keeps no ledger.
        RunError: the ledger does not balance; names the groups.
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(f"slime ledger {' '.join(argv)}; accepted: one run folder\n{USAGE}")
    run = Path(argv[0])
    samples = run / "samples"
    if not (samples / JOURNAL).is_file():
        raise ConfigError(
            f"{samples / JOURNAL} does not exist: {run} is not the folder of a run that generates, or of one before "
            "there was a ledger. Give a folder that slime run made."
        )
    checkpoint = newest(run / "checkpoints")
    if checkpoint is not None:
        print("\n".join(_at_checkpoint(samples, checkpoint)))
    end = Recount(samples)
    end.read()
    print("\n".join(_table(f"end of the files, {end.rollouts} rollouts", end, {"open": len(end.open)})))
    return 0


def _at_checkpoint(samples: Path, checkpoint: Checkpoint) -> list[str]:
    recount = Recount(samples)
    try:
        ledger: dict[str, Any] = as_object(checkpoint.state.cursor.get("ledger", {}))
        until = int(ledger.get("journal", 0))
        held = {name: dict(ledger.get(name, [])) for name in ("in_flight", "held")}
    except (TypeError, ValueError) as problem:
        state = checkpoint.path / "state.json"
        raise CheckpointError(f"{state} holds no state of a ledger ({problem}). Name another run.") from problem
    recount.read(until=until)
    recount.check({**held["in_flight"], **held["held"]})
    title = f"{checkpoint.path.name}, {recount.rollouts} rollouts: balances"
    return _table(title, recount, {name: len(groups) for name, groups in held.items()})


def _table(title: str, recount: Recount, present: dict[str, int]) -> list[str]:
    ends = sorted(recount.groups.items(), key=lambda entry: (ENDS.index(entry[0][0]), entry[0][1]))
    rows = [(place, reason, count) for (place, reason), count in ends]
    rows += [(name, "", count) for name, count in present.items()]
    rows += [("returned", "", len(recount.returned)), ("taken", "", recount.taken)]
    return [title, *(f"  {place:<10}{reason:<24}{count:>8}" for place, reason, count in rows)]
