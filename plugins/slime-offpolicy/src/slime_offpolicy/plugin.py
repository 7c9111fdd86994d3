"""Plugin ``offpolicy``: corrections for tokens that an engine sampled from another policy than the trainer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_core.provisional import DerivedSetting
    from slime_core.types import JsonValue
    from slime_offpolicy.options import OffPolicyOptions


@hookimpl
def slime_register(add: Registration) -> None:
    add.correction("tis", "slime_offpolicy.tokens:tis")
    add.correction("icepop", "slime_offpolicy.tokens:icepop")
    add.correction("mis", "slime_offpolicy.sequences:mis")
    add.correction("veto", "slime_offpolicy.sequences:veto")
    add.correction("opsm", "slime_offpolicy.sequences:opsm", compares_engine=False)
    add.options("slime_offpolicy.options:OffPolicyOptions")


@hookimpl
def slime_settings(options: OffPolicyOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    from slime_core.provisional import DerivedSetting

    corrections = settings.get("corrections")
    names = list(corrections) if isinstance(corrections, list) else []
    if options.use_tis and "tis" not in names:
        yield DerivedSetting("corrections", ["tis", *names], option="use_tis", given="replace")


@hookimpl
def slime_check(options: OffPolicyOptions) -> Iterator[str]:
    if options.tis_clip_low > options.largest_ratio:
        yield f"tis_clip_low = {options.tis_clip_low:g} is above tis_clip = {options.largest_ratio:g}. Lower it"
    if options.mis_mode != "truncate" and options.mis_clip_low > options.mis_clip:
        yield (
            f"mis_clip_low = {options.mis_clip_low:g} is above mis_clip = {options.mis_clip:g}. Lower it, or choose "
            "--mis-mode truncate, which has no lower bound"
        )
