"""Hierarchical reasoning: questions about a tree that is told line by line.

    Bel is under Tar. Mes is under Bel. ...
    Who is the nearest above both Mes and Ald?

After the tasks of HiBench, arXiv 2503.00912, on trees that are drawn; not its data.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.procedural import Attempts, DrawnQuestions, Judged, digest
from rlhf.settings import STRICT

Kind = Literal["parent", "path", "depth", "leaves", "common", "move"]
_FIRST = ("Al", "Bel", "Dru", "Kas", "Mes", "Ner", "Quo", "Sil", "Tar", "Vor", "Wen", "Zim")
_LAST = ("da", "fo", "gus", "ka", "lin", "mor", "ric", "tine", "va")
NAMES = tuple(sorted(first + last for first in _FIRST for last in _LAST))
_LONGEST = 400


@plain_dataclass(frozen=True)
class Tree:
    """A tree of names, the root first, and a question about it.

    Attributes:
        names: of the nodes.
        parents: number of the node above each.
        order: in which lines are told.
        kind: of the question.
        about: numbers of the nodes that it is about.
    """

    names: tuple[str, ...]
    parents: tuple[int, ...]
    order: tuple[int, ...]
    kind: Kind
    about: tuple[int, ...]

    def above(self, node: int, parents: Sequence[int] | None = None) -> list[int]:
        """All above a node, the nearest first."""
        parents = self.parents if parents is None else parents
        found = []
        while (node := parents[node]) >= 0:
            found.append(node)
        return found

    def answer(self) -> list[str]:
        """Names in order, or one number."""
        x, *others = self.about
        if self.kind == "parent":
            return [self.names[self.parents[x]]]
        if self.kind == "path":
            return [self.names[i] for i in self.above(x)]
        if self.kind == "depth":
            return [str(len(self.above(x)))]
        if self.kind == "leaves":
            return [str(sum(i not in self.parents and x in self.above(i) for i in range(len(self.names))))]
        if self.kind == "common":
            theirs = self.above(others[0])
            return [next(self.names[i] for i in self.above(x) if i in theirs)]
        moved = [others[0] if i == x else p for i, p in enumerate(self.parents)]
        return [str(len(self.above(others[1], moved)))]

    def question(self) -> str:
        """The question in words."""
        x, y, z = (*(self.names[i] for i in self.about), "", "")[:3]
        return {
            "parent": f"Who is directly above {x}?",
            "path": f"Who are all those above {x}, from the nearest to the top?",
            "depth": f"How many are above {x}?",
            "leaves": f"How many of those under {x}, at any distance, have nobody under them?",
            "common": f"Who is the nearest above both {x} and {y}?",
            "move": f"If {x} were put directly under {y}, with all under {x}, how many would be above {z}?",
        }[self.kind]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hierarchy(DrawnQuestions):
    """Answer questions about a tree of names that is told in any order; pure Python."""

    nodes: Annotated[int, Field(ge=4, le=60)] = 10
    """Nodes of a tree."""
    questions: Annotated[tuple[Kind, ...], Field(min_length=1)] = (
        "parent", "path", "depth", "leaves", "common", "move",
    )  # fmt: skip
    """Kinds of questions."""
    max_steps: Annotated[int, Field(ge=1)] = 1
    """Attempts at one question."""

    name: ClassVar[str] = "hierarchy"

    @property
    def level(self) -> str:
        """Level: number of nodes, and the kinds of questions."""
        every = type(self)().questions
        return f"{self.nodes}{'' if self.questions == every else '-' + '+'.join(self.questions)}"

    def draw(self, rng: random.Random) -> Tree:
        """Draw a tree and a question that it answers."""
        n = self.nodes
        while True:
            parents = (-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, n)))
            kind = rng.choice(self.questions)
            about = tuple(rng.sample(range(1, n), 3 if kind == "move" else 2 if kind == "common" else 1))
            names = tuple(rng.sample(NAMES, n))
            tree = Tree(names, parents, tuple(rng.sample(range(1, n), n - 1)), kind, about)
            if _is_asked(tree):
                return tree

    def content(self, instance: Tree) -> str:
        """Tree and question, in whatever order it is told."""
        named = sorted((instance.names[i], instance.names[p]) for i, p in enumerate(instance.parents) if p >= 0)
        return repr((named, instance.question()))

    def ask(self, instance: Tree) -> Attempts:
        """Tell the tree, and ask the question."""
        tree = instance
        lines = " ".join(f"{tree.names[i]} is under {tree.names[tree.parents[i]]}." for i in tree.order)
        return Attempts(
            f"{lines}\n{tree.question()} Answer with names, or a number, alone.",
            lambda text: judge(tree, text),
            name=f"{self.name}/{digest(repr(tree))}",
            max_steps=self.max_steps,
        )

    def answer(self, instance: Tree) -> str:
        """Names in order, or one number, as text."""
        return ", ".join(instance.answer())


def _is_asked(tree: Tree) -> bool:
    """True if the question is sound: no leaves of a leaf, no move under oneself."""
    x, *others = tree.about
    if tree.kind == "leaves":
        return x in tree.parents
    if tree.kind == "move":
        return (
            others[0] != tree.parents[x] and x not in (*tree.above(others[0]), others[0]) and x in tree.above(others[1])
        )
    return tree.kind != "common" or (x not in tree.above(others[0]) and others[0] not in tree.above(x))


def judge(tree: Tree, text: str) -> Judged:
    """Compare the names, or the number, that an answer holds with those that are right."""
    known: Mapping[str, str] = {name.lower(): name for name in tree.names}
    found = [known.get(word, word) for word in re.findall(r"[a-z]+|\d+", text[:_LONGEST].lower())]
    said = [word for word in found if word in tree.names or word.isdigit()]
    if not said or len(text) > _LONGEST:
        return Judged("That is no answer: give names, or a number.", None)
    right = said == tree.answer()
    return Judged("Right." if right else "Wrong.", ", ".join(said), solved=right)
