"""Recall from the context: drills that are solved by copying, and how many of them a model solves.

    python benchmarks/base/recall.py --model base            # share of answers, by drill
    python benchmarks/base/recall.py --write runs/base/parts/recall.jsonl      # chats to train on
    python benchmarks/base/recall.py --write runs/base/find.jsonl --drill find --n 96000    # of one drill, short

Repetition, continuation of a cycle, key to value, and one of several things by its attributes (the red door of four).
Words are whole tokens of the base's tokenizer, drawn anew for each chat; the same seed gives
the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
#: Characters of a chat, after which no exchange is added.
CHARACTERS = 900
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey", "white", "black", "orange", "brown")
KINDS = ("key", "ball", "box", "door")
PLACES = ("north", "south", "east", "west", "left", "right", "behind", "ahead", "above", "below")
#: (fact, question, answer): key and value stand apart by unlike words.
FORMS = (
    ("{key} is {value}", "{key}?", "{value}"),
    ("{key}: {value}", "{key}", "{value}"),
    ("the {key} has the {value}", "who has the {value}?", "{key}"),
    ("{value} in the {key}", "what is in the {key}?", "{value}"),
    ("{key} costs {value}", "price of {key}", "{value}"),
    ("{key} -> {value}", "{value} <-", "{key}"),
)
Exchange = tuple[str, str]


def repeat(rng: random.Random, words: Sequence[str]) -> Exchange:
    """A list, said again."""
    said = " ".join(rng.sample(words, rng.randint(2, 14)))
    return f"{rng.choice(('Say', 'Repeat', 'Copy'))}: {said}", said


def cycle(rng: random.Random, words: Sequence[str]) -> Exchange:
    """A list, said again and again: most of what is learnt is a repetition."""
    one = rng.sample(words, rng.randint(2, 9))
    return f"Again and again: {' '.join(one)}", " ".join(one * (36 // len(one)))


def look_up(rng: random.Random, words: Sequence[str]) -> Exchange:
    """Keys with values, and the other half of one of them."""
    n = rng.randint(2, 9)
    drawn = rng.sample(words, 2 * n)
    keys = drawn[:n]
    values = drawn[n:] if rng.random() < 0.6 else [str(rng.randint(0, 99)) for _ in range(n)]
    numbered = values[0].isdigit()
    fact, question, answer = rng.choice([form for form in FORMS if not numbered or form[2] == "{value}"])
    asked = rng.randrange(n)
    facts = "; ".join(fact.format(key=key, value=value) for key, value in zip(keys, values, strict=True))
    pair = {"key": keys[asked], "value": values[asked]}
    return f"{facts}. {question.format(**pair)}", answer.format(**pair)


def choose(rng: random.Random, words: Sequence[str]) -> Exchange:
    """Things that share attributes, and where the one is that both attributes name."""
    attributes = rng.sample(COLOURS if rng.random() < 0.5 else words, rng.randint(2, 4))
    things = rng.sample(words, rng.randint(1, 4))
    pairs = [(one, thing) for one in attributes for thing in things]
    shown = rng.sample(pairs, min(len(pairs), rng.randint(2, 8)))
    ways = [_way(rng) for _ in shown]
    listed = "; ".join(f"a {one} {thing} {way}" for (one, thing), way in zip(shown, ways, strict=True))
    told = f"{rng.choice(('There is', 'You see', 'Seen'))}: {listed}."
    asked, form = rng.randrange(len(shown)), rng.random()
    wanted, way = " ".join(shown[asked]), ways[asked]
    missing = [pair for pair in pairs if pair not in shown]
    if form < 0.1 and missing:
        return f"{told} Where is the {' '.join(rng.choice(missing))}?", "not here"
    if form < 0.2 and ways.count(way) == 1:
        return f"{told} What is {way}?", wanted
    return (f"Find a {wanted}. {told}" if form < 0.6 else f"{told} Where is the {wanted}?"), way


def _way(rng: random.Random) -> str:
    """One or two numbered directions."""
    return " ".join(f"{rng.randint(1, 9)} {place}" for place in rng.sample(PLACES, rng.randint(1, 2)))


def find(rng: random.Random, words: Sequence[str]) -> Exchange:
    """One of two to eight things by two attributes that others share, as BabyAI lists them: where it is."""
    attributes, kinds = (COLOURS[:6], KINDS) if rng.random() < 0.5 else (rng.sample(words, 6), rng.sample(words, 4))
    shown = rng.sample([f"{one} {kind}" for one in attributes for kind in kinds], rng.randint(2, 8))
    ways = [_step(rng) for _ in shown]
    told = "You see: " + "; ".join(f"a {thing} {way}" for thing, way in zip(shown, ways, strict=True)) + "."
    asked = rng.randrange(len(shown))
    said = f"Find the {shown[asked]}. {told}" if rng.random() < 0.5 else f"{told} Where is the {shown[asked]}?"
    return said, ways[asked]


def _step(rng: random.Random) -> str:
    """Cells forward, to a side, or both."""
    ahead, aside = f"{rng.randint(1, 7)} forward", f"{rng.randint(1, 7)} {rng.choice(('left', 'right'))}"
    return rng.choices((ahead, aside, f"{ahead} {aside}"), (0.2, 0.2, 0.6))[0]


#: Drill -> share of the chats.
DRILLS: dict[Callable[[random.Random, Sequence[str]], Exchange], float] = {
    repeat: 0.15,
    cycle: 0.05,
    look_up: 0.4,
    choose: 0.4,
}
#: Name -> drill; the last is in no chat of several drills.
NAMED = {drill.__name__: drill for drill in (*DRILLS, find)}
#: Words that half of the chats are made of.
COMMON = 128


def short(rng: random.Random, words: Sequence[str], drill: Callable[..., Exchange]) -> dict[str, Any]:
    """Chat of one exchange."""
    asked, answer = drill(rng, words)
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def chat(rng: random.Random, words: Sequence[str]) -> dict[str, Any]:
    """Exchanges of one drill, in one chat."""
    [drill] = rng.choices(list(DRILLS), list(DRILLS.values()))
    drawn = words[:COMMON] if rng.random() < 0.5 else words
    messages: list[dict[str, str]] = []
    while sum(len(message["content"]) for message in messages) < CHARACTERS:
        asked, answer = drill(rng, drawn)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def vocabulary(tokenizer: Path) -> list[str]:
    """Words of at least three letters that are one token where a space stands before them, in a random order."""
    known = json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"]
    found = (token.removeprefix("Ġ") for token in sorted(known) if token.startswith("Ġ"))
    words = [word for word in found if len(word) > 2 and word.isascii() and word.isalpha() and word.islower()]
    return random.Random(0).sample(words, len(words))


def drills(
    n: int, seed: int, words: Sequence[str], one: Callable[[random.Random, Sequence[str]], dict[str, Any]] = chat
) -> list[str]:
    """Chats, a line of JSON each."""
    rng = random.Random(seed)
    return [json.dumps(one(rng, words)) for _ in range(n)]


def measure(model: str, words: Sequence[str], n: int = 100) -> dict[str, tuple[float, float]]:
    """Drill -> share of the answers' tokens that are the model's likeliest next ones, and of whole answers."""
    import torch

    from rlhf.training.policy.model import Pretrained

    policy = Pretrained(path=model).build(0)
    found = {}
    for drill in NAMED.values():
        rng = random.Random(1)
        right: list[list[bool]] = []
        for _ in range(n):
            asked, answer = drill(rng, words)
            said = [{"role": "user", "content": asked}]
            prompt = policy.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            read, whole = (policy.tokenizer(text)["input_ids"] for text in (prompt, prompt + answer))
            with torch.no_grad():
                likeliest = policy.model(torch.tensor([whole])).logits[0, len(read) - 1 : -1].argmax(-1)
            right.append((likeliest == torch.tensor(whole[len(read) :])).tolist())
        tokens = [one for answer in right for one in answer]
        found[drill.__name__] = sum(tokens) / len(tokens), sum(map(all, right)) / n
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format, or base")
    parser.add_argument("--write", type=Path, help="file of chats")
    parser.add_argument("--drill", choices=NAMED, help="write chats of one exchange, of this drill alone")
    parser.add_argument("--n", type=int, default=9000, help="chats that are written")
    asked = parser.parse_args()
    words = vocabulary(ROOT / "base" / "tokenizer.json")
    if asked.write:
        one = partial(short, drill=NAMED[asked.drill]) if asked.drill else chat
        asked.write.write_text("\n".join(drills(asked.n, 0, words, one)) + "\n")
    if asked.model:
        print("| drill | tokens | whole answers |\n|---|---|---|")
        for name, (tokens, answers) in measure(asked.model, words).items():
            print(f"| {name} | {tokens:.1%} | {answers:.1%} |")


if __name__ == "__main__":
    main()
