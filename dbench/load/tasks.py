"""Problems whose answers can be checked: what the embedded model is trained on and asked.

Every problem is a short prompt in plain ASCII and one right answer on one line. Where several answers would be right
the wording settles which one is meant: differences are never negative (the larger number comes first), items of a
list are separated by a comma and a space. A prompt belongs to the held-out tenth by its own hash, so training and
evaluation never share one, whatever seeds they draw with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from dbench.errors import TraceError, unknown_name


def split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MAX_PROMPT_BYTES = 137
MAX_ANSWER_BYTES = 60
HELD_OUT_ONE_IN = 10

DIGIT_COUNT_WEIGHTS = (1, 2, 3, 4)
"""How often an operand has 1, 2, 3 and 4 digits."""

WORDS = split(
    "acorn apple arch bean bell bird boat book bread brick brush cake candle card chair cloud coat coin cup desk "
    "door drum egg farm fern fig fish flag flute fork fox frog gate glass glove goat grape hat hill horn house iron "
    "jar jug kite knife lake lamp leaf lemon lion lock map milk moon mouse nail nest nut oak olive onion owl pan paper "
    "peach pear pen piano pine plum pond rain ring river road rope rose salt sand seed sheep ship shoe snow soap sock "
    "spoon star stone sun table tea tent tiger tree tulip vase violin wagon wall water whale wheel wind wolf wood yarn"
)
NAMES = split(
    "Ada Alan Amy Anna Ben Bob Carl Clara Dan Dora Emma Eric Eva Finn Gus Hana Hugo Ida Ivan Jack Jane Kai Kim Leo "
    "Lily Lucy Mark Maya Mia Nina Noah Olga Omar Paul Rosa Ruth Sam Tara Tom Uma Vera Will Yara Zoe"
)
CITIES = split("Accra Berlin Cairo Delhi Dublin Geneva Hanoi Lima Lisbon London Madrid Nairobi Oslo Paris Quito Rome")
DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WEATHER = split("cold cloudy dry foggy hot rainy sunny warm windy")
THINGS = split("apples books boxes cups eggs hats lamps maps pears pens plates ropes roses shirts spoons")
TEAMS = split("Bears Crows Eagles Foxes Hawks Lions Owls Rams Sharks Tigers Wolves")
CODE_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its one right answer."""

    task: str
    prompt: str
    answer: str


def addition(rng: random.Random) -> Problem:
    """The sum of two numbers of up to four digits."""
    a, b = _number(rng), _number(rng)
    wording = rng.choice(("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?"))
    return Problem("addition", wording.format(a=a, b=b), str(a + b))


def subtraction(rng: random.Random) -> Problem:
    """The difference of two numbers of up to four digits, never negative."""
    b, a = sorted((_number(rng), _number(rng)))
    wording = rng.choice(("What is {a} - {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?"))
    return Problem("subtraction", wording.format(a=a, b=b), str(a - b))


def sort(rng: random.Random) -> Problem:
    """Three to five different numbers in ascending order, or words in alphabetical order."""
    count = rng.randint(3, 5)
    if rng.random() < 0.5:
        numbers = _small_numbers(rng, count)
        wording = rng.choice(
            ("Sort these numbers: {}", "Put these numbers in ascending order: {}", "Order from small to large: {}")
        )
        return _list_problem("sort", wording, [str(n) for n in numbers], [str(n) for n in sorted(numbers)])
    words = rng.sample(WORDS, count)
    wording = rng.choice(("Sort these words: {}", "Put these words in alphabetical order: {}", "Order from A to Z: {}"))
    return _list_problem("sort", wording, words, sorted(words))


def reverse(rng: random.Random) -> Problem:
    """A list of three to five different numbers or words, last item first."""
    count = rng.randint(3, 5)
    items = [str(n) for n in _small_numbers(rng, count)] if rng.random() < 0.5 else rng.sample(WORDS, count)
    wording = rng.choice(
        ("Reverse this list: {}", "Write this list backwards: {}", "List these from last to first: {}")
    )
    return _list_problem("reverse", wording, items, items[::-1])


def copy(rng: random.Random) -> Problem:
    """One to four words, numbers or codes, as they stand."""
    parts = [rng.choice(COPY_PARTS)(rng) for _ in range(rng.randint(1, 4))]
    text = " ".join(parts)
    wording = rng.choice(("Repeat exactly: {}", "Copy this text: {}", "Say this and nothing else: {}"))
    return Problem("copy", wording.format(text), text)


def lookup(rng: random.Random) -> Problem:
    """One entry of a table of three to five that stands in the prompt."""
    return rng.choice(LOOKUPS)(rng, rng.randint(3, 5))


def summarize(rng: random.Random) -> Problem:
    """Two or three plain sentences, and the one that says what matters."""
    text, summary = rng.choice(STORIES)(rng)
    wording = rng.choice(("Summarize: {}", "Sum up in one line: {}", "Make this one sentence: {}"))
    return Problem("summarize", wording.format(text), summary)


TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "addition": addition,
    "subtraction": subtraction,
    "sort": sort,
    "reverse": reverse,
    "copy": copy,
    "lookup": lookup,
    "summarize": summarize,
}


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept for evaluation: SHA-256 of its bytes, as one big-endian number, modulo 10 is 0."""
    digest = hashlib.sha256(prompt.encode("ascii")).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw(task: str, rng: random.Random, *, held_out: bool) -> Problem:
    """A problem of one task from one side of the split; raises TraceError for a task that is not there."""
    if task not in TASKS:
        raise TraceError(unknown_name("task", task, TASKS))
    while True:
        problem = TASKS[task](rng)
        if is_held_out(problem.prompt) == held_out:
            return problem


def draw_training(rng: random.Random) -> Problem:
    """A problem of any task, all equally likely, that no evaluation asks."""
    return draw(rng.choice(list(TASKS)), rng, held_out=False)


def held_out(seed: int, count: int) -> list[Problem]:
    """`count` different evaluation problems, tasks taking turns; a smaller count gives the start of a larger one."""
    return list(islice(all_held_out(seed), count))


def all_held_out(seed: int) -> Iterator[Problem]:
    """Different evaluation problems without an end, tasks taking turns."""
    rng = random.Random(seed)
    seen: set[str] = set()
    for task in cycle(TASKS):
        problem = draw(task, rng, held_out=True)
        while problem.prompt in seen:
            problem = draw(task, rng, held_out=True)
        seen.add(problem.prompt)
        yield problem


def check(problem: Problem, text: str) -> bool:
    """Whether a model's text is the answer, white space around it aside."""
    return text.strip() == problem.answer


def _number(rng: random.Random) -> int:
    """A number of 1 to 4 digits; 0 has one."""
    (digits,) = rng.choices((1, 2, 3, 4), DIGIT_COUNT_WEIGHTS)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _small_numbers(rng: random.Random, count: int) -> list[int]:
    """Different numbers of 1 to 3 digits, short ones as likely as long ones."""
    numbers: dict[int, None] = {}
    while len(numbers) < count:
        numbers[rng.randrange(10 ** rng.randint(1, 3))] = None
    return list(numbers)


def _list_problem(task: str, wording: str, items: list[str], answer: list[str]) -> Problem:
    return Problem(task, wording.format(", ".join(items)), ", ".join(answer))


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def _digits(rng: random.Random) -> str:
    return str(_number(rng))


def _code(rng: random.Random) -> str:
    return "".join(rng.choices(CODE_CHARACTERS, k=rng.randint(3, 8)))


COPY_PARTS = (_word, _digits, _code)


def _prices(rng: random.Random, count: int) -> Problem:
    things = rng.sample(WORDS, count)
    prices = _small_numbers(rng, count)
    table = ", ".join(f"{thing} {price}" for thing, price in zip(things, prices, strict=True))
    asked = rng.randrange(count)
    return Problem("lookup", f"Prices: {table}. What does {things[asked]} cost?", str(prices[asked]))


def _ages(rng: random.Random, count: int) -> Problem:
    names = rng.sample(NAMES, count)
    ages = rng.sample(range(10, 100), count)
    table = ", ".join(f"{name} is {age}" for name, age in zip(names, ages, strict=True))
    asked = rng.randrange(count)
    return Problem("lookup", f"{table}. How old is {names[asked]}?", str(ages[asked]))


def _rooms(rng: random.Random, count: int) -> Problem:
    names = rng.sample(NAMES, count)
    rooms = rng.sample(range(1, 100), count)
    table = ", ".join(f"{room} = {name}" for room, name in zip(rooms, names, strict=True))
    asked = rng.randrange(count)
    return Problem("lookup", f"Rooms: {table}. Who is in room {rooms[asked]}?", names[asked])


def _codes(rng: random.Random, count: int) -> Problem:
    words = rng.sample(WORDS, count)
    codes = [_code(rng) for _ in words]
    table = ", ".join(f"{word} = {code}" for word, code in zip(words, codes, strict=True))
    asked = rng.randrange(count)
    return Problem("lookup", f"Codes: {table}. What is the code of {words[asked]}?", codes[asked])


LOOKUPS = (_prices, _ages, _rooms, _codes)


def _shopping(rng: random.Random) -> tuple[str, str]:
    name, city, day = rng.choice(NAMES), rng.choice(CITIES), rng.choice(DAYS)
    count, things, weather = rng.randint(2, 99), rng.choice(THINGS), rng.choice(WEATHER)
    text = f"{name} went to {city} on {day}. It was {weather} there. {name} bought {count} {things}."
    return text, f"{name} bought {count} {things} in {city} on {day}."


def _match(rng: random.Random) -> tuple[str, str]:
    home, guest = rng.sample(TEAMS, 2)
    city, weather = rng.choice(CITIES), rng.choice(WEATHER)
    ours, theirs = rng.randint(0, 9), rng.randint(0, 9)
    result = "drew" if ours == theirs else "won" if ours > theirs else "lost"
    text = (
        f"The {home} met the {guest} in {city}. The day was {weather}. The {home} scored {ours}, the {guest} {theirs}."
    )
    return text, f"The {home} {result} {ours} to {theirs} in {city}."


def _storm(rng: random.Random) -> tuple[str, str]:
    city, day = rng.choice(CITIES), rng.choice(DAYS)
    trees, hurt = rng.randint(2, 99), rng.choice(("No", *range(2, 10)))
    text = f"There was a storm in {city}. It came on {day}. {trees} trees fell. {hurt} people were hurt."
    return text, f"A storm felled {trees} trees in {city} on {day}."


def _meeting(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(NAMES, 2)
    city, day, weather = rng.choice(CITIES), rng.choice(DAYS), rng.choice(WEATHER)
    text = f"{first} lives in {city}. On {day} it was {weather}. {second} came to see {first} that day."
    return text, f"{second} visited {first} in {city} on {day}."


STORIES = (_shopping, _match, _storm, _meeting)
