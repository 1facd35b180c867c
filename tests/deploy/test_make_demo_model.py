import json
import os
import random
import subprocess
import sys
from itertools import pairwise

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is first imported

import pytest
import torch
import transformers
from click.testing import CliRunner

from plait.deploy.demo import demo_model_path
from plait.deploy.make_demo_model import evaluate
from plait.deploy.make_demo_model.__main__ import main
from plait.deploy.make_demo_model.corpus import documents, recall
from plait.deploy.make_demo_model.ssd import chunked_forward, ssd
from plait.deploy.make_demo_model.train import (
    full_recipe,
    learning_rate,
    loss_weights,
    smoke_recipe,
)


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    command = [sys.executable, "-m", "plait.deploy.make_demo_model", "--smoke", "--out", folder]
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def test_smoke_run_makes_the_loss_fall(smoke_run):
    first, second = json.loads((smoke_run / "train_log.json").read_text())["phases"]
    assert first["losses"][-1] < first["losses"][0] / 2
    assert sum(second["losses"][-5:]) < sum(second["losses"][:5])
    assert second["held_out_loss"] < first["losses"][0] / 2


def test_smoke_run_makes_a_checkpoint_that_generates(smoke_run):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smoke_run)
    model = transformers.GraniteMoeHybridForCausalLM.from_pretrained(smoke_run)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert ids.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_smoke_run_writes_the_config_of_the_shipped_model(smoke_run, name):
    made, shipped = (
        json.loads((folder / name).read_text()) for folder in (smoke_run, demo_model_path())
    )
    for config in (made, shipped):
        config.pop("transformers_version", None)
    assert made == shipped


def test_smoke_run_writes_the_shipped_chat_template(smoke_run):
    made, shipped = (
        (folder / "chat_template.jinja").read_text() for folder in (smoke_run, demo_model_path())
    )
    assert made == shipped


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not an empty folder: name a new one" in result.output
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_full_recipe_is_the_budget_of_the_model_card():
    recipe = full_recipe()
    num_steps = [phase.num_steps for phase in recipe.phases]
    assert round(sum(num_steps) * recipe.batch * recipe.length / 1e6, 2) == 5.85
    assert num_steps[0] / num_steps[1] == pytest.approx(14 / 11, abs=1e-3)


@pytest.mark.parametrize("make_recipe", [full_recipe, smoke_recipe])
def test_step_counts_can_be_chosen(make_recipe):
    recipe = make_recipe(num_steps_phase1=3, num_steps_phase2=4)
    assert [phase.num_steps for phase in recipe.phases] == [3, 4]


def test_learning_rate_warms_up_stays_and_falls():
    recipe = full_recipe()
    rates = [learning_rate(step, 1000, recipe=recipe) for step in range(1000)]
    assert all(a < b for a, b in pairwise(rates[:60]))
    assert set(rates[60:300]) == {recipe.peak_lr}
    assert all(a > b for a, b in pairwise(rates[300:]))
    assert rates[-1] == pytest.approx(0.05 * recipe.peak_lr, rel=0.05)


def test_only_the_words_of_a_user_are_weighted_down():
    bos, user, assistant, system, end, word = 1, 3, 4, 5, 6, 300
    turns = [bos, system, word, end, user, word, word, end, assistant, word, end, user, word]
    weights = loss_weights(torch.tensor(turns), 0.25)
    assert weights.tolist() == [1, 1, 1, 1, 1, 0.25, 0.25, 1, 1, 1, 1, 1, 0.25]


def _scan_by_token(x, dt, a, b, c):
    repeats = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(repeats, 2), c.repeat_interleave(repeats, 2)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3])  # (B, H, P, N)
    outputs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = state * (dt[:, t] * a).exp()[..., None, None] + added
        outputs.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    ("length", "groups"),
    [
        pytest.param(32, 1, id="base"),
        pytest.param(1, 1, id="one-token"),
        pytest.param(15, 1, id="one-under-a-chunk"),
        pytest.param(16, 1, id="a-chunk"),
        pytest.param(17, 1, id="one-over-a-chunk"),
        pytest.param(32, 2, id="two-groups"),
    ],
)
def test_chunked_scan_is_the_scan_by_token(length, groups):
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    x, dt, a = normal(2, length, 4, 8), normal(2, length, 4).exp(), -normal(4).exp()
    b, c = normal(2, length, groups, 6), normal(2, length, groups, 6)
    # Both sums run in float64 over at most 32 tokens: only rounding separates them.
    torch.testing.assert_close(
        ssd(x, dt, a, b, c, chunk=16), _scan_by_token(x, dt, a, b, c), rtol=1e-10, atol=1e-10
    )


def test_training_forward_is_that_of_transformers():
    model = transformers.GraniteMoeHybridForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32
    ).eval()
    ids = torch.randint(0, 1024, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with chunked_forward(model, chunk=32):
            chunked = model(input_ids=ids, use_cache=False).logits
        restored = model(input_ids=ids, use_cache=False).logits
    # Logits reach 20 and pass through 6 layers in float32.
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(restored, expected)


@pytest.mark.parametrize("phase", [1, 2])
def test_documents_follow_from_the_seed_alone(phase):
    texts = list(documents(phase, 3, 200))
    assert texts == list(documents(phase, 3, 200))
    assert texts != list(documents(phase, 4, 200))


def test_only_phase_2_has_echoes():
    for phase, has_echoes in ((1, False), (2, True)):
        texts = "".join(documents(phase, 3, 200))
        assert ("Repeat after me: " in texts) == has_echoes


def test_prompts_have_the_form_of_training_texts():
    def render(task):
        turns = [f"<|{m['role']}|>{m['content']}<|end|>" for m in task.messages]
        return "".join(turns) + f"<|assistant|>{task.expected}<|end|>"

    # Short recall and facts are few enough that training texts hold these very prompts.
    texts = set(documents(2, 1, 20_000))
    assert any(render(task) in texts for task in evaluate.fact_prompts(40, seed=7))
    recalled = evaluate.recall_prompts(1, 400, seed=7)
    assert any(render(task) in texts for task in recalled)


def test_scores_count_right_answers_only():
    tasks = evaluate.repeat_prompts(3, 4, seed=7)
    answers = {task.messages[0]["content"]: task.expected for task in tasks}
    right = evaluate.score(lambda prompts: [answers[p[0]["content"]] for p in prompts], tasks)
    wrong = evaluate.score(lambda prompts: ["ball." for _ in prompts], tasks)
    assert (str(right), str(wrong)) == ("4/4", "0/4")


def test_a_story_must_mention_both_characters():
    task = evaluate.story_prompts(1, seed=7)[0]
    person, animal = task.mentions
    assert task.check(f"{person} met the {animal}.")
    assert not task.check(f"{person} was alone.")


def test_a_missing_reply_is_refused():
    with pytest.raises(ValueError, match="4 prompts got 1 replies"):
        evaluate.score(lambda _: ["ball."], evaluate.repeat_prompts(3, 4, seed=7))


def test_more_people_than_the_world_has_are_refused():
    with pytest.raises(ValueError, match="num_people is 17, but the world has 16 people"):
        evaluate.recall_prompts(17, 1, seed=7)


def test_all_people_can_be_recalled():
    text, questions = recall(random.Random(7), 16)
    assert len({question for question, _ in questions}) == 16
    assert all(answer in text for _, answer in questions)


def test_evaluate_scores_each_ability_of_the_model_card():
    scores = evaluate.evaluate(lambda prompts: ["" for _ in prompts], seed=7)
    assert {name: score.num_tasks for name, score in scores.items()} == {
        "facts": 40,
        "story questions": 40,
        **{f"repeat {num} words": 25 for num in (3, 6, 10, 20)},
        **{f"recall 1 of {num}": 25 for num in (3, 6, 10, 16)},
        "story names both": 20,
    }
    assert all(score.num_right == 0 for score in scores.values())


def test_prompts_and_scores_need_no_torch():
    code = (
        "import sys, plait.deploy.make_demo_model.evaluate, plait.deploy.demo; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
