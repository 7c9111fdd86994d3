"""Runs a Python module with the key of the run as its argument ``--api-key``, which no command line and no log shows.

    SLIME_ENGINE_KEY=KEY python keyed.py MODULE ARGUMENTS ...

is ``python -m MODULE ARGUMENTS ... --api-key=KEY``. Every user of a machine can read a command line
(proc_pid_cmdline(5)), but only the same user an environment. SGLang 0.5.23 logs all its arguments
(srt/entrypoints/engine.py:1185); log lines show ``***`` instead of the key. The children of the module do not inherit
the variable.

Only the standard library is imported.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

KEY_VARIABLE = "SLIME_ENGINE_KEY"
MASK = "***"


def hide_in_logs(secret: str) -> None:
    """Log records of this process, and of its forks, show :data:`MASK` instead of ``secret``."""
    make = logging.getLogRecordFactory()

    def masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if secret in (text := record.getMessage()):
            record.msg, record.args = text.replace(secret, MASK), ()
        return record

    logging.setLogRecordFactory(masked)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as ``python -m`` does, instead of the folder of this file
    _, module, *arguments = sys.argv
    if key := os.environ.pop(KEY_VARIABLE, ""):
        hide_in_logs(key)
        arguments.append(f"--api-key={key}")
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
