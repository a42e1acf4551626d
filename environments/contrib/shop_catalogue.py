"""Catalogue of the shop: products, wishes and the reward of a purchase, drawn or WebShop's own.

The reward is that of WebShop (Yao and others, arXiv 2207.01206): of wanted attributes, wanted options and the price,
the share that the purchase meets, times how far it is the right type of thing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from environments.core.normalise import words
from rlhf.errors import EnvError
from rlhf.text_search import tokenize

_BRANDS = words("Alto Brio Cove Dune Elmo Fern Gala Haze Iris Juno Kite Luma Mist Nova Opal Pico Rune Sage Tide Vela")
#: Word to search for -> departments, and whether it comes in sizes.
_TYPES: Mapping[str, tuple[str, bool]] = {
    "backpack": ("luggage › bags › backpacks", True),
    "blanket": ("home › bedding › blankets", True),
    "cream": ("beauty › skin care › creams", False),
    "headphones": ("electronics › audio › headphones", False),
    "jacket": ("clothing › coats › jackets", True),
    "lamp": ("furniture › lighting › lamps", False),
    "mug": ("kitchen › drinkware › mugs", False),
    "shirt": ("fashion › tops › shirts", True),
}
_ATTRIBUTES = (
    "easy clean", "eco friendly", "hand made", "heavy duty", "light weight", "long lasting", "machine washable",
    "non slip", "quick dry", "soft touch", "space saving", "water resistant",
)  # fmt: skip
_COLOURS = words("black blue green grey red white")
_SIZES = words("small medium large")
_NO_PRICE = 1_000_000.0
_FUZZY = 0.85
_EXACT = ("size",)
#: Words of a name that say nothing of the type. WebShop takes the nouns that spaCy finds.
_SMALL_WORDS = frozenset(words("a an and at by for from in inch of on or pack pcs set the to with x"))


@dataclass(frozen=True, slots=True)
class Product:
    """Product on sale; options are names with their values."""

    asin: str
    title: str
    query: str
    departments: str
    attributes: tuple[str, ...]
    features: tuple[str, ...]
    description: str
    options: tuple[tuple[str, tuple[str, ...]], ...]
    price: float

    @property
    def text(self) -> str:
        """Text of the product in the search index."""
        values = [f"{name} {' '.join(own)}" for name, own in self.options]
        return " ".join([self.title, *self.features, self.description, *values])


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a shopper: the thing it was made for, the instruction, and what counts."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


def reward(bought: Product, chosen: Mapping[str, str], goal: Goal, wanted: Product) -> float:
    """Reward: type · (attributes + options + price met) / (attributes + options wanted + 1), from 0 to 1.

    Two of two attributes, one of two options and the price, of the right type: 1 · (2 + 1 + 1) / (2 + 2 + 1) = .8.
    """
    text = " ".join([bought.title, *bought.features, bought.description]).lower()
    n_attributes = sum(
        any(alike(own, attribute) for own in bought.attributes) or attribute in text for attribute in goal.attributes
    )
    n_options = sum(
        any(value == option if name.lower() in _EXACT else alike(option, value) for name, value in chosen.items())
        for option in goal.options
    )
    met = n_attributes + n_options + (bought.price <= goal.price_upper)
    return type_reward(bought, wanted) * met / (len(goal.attributes) + len(goal.options) + 1)


def type_reward(bought: Product, wanted: Product) -> float:
    """Type similarity of two products: 1, .5, .1 or 0.

    With s the share of the words of the wanted name that are in the bought one: 0 where s is 0, .1 below .1, else 1
    where s is above .2 or both have the same query or two departments in common, and .5 where not.
    """
    mine, theirs = (set(tokenize(one.title)) - _SMALL_WORDS for one in (bought, wanted))
    share = len(mine & theirs) / len(theirs) if theirs else 0.2
    common = {d.strip() for d in bought.departments.split("›")} & {d.strip() for d in wanted.departments.split("›")}
    if share < 0.1:
        return 0.1 if share else 0.0
    return 1.0 if bought.query == wanted.query or len(common) >= 2 or share > 0.2 else 0.5


def alike(one: str, other: str) -> bool:
    """True if one text's words are all in the other, or the texts differ in few letters."""
    a, b = set(tokenize(one)), set(tokenize(other))
    if not a or not b:
        return False
    return a <= b or b <= a or SequenceMatcher(None, " ".join(sorted(a)), " ".join(sorted(b))).ratio() > _FUZZY


def draw(rng: random.Random, n_products: int, n_attributes: int, *, options: bool) -> tuple[tuple[Product, ...], Goal]:
    """Draw what a shop sells, and one thing of it that is wanted."""
    products = []
    for i in range(n_products):
        query = rng.choice(list(_TYPES))
        departments, has_sizes = _TYPES[query]
        attributes = tuple(rng.sample(_ATTRIBUTES, 3))
        own = [("color", tuple(sorted(rng.sample(_COLOURS, 3))))] if options else []
        own += [("size", _SIZES)] if options and has_sizes else []
        title = f"{rng.choice(_BRANDS)} {attributes[0]} {query}"
        asin = f"b{i + 1:03d}"
        price = float(rng.randint(5, 95))
        about = f"{query}, made to be {attributes[2]}."
        products.append(Product(asin, title, query, departments, attributes, attributes, about, tuple(own), price))
    target = rng.choice(products)
    wanted = tuple(sorted(rng.sample(target.attributes, n_attributes)))
    chosen = tuple((name, rng.choice(values)) for name, values in target.options)
    upper = upper_price(rng, target.price)
    text = f"i am looking for a {', '.join(wanted)} {target.query}"
    text += f" with {', and '.join(f'{name}: {value}' for name, value in chosen)}" if chosen else ""
    text += f", and price lower than {upper:.2f} dollars"
    return tuple(products), Goal(target.asin, text, wanted, tuple(value for _, value in chosen), upper)


def upper_price(rng: random.Random, price: float) -> float:
    """Larger of two random draws of the next four round prices, as in WebShop; unbounded from 980 on."""
    above = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    return max(rng.sample(above, 2)) if len(above) > 1 else _NO_PRICE


def read_webshop(folder: Path) -> tuple[tuple[Product, ...], tuple[Goal, ...]]:
    """Read WebShop's own files: products, their attributes, and the instructions that people wrote.

    Returns:
        products, and goals in the order in which WebShop shuffles them: the first 500 are its test tasks, the next 1000
        its development tasks. Bounds on prices are drawn by WebShop without a seed; here the goal seeds them.

    Raises:
        EnvError: a file is missing, or is not what it should be.
    """
    items = _read(folder, "items_shuffle.json", "items_shuffle_1000.json")
    attributes = _read(folder, "items_ins_v2.json", "items_ins_v2_1000.json")
    written = _read(folder, "items_human_ins.json")
    products: dict[str, Product] = {}
    for item in items:
        asin = str(item["asin"])
        if asin != "nan" and len(asin) <= 10 and asin.lower() not in products:
            products[asin.lower()] = _product(item, attributes.get(asin, {}))
    goals = []
    for product in products.values():
        for i, own in enumerate(written.get(product.asin.upper(), [])):
            if own["instruction_attributes"]:
                upper = upper_price(random.Random(f"shop/{product.asin}/{i}"), product.price)
                bound = "" if upper == _NO_PRICE else f", and price lower than {upper:.2f} dollars"
                options = own["instruction_options"]
                values = tuple(options.values() if isinstance(options, dict) else options)
                text = own["instruction"].strip(".") + bound
                goals.append(Goal(product.asin, text, tuple(own["instruction_attributes"]), values, upper))
    random.Random(233).shuffle(goals)
    if not goals:
        raise EnvError("there is no instruction for any product", where=str(folder), expected="items_human_ins.json")
    return tuple(products.values()), tuple(goals)


def _product(item: Mapping[str, Any], known: Mapping[str, Any]) -> Product:
    prices = [float(re.sub(r"[^\d.]", "", text)) for text in (item.get("pricing") or "$100.0").split("$")[1:]]
    bullets = item["small_description"]
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (item.get("customization_options") or {}).items()
        if values
    }
    return Product(
        asin=str(item["asin"]).lower(),
        title=item["name"],
        query=item["query"].lower().strip(),
        departments=item["product_category"],
        attributes=tuple(known.get("attributes", ())),
        features=tuple(
            map(str, bullets if isinstance(bullets, Sequence) and not isinstance(bullets, str) else [bullets])
        ),
        description=item["full_description"] or "",
        options=tuple(options.items()),
        price=sum(prices[:2]) / len(prices[:2]) if prices else 100.0,
    )


def _read(folder: Path, *names: str) -> Any:
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        expected, hint = " or ".join(names), "WebShop's setup script downloads them into its folder data/"
        raise EnvError("a file of WebShop is missing", where=str(folder), expected=expected, hint=hint)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvError("invalid JSON", where=str(path), got=str(error)[:80]) from error
