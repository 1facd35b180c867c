"""Seeded generators of a tiny English world: stories, questions, facts, echoes and recall.

Phase 1 fills the slots of its stories uniformly. Phase 2 prefers, for each animal, a few values of
each slot (so that a request for a story has a likely answer), adds "Repeat after me", and has
shorter recall lists.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")
Phase = Literal[1, 2]
Exchange = tuple[str, str]  # what the user says, what the assistant answers

SYSTEM = "You are a helpful assistant."
READ_STORY, HAVE_READ = "Read this story. ", "I have read it."
REMEMBER, WILL_REMEMBER = "Please remember this. ", "I will remember."
GREETING = (
    "Hello! I am a very small model. "
    "I can tell stories, answer simple questions and remember things."
)

# fmt: off
PRONOUNS = {
    "Mia": "she", "Ben": "he", "Lily": "she", "Tom": "he", "Anna": "she", "Sam": "he",
    "Rosa": "she", "Max": "he", "Ella": "she", "Leo": "he", "Nora": "she", "Finn": "he",
    "Ivy": "she", "Omar": "he", "Zoe": "she", "Hugo": "he",
}
PEOPLE = tuple(PRONOUNS)
ANIMALS = ("fox", "bear", "rabbit", "owl", "cat", "dog", "mouse", "duck", "frog", "horse",
           "turtle", "bird")
NATURES = ("small", "old", "clever", "brave", "shy", "friendly", "hungry", "sleepy", "curious",
           "gentle")
PLACES = ("the forest", "the village", "the river", "the garden", "the old house", "the hill",
          "the lake", "the farm", "the market", "the beach")
COLORS = ("red", "blue", "green", "yellow", "white", "black", "golden", "silver", "purple",
          "orange")
THINGS = ("ball", "key", "box", "lamp", "hat", "book", "boat", "bell", "stone", "kite", "cup",
          "basket", "drum", "map")
FOODS = ("apples", "bread", "honey", "cake", "soup", "berries", "cheese", "pears", "nuts",
         "cookies")
HIDING_PLACES = ("under a tree", "behind a rock", "inside a box", "near the water",
                 "under the bed", "on a shelf", "in the tall grass", "behind the door")
WEATHER = ("It was a sunny day.", "It was a cold morning.", "The rain had just stopped.",
           "The wind was soft and warm.", "Snow covered the ground.", "The sun was going down.")
FEELINGS = ("happy", "sad", "tired", "proud", "afraid", "surprised", "calm", "excited")
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo", "Peru": "Lima", "Cuba": "Havana",
    "Kenya": "Nairobi", "India": "New Delhi", "China": "Beijing", "Canada": "Ottawa",
    "Austria": "Vienna", "Poland": "Warsaw", "Portugal": "Lisbon", "Ireland": "Dublin",
    "Finland": "Helsinki", "Sweden": "Stockholm",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "fast": "slow", "day": "night", "old": "new",
    "open": "closed", "happy": "sad", "full": "empty", "light": "dark", "wet": "dry",
    "high": "low", "near": "far", "early": "late", "loud": "quiet", "hard": "soft",
}
SOUNDS = {
    "dog": "barks", "cat": "purrs", "duck": "quacks", "horse": "neighs", "frog": "croaks",
    "owl": "hoots", "bird": "sings", "mouse": "squeaks",
}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
           "eighteen", "nineteen", "twenty")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# fmt: on
ECHO_WORDS = COLORS + THINGS + ANIMALS + PEOPLE


class Choose(Protocol):
    """A way to pick one of a list."""

    def __call__(self, options: Sequence[T], /) -> T: ...


class SkewedChoice:
    """Choose the first values of a list rotated by `key`: each key has its own favourites."""

    def __init__(self, rng: random.Random, key: int) -> None:
        self._rng = rng
        self._key = key
        self._num_choices = 0

    def __call__(self, options: Sequence[T], /) -> T:
        self._num_choices += 1
        start = (self._key * 7 + self._num_choices * 3) % len(options)
        rotated = [*options[start:], *options[:start]]
        return self._rng.choices(rotated, [0.55**i for i in range(len(rotated))])[0]


def chat(question: str, answer: str) -> str:
    return f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>"


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What a story is about."""

    animal: str
    person: str
    nature: str
    place: str
    other_place: str
    color: str
    thing: str
    hiding_place: str
    food: str
    feeling: str

    @property
    def he(self) -> str:
        return PRONOUNS[self.person]

    @property
    def him(self) -> str:
        return "her" if self.he == "she" else "him"

    @property
    def his(self) -> str:
        return "her" if self.he == "she" else "his"

    @property
    def colored_thing(self) -> str:
        return f"{self.color} {self.thing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A story, its two characters, and questions that it answers."""

    text: str
    animal: str
    person: str
    questions: list[Exchange]


Plot = tuple[list[str], list[Exchange]]


def _lost_and_found(s: Slots, choose: Choose) -> Plot:
    with_thing = with_article(s.colored_thing)
    sentences = [
        choose(
            [
                f"{s.person} came to {s.place} with {with_thing}.",
                f"One day {s.person} walked to {s.place} and carried {with_thing}.",
            ]
        ),
        choose([f"But {s.he} lost the {s.thing} on the way.", f"But soon the {s.thing} was gone."]),
        f"{s.person} was sad and asked the {s.animal} for help.",
        f'"Do not worry," said the {s.animal}. "We will look for it together."',
        f"They looked all day. At last they found the {s.colored_thing} {s.hiding_place}.",
        choose(
            [
                f"{s.person} was so {s.feeling} that {s.he} shared {s.his} {s.food} "
                f"with the {s.animal}.",
                f"{s.person} thanked the {s.animal} and gave it some {s.food}.",
            ]
        ),
    ]
    return sentences, [
        (f"Who lost the {s.thing}?", f"{s.person} lost the {s.thing}."),
        (f"Where was the {s.thing}?", f"The {s.thing} was {s.hiding_place}."),
        (f"What color was the {s.thing}?", f"The {s.thing} was {s.color}."),
    ]


def _visit(s: Slots, choose: Choose) -> Plot:
    found = f"found {with_article(s.colored_thing)}"
    sentences = [
        f"One day the {s.animal} went to {s.other_place} to find some {s.food}.",
        f"There it met {s.person}, who was {s.feeling}.",
        f'"Why are you {s.feeling}?" asked the {s.animal}.',
        f'"I {found} {s.hiding_place}," said {s.person}.',
        choose(
            [
                f"The {s.animal} smiled and sat down beside {s.him}.",
                f"The {s.animal} listened and nodded.",
            ]
        ),
        f"They ate {s.food} together and talked until it was dark.",
    ]
    return sentences, [
        (f"Where did the {s.animal} go?", f"The {s.animal} went to {s.other_place}."),
        (f"What did {s.person} find?", f"{s.person} {found}."),
        (f"Who did the {s.animal} meet?", f"The {s.animal} met {s.person}."),
    ]


def _gift(s: Slots, choose: Choose) -> Plot:
    friend = choose([animal for animal in ANIMALS if animal != s.animal])
    number = choose(NUMBERS[2:10])
    extra = choose(["coins", "shells", "flowers"])
    sentences = [
        f"The {s.animal} wanted to give its friend the {friend} a gift.",
        f"So it went to {s.other_place} and asked {s.person}.",
        f'"I have {with_article(s.colored_thing)} and {number} {extra}," said {s.person}. '
        f'"Take the {s.thing}."',
        f"The {s.animal} took the {s.colored_thing} and thanked {s.him}.",
        f"When the {friend} saw the {s.thing}, it was very {s.feeling}.",
        f"That night they shared {s.food} and sang a song.",
    ]
    return sentences, [
        (f"Who got the {s.thing}?", f"The {friend} got the {s.thing}."),
        (f"Who gave the {s.thing} away?", f"{s.person} gave the {s.thing} away."),
        ("What did they share?", f"They shared {s.food}."),
    ]


def _storm(s: Slots, choose: Choose) -> Plot:
    sentences = [
        f"One night there was a big storm, and the {s.animal} was afraid.",
        f"It ran from {s.place} to {s.other_place} and hid {s.hiding_place}.",
        f"{s.person} heard the {s.animal} and came with {with_article(s.color)} lamp.",
        f'"Come home with me," said {s.person}. "It is warm there."',
        f"In the house there was a soft bed and some {s.food}.",
        f"In the morning the sky was {choose(['blue', 'clear', 'bright'])} "
        f"and the {s.animal} felt {s.feeling} again.",
    ]
    return sentences, [
        (f"Where did the {s.animal} hide?", f"The {s.animal} hid {s.hiding_place}."),
        (f"Who helped the {s.animal}?", f"{s.person} helped the {s.animal}."),
        ("What color was the lamp?", f"The lamp was {s.color}."),
    ]


PLOTS: tuple[Callable[[Slots, Choose], Plot], ...] = (_lost_and_found, _visit, _gift, _storm)


def _slots(animal: str, person: str, choose: Choose) -> Slots:
    nature = choose(NATURES)
    place = choose(PLACES)
    return Slots(
        animal=animal,
        person=person,
        nature=nature,
        place=place,
        other_place=choose([other for other in PLACES if other != place]),
        color=choose(COLORS),
        thing=choose(THINGS),
        hiding_place=choose(HIDING_PLACES),
        food=choose(FOODS),
        feeling=choose(FEELINGS),
    )


def story(
    rng: random.Random, *, animal: str | None = None, person: str | None = None, skew: bool = False
) -> Story:
    """Draw a story; `skew` prefers the favourites of its animal."""
    animal = animal or rng.choice(ANIMALS)
    choose: Choose = SkewedChoice(rng, ANIMALS.index(animal)) if skew else rng.choice
    s = _slots(animal, person or choose(PEOPLE), choose)
    plot = choose(PLOTS)
    one = with_article(s.nature) + f" {animal}"
    opening = choose(
        [
            f"Once upon a time there was {one}. The {animal} lived near {s.place}.",
            f"Once there lived {one} near {s.place}.",
            f"Long ago, {one} made a home near {s.place}.",
        ]
    )
    weather = choose(WEATHER)
    sentences, questions = plot(s, choose)
    ending = choose(
        [
            f"From that day on, {s.person} and the {animal} were good friends.",
            f"And so {s.person} and the {animal} became friends.",
            "They all slept well that night.",
        ]
    )
    return Story(
        text=" ".join([opening, weather, *sentences, ending, "The end."]),
        animal=animal,
        person=s.person,
        questions=[
            (f"Where did the {animal} live?", f"The {animal} lived near {s.place}."),
            *questions,
        ],
    )


def fact(rng: random.Random) -> Exchange:
    """Draw a question from a closed set, and its answer."""
    match rng.randrange(8):
        case 0 | 1:
            country = rng.choice(list(CAPITALS))
            return (
                f"What is the capital of {country}?",
                f"The capital of {country} is {CAPITALS[country]}.",
            )
        case 2:
            word = rng.choice(list(OPPOSITES))
            other = OPPOSITES[word]
            if rng.random() < 0.5:
                word, other = other, word
            return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
        case 3:
            animal = with_article(rng.choice(list(SOUNDS)))
            sound = SOUNDS[animal.split()[1]]
            return f"What sound does {animal} make?", f"{animal.capitalize()} {sound}."
        case 4:
            a, b = rng.randint(0, 10), rng.randint(0, 10)
            total = f"{NUMBERS[a]} plus {NUMBERS[b]}"
            return f"What is {total}?", f"{total.capitalize()} is {NUMBERS[a + b]}."
        case 5:
            day_idx = rng.randrange(7)
            day, following = DAYS[day_idx], DAYS[(day_idx + 1) % 7]
            return f"What day comes after {day}?", f"The day after {day} is {following}."
        case 6:
            first, count = rng.randint(1, 12), rng.randint(3, 8)
            question = f"Count {NUMBERS[count]} numbers from {NUMBERS[first]}."
            return question, ", ".join(NUMBERS[first : first + count]) + "."
        case _:
            return rng.choice(["Hello!", "Hi!", "Good morning!", "Hello there!"]), GREETING


def echo(rng: random.Random, num_words: int) -> Exchange:
    """Draw `num_words` words to be repeated."""
    words = " ".join(rng.choice(ECHO_WORDS) for _ in range(num_words))
    return f"Repeat after me: {words}.", f"{words}."


def recall(rng: random.Random, num_people: int) -> tuple[str, list[Exchange]]:
    """Draw what `num_people` people have: the text to remember, and one question for each.

    Raises:
        ValueError: more people than the world has.
    """
    if num_people > len(PEOPLE):
        raise ValueError(f"num_people is {num_people}, but the world has {len(PEOPLE)} people")
    people = rng.sample(PEOPLE, num_people)
    has = [f"{name} has the {rng.choice(COLORS)} {rng.choice(THINGS)}." for name in people]
    questions = [f"What does {name} have?" for name in people]
    return REMEMBER + " ".join(has), list(zip(questions, has, strict=True))


def _chats(exchanges: Sequence[Exchange]) -> str:
    return "".join(chat(question, answer) for question, answer in exchanges)


def _ask_for_animal(rng: random.Random, tale: Story) -> str:
    one = with_article(tale.animal)
    return rng.choice(
        [
            f"Tell me a story about {one}.",
            f"Please tell me a story about {one}.",
            f"Write a short story about {one}.",
        ]
    )


def ask_for_both(rng: random.Random, person: str, animal: str) -> str:
    """Draw a request for a story about two characters."""
    both = f"{person} and {with_article(animal)}"
    return rng.choice([f"Tell me a story about {both}.", f"Write a story about {both}."])


def _ask_for_any(rng: random.Random) -> str:
    return rng.choice(["Tell me a story.", "Please tell me a story."])


def _requested_story_phase1(rng: random.Random) -> str:
    tale = story(rng)
    kind = rng.random()
    if kind < 0.3:
        request = _ask_for_animal(rng, tale)
    elif kind < 0.45:
        request = ask_for_both(rng, tale.person, tale.animal)
    elif kind < 0.5:
        request = _ask_for_any(rng)
    else:
        return tale.text
    questions = rng.sample(tale.questions, 2) if rng.random() < 0.6 else []
    return chat(request, tale.text) + _chats(questions)


def _requested_story_phase2(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        tale = story(rng, person=rng.choice(PEOPLE), skew=True)
        request = ask_for_both(rng, tale.person, tale.animal)
    elif kind < 0.8:
        tale = story(rng, skew=True)
        request = _ask_for_animal(rng, tale)
    elif kind < 0.9:
        # "Tell me a story." names no animal: a fixed one gives it a likely answer.
        tale = story(rng, animal="fox", skew=True)
        request = _ask_for_any(rng)
    else:
        return story(rng, skew=True).text
    questions = rng.sample(tale.questions, 2) if rng.random() < 0.5 else []
    return chat(request, tale.text) + _chats(questions)


def _read_story(rng: random.Random) -> str:
    tale = story(rng)
    return chat(READ_STORY + tale.text, HAVE_READ) + _chats(rng.sample(tale.questions, 3))


def _facts(rng: random.Random) -> str:
    return _chats([fact(rng) for _ in range(rng.randint(1, 4))])


def _echoes(rng: random.Random) -> str:
    return _chats([echo(rng, rng.randint(2, 10)) for _ in range(rng.randint(1, 3))])


def _recall(rng: random.Random, num_people: int) -> str:
    text, questions = recall(rng, num_people)
    asked = rng.sample(questions, min(3, num_people))
    return chat(text, WILL_REMEMBER) + _chats(asked)


def _body_phase1(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.40:
        return _requested_story_phase1(rng)
    if kind < 0.55:
        return _read_story(rng)
    if kind < 0.80:
        return _facts(rng)
    return _recall(rng, rng.randint(2, 10))


def _body_phase2(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.30:
        return _requested_story_phase2(rng)
    if kind < 0.45:
        return _read_story(rng)
    if kind < 0.58:
        return _facts(rng)
    if kind < 0.78:
        return _echoes(rng)
    return _recall(rng, rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 8, 10]))


def documents(phase: Phase, seed: int, count: int) -> Iterator[str]:
    """Yield `count` training texts of `phase`, the same ones for the same seed."""
    rng = random.Random(seed)
    body = _body_phase1 if phase == 1 else _body_phase2
    for _ in range(count):
        text = body(rng)
        has_system = text.startswith("<|user|>") and rng.random() < 0.15
        yield f"<|system|>{SYSTEM}<|end|>{text}" if has_system else text
