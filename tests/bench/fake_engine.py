"""An engine without a model, for tests of the protocol."""

import os

from plait_bench.cases import Case, EngineOptions, Timing


class FakeEngine:
    """Times are made of the case; a batch of 13 fails, one of 14 ends the process."""

    def __init__(self, options: EngineOptions) -> None:
        if options.dtype == "unknown":
            raise ValueError("dtype: unknown is\nnot known")
        print("a library prints to standard output", flush=True)
        self.versions = {"fake": options.dtype}

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        if case.batch == 13:
            raise RuntimeError("thirteen")
        if case.batch == 14:
            os._exit(3)
        return Timing(first_token_s=float(sum(map(len, prompts))), decode_s=float(case.num_steps))

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        return prompt[-1:] * num_tokens

    def cores(self) -> dict[str, int]:
        return {"cores": len(os.sched_getaffinity(0))}


def create(options: EngineOptions) -> FakeEngine:
    return FakeEngine(options)
