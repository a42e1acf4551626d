"""The shop: pages and clicks, what a purchase is worth, WebShop's own files, promises and the oracle."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.check import check_environment
from environments.contrib.shop import Catalogue, Shop, ShopEpisode
from environments.contrib.shop_catalogue import Goal, Product, alike, draw, reward, type_reward, upper_price
from rlhf.errors import EnvError
from tests.environments.worlds import figures, is_shown, page, play, transcript

SHIRT = Product(
    "b001",
    "Nova quick dry shirt",
    "shirt",
    "fashion › tops › shirts",
    ("quick dry", "hand made"),
    ("quick dry", "hand made"),
    "shirt, made to be worn.",
    (("color", ("blue", "red")), ("size", ("large", "small"))),
    23.0,
)
LAMP = replace(
    SHIRT,
    asin="b002",
    title="Alto lamp",
    query="lamp",
    departments="furniture › lighting › lamps",
    attributes=("hand made",),
    features=("hand made",),
    description="lamp.",
    options=(),
    price=60.0,
)
GOAL = Goal("b001", "i want a quick dry shirt", ("hand made", "quick dry"), ("red", "small"), 30.0)


def visit(*actions: str, per_page: int = 5) -> tuple[ShopEpisode, list[str]]:
    episode = ShopEpisode(Catalogue([SHIRT, LAMP]), GOAL, per_page=per_page, max_steps=15)
    return episode, [episode.act(action).reply for action in actions]


# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_whole_purchase() -> None:
    episode, replies = visit("search[hand made]", "click[b001]", "click[red]", "Click[small]", "click[Buy Now]")
    assert episode.opening.reply == "Instruction: i want a quick dry shirt\n[search]"
    assert episode.opening.admissible_actions == ("search[quick dry shirt]", "search[shirt]"), "no more than was said"
    assert replies[0] == "[back to search] page 1 of 1\n[b002] Alto lamp, $60.00\n[b001] Nova quick dry shirt, $23.00"
    assert replies[3] == (
        "[back to search] [< prev]\ncolor: [blue] [red] (chosen)\nsize: [large] [small] (chosen)\n"
        "Nova quick dry shirt, $23.00\n[description] [features] [reviews] [buy now]"
    )
    assert replies[4] == "Thank you for shopping with us."
    assert (episode.score, episode.solved) == (1, True)


def test_pages_lead_on_and_back() -> None:
    _, replies = visit(
        "search[hand made]", "click[next >]", "click[b001]", "click[features]", "click[< prev]", "click[reviews]",
        "click[< prev]", "click[< prev]", "click[< prev]", "click[back to search]", per_page=1,
    )  # fmt: skip
    first, second = "[back to search] page 1 of 2 [next >]", "[back to search] page 2 of 2 [< prev]"
    assert replies[0].startswith(first) and replies[1].startswith(second)
    assert replies[3] == "[back to search] [< prev]\nquick dry; hand made" and replies[4] == replies[2]
    assert replies[5] == "[back to search] [< prev]\nNothing is said."
    assert replies[7:] == [replies[1], replies[0], "[search]"]


def test_options_are_forgotten_with_the_thing_they_are_of() -> None:
    episode, replies = visit("search[shirt]", "click[b001]", "click[red]", "click[< prev]", "click[b001]")
    assert "chosen" in replies[2] and "chosen" not in replies[4]
    assert episode.state() != visit("search[shirt]", "click[b001]", "click[red]")[0].state()


@pytest.mark.parametrize(
    "action", ["", "click[b001]", "click[buy now]", "shirt", "search[]", "buy", "click[" + "a" * 600]
)
def test_what_cannot_be_clicked_changes_nothing(action: str) -> None:
    episode, [reply] = visit(action)
    assert reply == "Nothing happens. Say search[words] or click[...].\n[search]"
    assert not episode.act("click[red]").valid and episode.act("search: shirt").valid


# --- what a purchase is worth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "chosen", "value"),
    [
        # Wanted are two attributes, two options and the price: five points, times the type.
        (SHIRT, {"color": "red", "size": "small"}, 1.0),
        (SHIRT, {"color": "red", "size": "large"}, 4 / 5),
        (SHIRT, {"color": "red", "trim": "red", "size": "large"}, 4 / 5),  # one wanted option, met twice
        (replace(SHIRT, title="Nova black quick dry shirt"), {"color": "black", "size": "small"}, 4 / 5),
        (SHIRT, {}, 3 / 5),
        (replace(SHIRT, price=30.01), {}, 2 / 5),
        (
            replace(SHIRT, attributes=("hand made",), features=(), title="Nova shirt"),
            {},
            2 / 5,
        ),  # made by hand, and cheap
        (replace(SHIRT, attributes=()), {}, 3 / 5),  # its features still name both
        (LAMP, {}, 0.0),  # "alto lamp" has none of "nova quick dry shirt"
    ],
)
def test_points_of_a_purchase(product: Product, chosen: dict[str, str], value: float) -> None:
    assert reward(product, chosen, GOAL, SHIRT) == pytest.approx(value)


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({}, 1.0),
        # Four words are wanted; one of four is .25, above .2.
        ({"title": "Alto shirt", "query": "x", "departments": "y"}, 1.0),
        ({"title": "Alto lamp"}, 0.0),
        # One of six is 1/6: neither above .2 nor below .1, so that query or departments decide.
        ({"title": "Alto lamp one", "query": "x", "departments": "y"}, 0.5),
        ({"title": "Alto lamp one", "departments": "y"}, 1.0),
        ({"title": "Alto lamp one", "query": "x"}, 1.0),
        # One of eleven is below .1, whatever the query.
        ({"title": "Alto lamp eleven"}, 0.1),
    ],
)
def test_the_type_of_a_purchase(changes: dict[str, Any], value: float) -> None:
    title = changes.get("title", "")
    wanted = replace(SHIRT, title="one two three four five six") if title.endswith("one") else SHIRT
    wanted = (
        replace(SHIRT, title=" ".join(f"w{i}" for i in range(10)) + " eleven") if title.endswith("eleven") else wanted
    )
    assert type_reward(replace(SHIRT, **changes), wanted) == value


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("quick dry", "Dry Quick", True), ("quick dry fabric", "quick dry", True), ("colour", "colours", True),
        ("quick dry", "hand made", False), ("", "", False), ("red", "", False),
    ],
)  # fmt: skip
def test_texts_that_are_alike(one: str, other: str, same: bool) -> None:
    assert alike(one, other) is same


@given(price=st.floats(0, 2000), seed=st.integers(0, 1000))
def test_bounds_on_prices_are_above_the_price(price: float, seed: int) -> None:
    upper = upper_price(random.Random(seed), price)
    assert price < upper and (upper <= price + 40 or upper == 1_000_000 or price > 950)


@given(seed=st.integers(0, 10_000), n=st.integers(4, 60), k=st.integers(1, 3), options=st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_wanted_is_on_sale(seed: int, n: int, k: int, options: bool) -> None:
    products, goal = draw(random.Random(seed), n, k, options=options)
    [wanted] = [product for product in products if product.asin == goal.asin]
    chosen = {name: next(v for v in values if v in goal.options) for name, values in wanted.options}
    assert reward(wanted, chosen, goal, wanted) == 1
    assert all(0 <= reward(product, {}, goal, wanted) <= 1 for product in products)


# --- WebShop's own files ---------------------------------------------------------------------------------------------


def written(folder: Path, n_goals: int = 1) -> Path:
    item = {
        "asin": "B07ABCDEFG", "name": "Nova Quick Dry Shirt", "query": " Shirt", "product_category": "Fashion › Tops",
        "small_description": ["Hand made"], "full_description": None, "pricing": "$20.00$26.00",
        "customization_options": {"Color": [{"value": "Red/Blue "}, {"value": "green"}], "Fit": None},
    }  # fmt: skip
    said = {"instruction": "i want a quick dry shirt.", "instruction_attributes": ["quick dry"]}
    own = [{**said, "instruction_options": ["red | blue"]}] * n_goals + [{**said, "instruction_attributes": []}]
    files: dict[str, Any] = {
        "items_shuffle_1000.json": [item, item, {**item, "asin": "nan"}],
        "items_ins_v2_1000.json": {"B07ABCDEFG": {"attributes": ["quick dry"]}},
        "items_human_ins.json": {"B07ABCDEFG": own},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder


def test_webshops_own_files(tmp_path: Path) -> None:
    world = Shop(data=written(tmp_path), per_page=10)
    [task] = world.tasks("test")
    plan = world.plan(task, ())
    assert plan == ("search[quick dry shirt]", "click[b07abcdefg]", "click[red | blue]", "click[buy now]")
    results = play(world, task, plan)
    assert results[0].reply.startswith("Instruction: i want a quick dry shirt, and price lower than ")
    assert "[b07abcdefg] Nova Quick Dry Shirt, $23.00" in results[1].reply
    assert results[2].reply.splitlines()[1] == "color: [red | blue] [green]"
    assert results[-1].success and not world.properties.inline


def test_the_splits_of_webshop(tmp_path: Path) -> None:
    world = Shop(data=written(tmp_path, n_goals=1_502))
    seeds = {split: [task.seed for task in world.tasks(split)] for split in ("test", "dev", "train")}
    assert seeds == {"test": list(range(500)), "dev": list(range(500, 1_500)), "train": [1_500, 1_501]}


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"items_shuffle.json or items_shuffle_1000.json"):
        Shop(data=tmp_path / "none").tasks("test")
    (tmp_path / "items_shuffle.json").write_text("{")
    with pytest.raises(EnvError, match="invalid JSON"):
        Shop(data=tmp_path).tasks("test")
    with pytest.raises(ValueError, match="and have no effect with data"):
        Shop(data=tmp_path, n_products=8)


# --- what the page says, and promises ---------------------------------------------------------------------------------


@given(seed=st.integers(0, 40), n=st.integers(0, 6), rng=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_a_plan_goes_on_from_anywhere(seed: int, n: int, rng: random.Random) -> None:
    world = Shop(max_steps=20)
    task = world.tasks("train")[seed]
    episode, taken = world.start(task), list[str]()
    for _ in range(n):
        actions = [action for action in episode.possible() if action != "click[buy now]"]
        taken.append(rng.choice(actions))
        episode.act(taken[-1])
    plan = world.plan(task, taken)
    assert plan is not None and play(world, task, [*taken, *plan])[-1].success


@pytest.mark.parametrize(
    ("world", "label"),
    [
        (Shop(options=False, n_products=8), "`options: false, n_products: 8`"),
        (Shop(), "the defaults"),
        (Shop(n_products=60, n_attributes=3), "`n_products: 60, n_attributes: 3`"),
    ],
)
def test_what_the_page_says_of_random_play_and_the_oracle(world: Shop, label: str) -> None:
    assert figures(world, label) in page()


def test_the_transcript_of_the_page() -> None:
    world = Shop()
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and is_shown(transcript(play(world, task, plan), plan))


@pytest.mark.extended
def test_all_promises_are_kept() -> None:
    report = check_environment(Shop())
    assert report.ok, str(report)
