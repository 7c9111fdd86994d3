"""A tool that runs Python in a process with little time and memory and no network, and an agent that uses it.

The limits protect the run against loops, floods and accidents. Files can be read and deleted as the run's user can: put
the run into a container where the code of the model may be hostile.
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

# One for all tasks: a client of its own for each would load the certificates of this machine every time.
CLIENT = AsyncOpenAI(api_key="given for each task")

CPU_S = 5
LIMIT_S = 60.0
"""Of computing, and of waiting: a machine that trains gives a program its seconds late."""

MEMORY_MIB = 512
OUTPUT_CHARS = 10_000

KILLED = 9
"""Exit status of a program that the system ended."""

ROOM = asyncio.Semaphore(2 * (os.cpu_count() or 1))
"""Programs at once: the seconds of a program count from its start."""

# Runs in the new process, which gets namespaces of its own for users, network and processes. Its child has the limits
# and is the first process of its namespace, so that everything it starts ends with it.
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
    finally:  # also where the sample is cancelled
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()  # `wait` returns only after the pipe is read to its end


async def _read(process: asyncio.subprocess.Process) -> str:
    """What the program prints, up to a limit; nothing beyond it is read."""
    assert process.stdout is not None
    found = b""
    while len(found) <= OUTPUT_CHARS and (part := await process.stdout.read(OUTPUT_CHARS)):
        found += part
    if len(found) > OUTPUT_CHARS:
        return found[:OUTPUT_CHARS].decode(errors="replace") + "\n[cut here]"
    return found.decode(errors="replace").strip()


async def solve(task: AgentTask, base_url: str, api_key: str, model: str) -> list[float]:
    """A reward for each answer: 1 where Python finds it right. A wrong first answer is told by how much it is off."""
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
