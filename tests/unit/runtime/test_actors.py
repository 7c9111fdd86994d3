"""What surrounds the start of an actor."""

from __future__ import annotations

import gc

from slime_core.runtime.actors import uncollected


def test_garbage_is_looked_for_after_the_block_and_no_more_in_what_it_made() -> None:
    try:
        with uncollected():
            asleep, made = not gc.isenabled(), [[]]
        assert (asleep, gc.isenabled()) == (True, True)
        assert not any(one is made for one in gc.get_objects())
    finally:
        gc.unfreeze()
