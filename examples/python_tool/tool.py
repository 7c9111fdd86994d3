"""A tool that runs Python in a process with limits on time and memory and without network, and an agent that uses it.

The limits protect the run against loops, floods and accidents. A program can read and delete files as the run's user
can: run in a container if the code of the model may be hostile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from slime_agents import ToolError
from slime_agents.openai_agent import AgentTask

# One client for all tasks, because each new client loads the certificates of this machine.
CLIENT = AsyncOpenAI(api_key="given for each task")

CPU_S = 5
LIMIT_S = 60.0
"""Limits in seconds: CPU time of a program, and wall time. The latter is long because a training machine is busy."""

MEMORY_MIB = 512
OUTPUT_CHARS = 10_000

KILLED = 9
"""Exit status of a program that a signal ended, such as at its limits."""

ROOM = asyncio.Semaphore(2 * (os.cpu_count() or 1))
"""Limit on concurrent programs, because the time limit of a program starts with it."""

# Runs in the new process, which gets its own namespaces for users, network and processes. Its child has the limits and
# is the first process of its namespace, so that all processes that it starts end with it.
PROGRAM = f"""
import ctypes, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWPID, NEWNET, PDEATHSIG, KILL = 0x10000000, 0x20000000, 0x40000000, 1, 9
if libc.unshare(NEWUSER | NEWPID | NEWNET):
    sys.exit("NO NAMESPACES: " + os.strerror(ctypes.get_errno()))
child = os.fork()
if not child:
    libc.prctl(PDEATHSIG, KILL)
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_MIB} << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S},) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)
    os.execv(sys.executable, [sys.executable, "-I", "-c", sys.argv[1]])
ended = os.waitpid(child, 0)[1]
sys.exit({KILLED} if os.WIFSIGNALED(ended) else 0)
"""


async def run_python(code: str) -> str:
    """Run a Python program and return what it prints, errors included. It has 5 seconds of CPU time and no network."""
    async with ROOM:
        with tempfile.TemporaryDirectory() as folder:
            output = await _run(code, folder)
    if output.startswith("NO NAMESPACES"):
        raise RuntimeError(f"this machine gives a process no network of its own: {output}")
    return output


async def _run(code: str, folder: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", PROGRAM, code),
        cwd=folder,
        env={"PATH": os.defpath},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output = await _read(process)
            if len(output) <= OUTPUT_CHARS and await process.wait() == KILLED:
                raise ToolError(f"the program was ended: it has {CPU_S} s of CPU time and {MEMORY_MIB} MiB")
            return output
    except TimeoutError:
        raise ToolError(f"the program did not end in {LIMIT_S:g} s") from None
    finally:  # also if the sample is cancelled
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()  # `wait` returns only after the pipe is read to its end


async def _read(process: asyncio.subprocess.Process) -> str:
    """Read the output of the program, up to a limit; the rest is not read."""
    assert process.stdout is not None
    found = b""
    while len(found) <= OUTPUT_CHARS and (part := await process.stdout.read(OUTPUT_CHARS)):
        found += part
    if len(found) > OUTPUT_CHARS:
        return found[:OUTPUT_CHARS].decode(errors="replace") + "\n[cut here]"
    return found.decode(errors="replace").strip()


async def solve(task: AgentTask, base_url: str, api_key: str, model: str) -> list[float]:
    """Return a reward for each answer: 1 if Python finds it right. The model reads how far off a wrong first one is."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": str(task.prompt)}]
    rewards: list[float] = []
    while len(rewards) < 2 and 1.0 not in rewards:
        reply = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
        answer = reply.content or ""
        off = await run_python(f"print(abs({task.prompt} - int({answer!r})))")
        rewards.append(float(off == "0"))
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": off if off.isdigit() else "0"})  # no number: an error of Python
    return rewards
