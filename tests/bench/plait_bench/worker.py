"""The process of an engine: loads once, then answers commands, a JSON object per line.

`python -m plait_bench.worker MODULE OPTIONS`. The first line that it writes is
{"versions": {...}} or {"error": "..."}; then each command gets one line back:

    {"op": "time", "case": {...}, "prompts": [[...]]}      {"first_token_s": x, "decode_s": y}
    {"op": "greedy", "prompt": [...], "num_tokens": n}     {"tokens": [...]}
    any other op: the method of the engine of that name    what it returns

An error is answered as {"error": "Type: text"}; the process then waits for the next command. It
ends when its input does. Standard library only.
"""

import ctypes
import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO, Any, Protocol

from plait_bench.cases import Case, EngineOptions, Timing, to_json

Reply = Mapping[str, Any]
_PR_SET_PDEATHSIG = 1


class BenchEngine(Protocol):
    """What a module of `plait_bench.engines` creates."""

    versions: dict[str, str]

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        """Run the case once."""

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The likeliest continuation of a prompt."""


def use_first_cores(count: int) -> None:
    """Bind this process to the first `count` of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise ValueError(f"--threads: {count} were asked for, {len(cores)} cores are there")
    os.sched_setaffinity(0, cores[:count])


def end_with_parent() -> None:
    """Have this process killed when its parent is gone, also while it loads or compiles."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def answer(engine: BenchEngine, command: Mapping[str, Any]) -> Reply:
    """Carry one command out."""
    arguments = dict(command)
    op = arguments.pop("op")
    if op == "time":
        return to_json(engine.time(Case(**arguments["case"]), arguments["prompts"]))
    if op == "greedy":
        return {"tokens": engine.greedy(arguments["prompt"], arguments["num_tokens"])}
    reply: Reply = getattr(engine, op)(**arguments)
    return reply


def serve(create: Callable[[], BenchEngine], commands: IO[str], replies: IO[str]) -> None:
    """Load, then answer until the commands end."""

    def reply(work: Callable[[], Reply]) -> bool:
        try:
            line, succeeded = dict(work()), True
        except Exception as exc:
            traceback.print_exc()
            text = " ".join(str(exc).split())
            line, succeeded = {"error": f"{type(exc).__name__}: {text[-500:]}"}, False
        replies.write(json.dumps(line) + "\n")
        replies.flush()
        return succeeded

    engines: list[BenchEngine] = []

    def load() -> Reply:
        engines.append(create())
        return {"versions": engines[0].versions}

    if not reply(load):
        return
    for line in commands:
        reply(functools.partial(answer, engines[0], json.loads(line)))


def main() -> None:
    module, options = sys.argv[1], EngineOptions(**json.loads(sys.argv[2]))
    end_with_parent()
    # Libraries print: only replies may go to the pipe.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    use_first_cores(options.threads * options.tensor_parallel_size)

    def create() -> BenchEngine:
        engine: BenchEngine = import_module(module).create(options)
        return engine

    serve(create, sys.stdin, replies)


if __name__ == "__main__":
    main()
