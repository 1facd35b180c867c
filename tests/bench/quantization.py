"""What 8-bit weights cost in accuracy: `python tests/bench/quantization.py CHECKPOINT ...`.

Without arguments the demo model is measured on documents of its own kind that it was not trained
on. Any other checkpoint is measured on random tokens, which is a harder test than text: nothing is
likely. Both runs are teacher-forced over the same tokens; the table says how the loss changes, how
often the likeliest token stays the same, and how far the distributions are apart.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from plait_testing.driver import RankDriver

from plait.cluster.executors.inline import InlineExecutor
from plait.cluster.tokenizer import Tokenizer
from plait.deploy.demo import demo_model_path
from plait.deploy.make_demo_model.corpus import documents
from plait.worker.dtypes import CacheDtypes

HELD_OUT_SEED = 990_001
SEQUENCES = 24
LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Means over all positions; loss and divergence in nats."""

    loss: float
    quantized_loss: float
    same_choice: float
    divergence: float


def measure(path: str, sequences: list[list[int]]) -> Accuracy:
    """Compare bfloat16 weights with their 8-bit form over `sequences`."""
    plain = _log_probs(path, sequences, quantized=False)
    quantized = _log_probs(path, sequences, quantized=True)
    targets = [torch.tensor(tokens[1:]) for tokens in sequences]

    def loss(values: list[torch.Tensor]) -> float:
        chosen = [v[:-1].gather(1, t[:, None]) for v, t in zip(values, targets, strict=True)]
        return -torch.cat(chosen).mean().item()

    same = [p.argmax(1) == q.argmax(1) for p, q in zip(plain, quantized, strict=True)]
    apart = [(p.exp() * (p - q)).sum(1) for p, q in zip(plain, quantized, strict=True)]
    return Accuracy(
        loss=loss(plain),
        quantized_loss=loss(quantized),
        same_choice=torch.cat(same).double().mean().item(),
        divergence=torch.cat(apart).mean().item(),
    )


def _log_probs(path: str, sequences: list[list[int]], *, quantized: bool) -> list[torch.Tensor]:
    driver = RankDriver(
        InlineExecutor(device="cpu"),
        path,
        dtype="bfloat16",
        dtypes=CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32"),
        max_num_seqs=2,
        max_model_len=LENGTH,
        debug_poison=False,
        quantization="int8" if quantized else None,
    )
    results = []
    for index, tokens in enumerate(sequences):
        name = str(index)
        results.append(driver.feed({name: tokens})[name].float().log_softmax(dim=1))
        driver.end(name)
    return results


def demo_sequences() -> list[list[int]]:
    """Documents like those that the demo model learned from, of another seed."""
    tokenizer = Tokenizer(demo_model_path())
    texts = documents(2, HELD_OUT_SEED, SEQUENCES)
    return [tokenizer.encode(text)[:LENGTH] for text in texts]


def random_sequences(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, LENGTH)
    tokens: list[list[int]] = torch.randint(3, vocab_size, shape, generator=generator).tolist()
    return tokens


def table(rows: Iterator[tuple[str, Accuracy]]) -> str:
    lines = [
        "| model | loss, bfloat16 | loss, int8 | change | same likeliest token | divergence |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, accuracy in rows:
        change = accuracy.quantized_loss - accuracy.loss
        lines.append(
            f"| {name} | {accuracy.loss:.4f} | {accuracy.quantized_loss:.4f} | {change:+.4f} "
            f"| {accuracy.same_choice:.2%} | {accuracy.divergence:.2e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="*", help="folders; random tokens are fed to them")
    options = parser.parse_args()

    def rows() -> Iterator[tuple[str, Accuracy]]:
        yield "demo model", measure(str(demo_model_path()), demo_sequences())
        for path in options.checkpoint:
            yield Path(path).name, measure(path, random_sequences(30_000))

    print(table(rows()))


if __name__ == "__main__":
    main()
