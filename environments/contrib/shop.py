"""Web shop with a search engine: find, configure and buy a product (WebShop's protocol).

    Instruction: i am looking for a quick dry shirt with color: red, and size: small, and price lower than 40.00 dollars
    [search]
    > search[quick dry shirt]
    [back to search] page 1 of 3 [next >]
    [b007] Nova quick dry shirt, $23.00
    ...
    > click[b007]
    ...
    > click[buy now]

Drawn shops are small and their pages short; WebShop's own data may take their place. See
`environments.contrib.shop_catalogue` for the reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.contrib.shop_catalogue import Goal, Product, draw, read_webshop, reward
from environments.core.procedural import Attempt, PlansByReplay, digest, draw_for
from environments.core.seed_splits import Seeded
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT
from rlhf.text_search import Index, installed

_MOST_RESULTS = 50
_BACK, _NEXT, _PREVIOUS, _BUY = "back to search", "next >", "< prev", "buy now"
_PAGES = ("description", "features", "reviews")
_ACTION = re.compile(r"^\W*(search|click)\s*[\[(:]\s*([^\s\])].*?)\s*[\])]?\s*$", re.IGNORECASE | re.DOTALL)
_SPLITS = {"test": slice(0, 500), "dev": slice(500, 1_500), "train": slice(1_500, None)}


class Catalogue:
    """Products, by asin, and their index."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = {product.asin: product for product in products}
        self._order = [product.asin for product in products]
        self._index = Index([product.text for product in products]).require()

    def found(self, query: str) -> list[str]:
        """Return the asins of what matches best."""
        return [self._order[i] for i in self._index.best(query, _MOST_RESULTS)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Shop(PlansByReplay, Seeded):
    """Find and buy what is wanted, in drawn shops or in WebShop's: search, options, purchase."""

    n_products: Annotated[int, Field(ge=4, le=900)] = 20
    """Things that a drawn shop sells."""
    n_attributes: Annotated[int, Field(ge=1, le=3)] = 1
    """Attributes that are wanted, in a drawn shop."""
    options: bool = True
    """Sell products of a generated shop in colours and sizes, which are then wanted too."""
    per_page: Annotated[int, Field(ge=1, le=50)] = 5
    """Results on a page; WebShop has 10."""
    max_steps: Annotated[int, Field(ge=2)] = 15
    """Maximum steps per episode; longer ones are truncated."""
    data: Path | None = None
    """Folder with WebShop's own files (items_shuffle.json, items_ins_v2.json, items_human_ins.json, or those of 1000
    products), in place of drawn shops."""

    @model_validator(mode="after")
    def _agrees(self) -> Shop:
        """Refuse keys of drawn shops beside WebShop's data."""
        if self.data is not None and (self.n_products, self.n_attributes, self.options) != (20, 1, True):
            raise ValueError("n_products, n_attributes and options are for drawn shops, and have no effect with data")
        return self

    @property
    def properties(self) -> Properties:
        """Properties of the environment."""
        return replace(super().properties, inline=self.data is None, package=installed())

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split: drawn shops, or WebShop's goals.

        Raises:
            EnvError: there is no such split, or the data cannot be read.
        """
        seeds = self.seeds(split)
        if self.data is None:
            prefix = f"shop-2/{self.n_products}-{self.n_attributes}{'-options' if self.options else ''}/{split}"
            return [Task(id=f"{prefix}/{seed}", seed=seed) for seed in seeds]
        numbers = range(len(_webshop(self.data)[1]))[_SPLITS[split]]
        return [Task(id=f"shop/webshop/{split}/{i}", seed=i, info={"goal": i}) for i in numbers[: len(seeds)]]

    def start(self, task: Task) -> ShopEpisode:
        """Begin one attempt. Raises MissingPackageError where `bm25s` is not installed."""
        if self.data is None:
            catalogue, goal = _drawn(task.seed, self.n_products, self.n_attributes, self.options)
        else:
            catalogue, goals = _webshop(self.data)
            i = task.info.get("goal")
            if not isinstance(i, int) or not 0 <= i < len(goals):
                raise EnvError("this task is of another environment", where="Shop.start", got=task.id)
            goal = goals[i]
        return ShopEpisode(catalogue, goal, per_page=self.per_page, max_steps=self.max_steps)


@lru_cache(maxsize=64)
def _drawn(seed: int, n_products: int, n_attributes: int, options: bool) -> tuple[Catalogue, Goal]:
    products, goal = draw_for(
        "shop",
        seed,
        lambda rng: draw(rng, n_products, n_attributes, options=options),
        lambda made: (made[1].instruction, made[1].asin),
    )
    return Catalogue(products), goal


@lru_cache(maxsize=2)
def _webshop(folder: Path) -> tuple[Catalogue, tuple[Goal, ...]]:
    products, goals = read_webshop(folder)
    return Catalogue(products), goals


class ShopEpisode(Attempt):
    """Visit to a shop, which a purchase ends; success is a reward of 1.

    The key of a state tells the goal, the page, and the options chosen. What can be clicked on a page is listed, and
    where there is nothing to click, searches for what the instruction names.
    """

    def __init__(self, catalogue: Catalogue, goal: Goal, *, per_page: int, max_steps: int) -> None:
        super().__init__(max_steps)
        self._catalogue, self._goal, self._per_page = catalogue, goal, per_page
        self._wanted = catalogue.products[goal.asin]
        self._name = digest(repr((goal, len(catalogue.products))))
        self._found: list[str] | None = None
        self._page = 0
        self._product: Product | None = None
        self._subpage = ""
        self._chosen: dict[str, str] = {}
        self._query = ""
        self.opening = self.opened(f"Instruction: {goal.instruction}\n{self._shown()}")

    def do(self, action: str) -> tuple[str, bool]:
        """Search, or click."""
        match = _ACTION.match(action) if len(action) <= 500 else None
        verb, words = (match[1].lower(), match[2].lower()) if match else ("", "")
        if verb == "search" and words:
            self._found, self._page, self._query = self._catalogue.found(words), 0, words
            self._product, self._subpage, self._chosen = None, "", {}
        elif verb == "click" and words in self._clickable():
            self._click(words)
        else:
            return f"Nothing happens. Say search[words] or click[...].\n{self._shown()}", False
        return "Thank you for shopping with us." if self.done else self._shown(), True

    def _click(self, words: str) -> None:
        product = self._product
        if words == _BACK:
            self._found, self._product, self._subpage, self._chosen = None, None, "", {}
        elif words == _NEXT or (words == _PREVIOUS and product is None):
            self._page += 1 if words == _NEXT else -1
        elif product is None:
            self._product, self._chosen = self._catalogue.products[words], {}
        elif words == _PREVIOUS:
            self._product, self._subpage = (product, "") if self._subpage else (None, "")
        elif words in _PAGES:
            self._subpage = words
        elif words == _BUY:
            self.score = reward(product, self._chosen, self._goal, self._wanted)
            self.done, self.solved = True, self.score == 1
        else:
            self._chosen[next(name for name, values in product.options if words in values)] = words

    def _on_page(self) -> list[str]:
        return (self._found or [])[self._page * self._per_page : (self._page + 1) * self._per_page]

    def _n_pages(self) -> int:
        return max(1, -(-len(self._found or []) // self._per_page))

    def _clickable(self) -> list[str]:
        if self._product is not None:
            if self._subpage:
                return [_BACK, _PREVIOUS]
            return [_BACK, _PREVIOUS, *(v for _, values in self._product.options for v in values), *_PAGES, _BUY]
        if self._found is None:
            return []
        more = [_NEXT] if self._page + 1 < self._n_pages() else []
        return [_BACK, *([_PREVIOUS] if self._page else []), *more, *self._on_page()]

    def _shown(self) -> str:
        product = self._product
        if product is None:
            if self._found is None:
                return "[search]"
            clicks = [f"[{c}]" for c in self._clickable() if c in (_PREVIOUS, _NEXT)]
            head = " ".join([f"[{_BACK}] page {self._page + 1} of {self._n_pages()}", *clicks])
            goods = [self._catalogue.products[asin] for asin in self._on_page()]
            return "\n".join([head, *(f"[{one.asin}] {one.title}, ${one.price:.2f}" for one in goods)])
        head = f"[{_BACK}] [{_PREVIOUS}]"
        if self._subpage:
            texts = {"description": product.description, "features": "; ".join(product.features), "reviews": ""}
            return f"{head}\n{texts[self._subpage] or 'Nothing is said.'}"
        lines = [head]
        for name, values in product.options:
            marked = (f"[{value}]{' (chosen)' if self._chosen.get(name) == value else ''}" for value in values)
            lines.append(f"{name}: {' '.join(marked)}")
        clicks = [f"[{c}]" for c in (*_PAGES, _BUY)]
        return "\n".join([*lines, f"{product.title}, ${product.price:.2f}", " ".join(clicks)])

    def way_out(self) -> tuple[str, ...] | None:
        """Give actions that lead from here to the wanted thing, choose what is wanted, and buy it."""
        if self.done:
            return () if self.solved else None
        actions: list[str] = []
        chosen: dict[str, str] = {}
        if self._product is not None and self._product.asin == self._goal.asin:
            actions += [f"click[{_PREVIOUS}]"] if self._subpage else []
            chosen = self._chosen
        elif self._product is None and self._goal.asin in self._on_page():
            actions.append(f"click[{self._goal.asin}]")
        else:
            query, found = self._search()
            if self._goal.asin not in found:
                return None
            n_pages = found.index(self._goal.asin) // self._per_page
            actions += [f"search[{query}]", *[f"click[{_NEXT}]"] * n_pages]
            actions.append(f"click[{self._goal.asin}]")
        for name, values in self._wanted.options:
            value = next((v for v in values if v in self._goal.options), None)
            actions += [f"click[{value}]"] if value and chosen.get(name) != value else []
        actions.append(f"click[{_BUY}]")
        return tuple(actions) if len(actions) <= self.steps_left else None

    def _search(self) -> tuple[str, list[str]]:
        """Search that finds the wanted product, and its results: by the instruction, else by its name."""
        queries = [" ".join([*self._goal.attributes, self._wanted.query]), self._wanted.title.lower()]
        query, found = queries[0], self._catalogue.found(queries[0])
        if self._goal.asin in found[: 2 * self._per_page]:
            return query, found
        return queries[1], self._catalogue.found(queries[1])

    def state(self) -> str:
        """Return goal, page and options."""
        if self.done:
            return f"{self._name}/bought"
        place = (
            self._product.asin if self._product else f"{self._query}:{self._page}" if self._found is not None else ""
        )
        chosen = "+".join(f"{name}={value}" for name, value in sorted(self._chosen.items()))
        return f"{self._name}/{place}/{self._subpage}/{chosen}/{self._query if self._product else ''}:{self._page}"

    def possible(self) -> tuple[str, ...]:
        """Return the clicks of this page, or two searches on the page without any."""
        clicks = self._clickable()
        if not clicks:
            told = self._goal.instruction.casefold()  # what it does not say is not to be given away
            query = [words for words in [self._wanted.query] if words.casefold() in told]
            attributes = [words for words in self._goal.attributes if words.casefold() in told]
            searches = (query, [*attributes, *query])
            return tuple(sorted({f"search[{' '.join(words)}]" for words in searches if words}))
        return tuple(sorted({f"click[{words}]" for words in clicks}))
