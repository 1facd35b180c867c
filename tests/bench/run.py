"""Compare Plait with transformers on this machine: `make bench`.

Both run the demo model in float32 in one process with the same threads, in turns, several rounds
after a warm-up. Ratios above 1 mean that Plait is faster. Prints a table, writes JSON lines with
--json. Absolute times mean little on a shared machine; the ratios are taken round by round.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from plait.cluster.llm import LLM, SamplingParams
from plait.deploy.demo import demo_model_path

ROUNDS = 5
NUM_DECODE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch of prompts of one length, continued by so many tokens."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int


CASES = (
    Case(name="prefill 512", batch=1, prompt_tokens=512, new_tokens=1),
    Case(name="prefill 2048", batch=1, prompt_tokens=2048, new_tokens=1),
    Case(name="decode batch 1", batch=1, prompt_tokens=16, new_tokens=NUM_DECODE),
    Case(name="decode batch 8", batch=8, prompt_tokens=16, new_tokens=NUM_DECODE),
    Case(name="decode batch 32", batch=32, prompt_tokens=16, new_tokens=NUM_DECODE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds of each side over the rounds, and the ratio peer / Plait round by round."""

    case: Case
    plait_s: list[float]
    peer_s: list[float]

    @property
    def ratios(self) -> list[float]:
        return [peer / ours for peer, ours in zip(self.peer_s, self.plait_s, strict=True)]

    @property
    def tokens(self) -> int:
        case = self.case
        return case.batch * (case.prompt_tokens if case.new_tokens == 1 else case.new_tokens)


def prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.prompt_tokens)
    return torch.randint(10, 1000, shape, generator=generator).tolist()


def measure(case: Case, llm: LLM, peer: torch.nn.Module) -> Result:
    """Both sides in turns; the first round of each is the warm-up and is not counted."""
    batch = prompts(case)
    params = SamplingParams(temperature=0, max_tokens=case.new_tokens, ignore_eos=True)
    inputs = torch.tensor(batch)

    def ours() -> None:
        llm.generate(batch, params)

    def theirs() -> None:
        with torch.inference_mode():
            peer.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=case.new_tokens,
                min_new_tokens=case.new_tokens,
                do_sample=False,
            )

    plait_s, peer_s = [], []
    for round_ in range(ROUNDS + 1):
        times = _seconds(ours), _seconds(theirs)
        if round_:
            plait_s.append(times[0])
            peer_s.append(times[1])
    return Result(case=case, plait_s=plait_s, peer_s=peer_s)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also append JSON lines to this file")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = str(demo_model_path())
    peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": options.threads,
    }
    print(json.dumps(machine))
    print(f"{'case':18}{'plait tok/s':>13}{'transformers tok/s':>20}{'ratio':>8}   range")
    with LLM(path, dtype="float32", max_model_len=4096) as llm:
        for case in CASES:
            result = measure(case, llm, peer)
            ratios = result.ratios
            print(
                f"{case.name:18}"
                f"{result.tokens / statistics.median(result.plait_s):13.0f}"
                f"{result.tokens / statistics.median(result.peer_s):20.0f}"
                f"{statistics.median(ratios):8.2f}   {min(ratios):.2f}-{max(ratios):.2f}"
            )
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(machine | asdict(result)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
