"""Scores of what the demo model can do, for anything that answers chats.

The prompts have the forms of the training texts. Scores are meant for greedy decoding.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.deploy.make_demo_model import corpus

MAX_NEW_TOKENS = 200  # no right answer, a story included, is longer

Messages = list[dict[str, str]]
Generate = Callable[[Sequence[Messages]], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A chat to be answered, and what makes its answer right.

    Args:
        messages: the chat up to and with the last user message.
        expected: the whole right answer; empty where any answer with `mentions` is right.
        mentions: words that the answer must contain.
    """

    messages: Messages
    expected: str = ""
    mentions: tuple[str, ...] = ()

    def check(self, text: str) -> bool:
        """Whether `text`, a reply without special tokens, is right."""
        if self.expected and text.strip() != self.expected:
            return False
        return all(word in text for word in self.mentions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How many of the tasks of one ability were answered rightly."""

    num_right: int
    num_tasks: int

    def __str__(self) -> str:
        return f"{self.num_right}/{self.num_tasks}"


def _chat(*turns: str) -> Messages:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def fact_prompts(count: int, seed: int) -> list[Task]:
    """Questions from the closed set of facts, which was seen in training."""
    rng = random.Random(seed)
    facts = [corpus.fact(rng) for _ in range(count)]
    return [Task(messages=_chat(question), expected=answer) for question, answer in facts]


def story_question_prompts(count: int, seed: int) -> list[Task]:
    """One question each about a story that the prompt holds."""
    rng = random.Random(seed)
    tasks = []
    for _ in range(count):
        tale = corpus.story(rng)
        question, answer = rng.choice(tale.questions)
        messages = _chat(corpus.READ_STORY + tale.text, corpus.HAVE_READ, question)
        tasks.append(Task(messages=messages, expected=answer))
    return tasks


def repeat_prompts(num_words: int, count: int, seed: int) -> list[Task]:
    """`num_words` words to be repeated; training had 2 to 10 of them."""
    rng = random.Random(seed)
    echoes = [corpus.echo(rng, num_words) for _ in range(count)]
    return [Task(messages=_chat(request), expected=answer) for request, answer in echoes]


def recall_prompts(num_people: int, count: int, seed: int) -> list[Task]:
    """What one of `num_people` people has; training had 1 to 10 of them, the world has 16.

    Raises:
        ValueError: more people than the world has.
    """
    rng = random.Random(seed)
    tasks = []
    for _ in range(count):
        text, questions = corpus.recall(rng, num_people)
        question, answer = rng.choice(questions)
        messages = _chat(text, corpus.WILL_REMEMBER, question)
        tasks.append(Task(messages=messages, expected=answer))
    return tasks


def story_prompts(count: int, seed: int) -> list[Task]:
    """Requests for a story about two characters, both of which it must name."""
    rng = random.Random(seed)
    tasks = []
    for _ in range(count):
        person, animal = rng.choice(corpus.PEOPLE), rng.choice(corpus.ANIMALS)
        messages = _chat(corpus.ask_for_both(rng, person, animal))
        tasks.append(Task(messages=messages, mentions=(person, animal)))
    return tasks


def score(generate: Generate, tasks: Sequence[Task]) -> Score:
    """Answer all `tasks` in one call of `generate` and count the right replies.

    Raises:
        ValueError: `generate` returned another number of replies.
    """
    replies = generate([task.messages for task in tasks])
    if len(replies) != len(tasks):
        raise ValueError(f"{len(tasks)} prompts got {len(replies)} replies: one each is needed")
    num_right = sum(task.check(reply) for task, reply in zip(tasks, replies, strict=True))
    return Score(num_right=num_right, num_tasks=len(tasks))


def abilities(seed: int) -> dict[str, list[Task]]:
    """The tasks behind the table of the model card, by the name of the ability."""
    tasks = {
        "facts": fact_prompts(40, seed),
        "story questions": story_question_prompts(40, seed),
    }
    tasks |= {f"repeat {num} words": repeat_prompts(num, 25, seed) for num in (3, 6, 10, 20)}
    tasks |= {f"recall 1 of {num}": recall_prompts(num, 25, seed) for num in (3, 6, 10, 16)}
    tasks["story names both"] = story_prompts(20, seed)
    return tasks


def evaluate(generate: Generate, seed: int) -> dict[str, Score]:
    """The score of each ability on the prompts of `seed`."""
    return {name: score(generate, tasks) for name, tasks in abilities(seed).items()}
