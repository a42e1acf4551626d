"""What is kept for the next attempt, and what goes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from environments.contrib.instance_pool import InstancePool


@dataclass(eq=False)
class Book:
    """Something that is made for a name, and notes whether it was closed."""

    name: str
    is_whole: bool = True
    closed: list[bool] = field(default_factory=list)

    def close(self) -> None:
        self.closed.append(True)


def shelf(*, most: int = 2, any_will_do: bool = False) -> InstancePool[str, Book]:
    return InstancePool(
        Book,
        lambda book: book.name,
        most=most,
        close=Book.close,
        is_usable=lambda book: book.is_whole,
        any_will_do=any_will_do,
    )


def test_what_came_back_is_given_again_and_never_to_two() -> None:
    books = shelf()
    first = books.take("a")
    assert books.take("a") is not first
    books.give_back(first)
    assert books.take("b") is not first and books.take("a") is first


def test_the_longest_unused_one_goes_and_so_does_one_that_is_broken() -> None:
    books = shelf(most=2)
    made = [books.take(name) for name in "abc"]
    for book in made:
        books.give_back(book)
    assert [book.closed for book in made] == [[True], [], []]
    broken = Book("d", is_whole=False)
    books.give_back(broken)
    assert broken.closed and books.take("b") is made[1]
    books.clear()
    assert made[2].closed and not made[1].closed


def test_one_that_broke_while_idle_goes_and_the_next_one_is_given() -> None:
    books = shelf()
    first, second = books.take("a"), books.take("a")
    books.give_back(first)
    books.give_back(second)
    second.is_whole = False
    assert books.take("a") is first and second.closed and not first.closed


def test_any_will_do_where_the_right_one_is_missing() -> None:
    books = shelf(any_will_do=True)
    first, second = books.take("a"), books.take("b")
    books.give_back(first)
    books.give_back(second)
    assert books.take("b") is second and books.take("c") is first and books.take("c") is not first


def test_threads_never_hold_the_same_one() -> None:
    books, held, twice = shelf(most=3), set[int](), list[int]()

    def use(_: int) -> None:
        for name in "ab" * 50:
            book = books.take(name)
            if id(book) in held:
                twice.append(id(book))
            held.add(id(book))
            held.remove(id(book))
            books.give_back(book)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert not twice
