"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell without job control starts background commands with Ctrl-C ignored, and children inherit that: runs that the
# tests start could then not be interrupted. A handler of our own gives every child the default again.
signal.signal(signal.SIGINT, signal.default_int_handler)
