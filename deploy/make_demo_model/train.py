"""Training of the demo model: two phases of fixed step counts on one CPU core."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GraniteMoeHybridForCausalLM

from plait.deploy.make_demo_model import checkpoint
from plait.deploy.make_demo_model.corpus import Phase, documents
from plait.deploy.make_demo_model.ssd import chunked_forward

TRAIN_SEED, HELD_OUT_SEED = 1, 999
NUM_TOKENIZER_DOCUMENTS = 8000
WEIGHT_DECAY = 0.05
LAST_LR_SHARE = 0.05  # of the peak, reached with the last step of a phase
DECAY_START = 0.3  # share of a phase's steps at the peak

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecipe:
    """One phase of training.

    Args:
        user_weight: the weight of the loss on the user's words; 1 for all other tokens.
    """

    phase: Phase
    num_steps: int
    num_documents: int
    user_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a training run depends on; `length` and `chunk` are in tokens."""

    phases: tuple[PhaseRecipe, ...]
    batch: int
    length: int
    chunk: int
    peak_lr: float
    num_warmup_steps: int
    num_held_out_documents: int
    num_held_out_windows: int
    report_every: int
    seed: int


def full_recipe(num_steps_phase1: int = 1600, num_steps_phase2: int = 1257) -> Recipe:
    """The recipe of the shipped model: 5.85 M tokens, as 14 to 11 between the phases."""
    return Recipe(
        phases=(
            PhaseRecipe(phase=1, num_steps=num_steps_phase1, num_documents=30_000, user_weight=1.0),
            PhaseRecipe(phase=2, num_steps=num_steps_phase2, num_documents=26_000, user_weight=0.2),
        ),
        batch=8,
        length=256,
        chunk=32,
        peak_lr=4e-3,
        num_warmup_steps=60,
        num_held_out_documents=300,
        num_held_out_windows=200,
        report_every=50,
        seed=0,
    )


def smoke_recipe(num_steps_phase1: int = 30, num_steps_phase2: int = 20) -> Recipe:
    """A run of seconds through every part of the real one, for a model that cannot talk."""
    return Recipe(
        phases=(
            PhaseRecipe(phase=1, num_steps=num_steps_phase1, num_documents=2000, user_weight=1.0),
            PhaseRecipe(phase=2, num_steps=num_steps_phase2, num_documents=500, user_weight=0.2),
        ),
        batch=4,
        length=128,
        chunk=32,
        peak_lr=4e-3,
        num_warmup_steps=10,
        num_held_out_documents=30,
        num_held_out_windows=8,
        report_every=10,
        seed=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLog:
    """What a phase reached.

    Args:
        losses: nats per token of each step's batch, weighted as in training.
        held_out_loss: nats per token after the last step, unweighted, before rounding to bf16.
    """

    phase: Phase
    num_tokens: int
    losses: list[float]
    held_out_loss: float


def learning_rate(step: int, num_steps: int, *, recipe: Recipe) -> float:
    """Linear warm-up, a plateau, then a linear decay."""
    warmup = min(1.0, (step + 1) / recipe.num_warmup_steps)
    done = max(0.0, step / num_steps - DECAY_START) / (1 - DECAY_START)
    return recipe.peak_lr * warmup * (1 - (1 - LAST_LR_SHARE) * done)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """All `texts` as one row of token ids, each between its bos and eos."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return torch.tensor(
        [
            token
            for encoding in encodings
            for token in (checkpoint.BOS, *encoding.ids, checkpoint.EOS)
        ]
    )


def loss_weights(tokens: Tensor, user_weight: float) -> Tensor:
    """1 for each token, `user_weight` for the words of a user; the end of a turn is no word."""
    weights = []
    is_user = False
    for token in tokens.tolist():
        weights.append(user_weight if is_user and token != checkpoint.END else 1.0)
        if token in (checkpoint.BOS, checkpoint.ASSISTANT, checkpoint.SYSTEM, checkpoint.END):
            is_user = False
        elif token == checkpoint.USER:
            is_user = True
    return torch.tensor(weights)


def _loss(
    model: GraniteMoeHybridForCausalLM, windows: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Mean loss of `windows`, (B, L + 1), weighted by `weights` of the same shape."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none"
    )
    if weights is None:
        return losses.mean()
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def _optimizer(model: GraniteMoeHybridForCausalLM, lr: float) -> torch.optim.AdamW:
    """AdamW that decays the matrices of the layers, not the embedding, norms or SSM parameters."""
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed" not in name
        (decayed if is_matrix else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def _held_out_loss(model: GraniteMoeHybridForCausalLM, tokens: Tensor, *, recipe: Recipe) -> float:
    num_windows = len(tokens) // recipe.length
    windows = tokens[: num_windows * recipe.length].view(num_windows, recipe.length)
    model.eval()
    with torch.no_grad():
        loss = _loss(model, windows[: recipe.num_held_out_windows]).item()
    model.train()
    return loss


def _train_phase(
    model: GraniteMoeHybridForCausalLM,
    tokenizer: Tokenizer,
    *,
    phase: PhaseRecipe,
    recipe: Recipe,
    report: Report,
) -> PhaseLog:
    """Train `model` in place on one phase's documents."""
    texts = list(documents(phase.phase, TRAIN_SEED, phase.num_documents))
    tokens = encode(tokenizer, texts)
    weights = loss_weights(tokens, phase.user_weight)
    optimizer = _optimizer(model, recipe.peak_lr)
    generator = torch.Generator().manual_seed(recipe.seed)
    losses: list[float] = []
    model.train()
    for step in range(phase.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, phase.num_steps, recipe=recipe)
        last_start = len(tokens) - recipe.length - 1
        starts = torch.randint(0, last_start, (recipe.batch,), generator=generator)
        index = starts[:, None] + torch.arange(recipe.length + 1)  # (B, L + 1)
        loss = _loss(model, tokens[index], weights[index])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % recipe.report_every == 0:
            report(f"phase {phase.phase}, step {step + 1}/{phase.num_steps}: loss {losses[-1]:.3f}")
    held_out = list(documents(phase.phase, HELD_OUT_SEED, recipe.num_held_out_documents))
    return PhaseLog(
        phase=phase.phase,
        num_tokens=phase.num_steps * recipe.batch * recipe.length,
        losses=losses,
        held_out_loss=_held_out_loss(model, encode(tokenizer, held_out), recipe=recipe),
    )


def train(recipe: Recipe, folder: Path, *, report: Report = print) -> list[PhaseLog]:
    """Train by `recipe` and write a checkpoint and `train_log.json` into `folder`.

    Seeds torch's global generator. The run depends on the recipe, the versions of torch and
    tokenizers, the machine and the number of threads, not on the time of day.
    """
    torch.manual_seed(recipe.seed)
    first = recipe.phases[0]
    num_documents = min(NUM_TOKENIZER_DOCUMENTS, first.num_documents)
    tokenizer = checkpoint.train_tokenizer(list(documents(first.phase, TRAIN_SEED, num_documents)))
    model = checkpoint.new_model()
    logs = []
    with chunked_forward(model, chunk=recipe.chunk):
        for phase in recipe.phases:
            log = _train_phase(model, tokenizer, phase=phase, recipe=recipe, report=report)
            report(f"phase {log.phase}: held-out loss {log.held_out_loss:.4f} nats per token")
            logs.append(log)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save_checkpoint(model, tokenizer, folder)
    record = {"recipe": asdict(recipe), "phases": [asdict(log) for log in logs]}
    (folder / "train_log.json").write_text(json.dumps(record, indent=2) + "\n")
    return logs
