"""MiniWoB++: pages as text, what actions do to them, what counts as solved; played where Chromium is there."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from pydantic import ValidationError

from environments.base import Environment
from environments.check import check_environment
from environments.contrib.miniwob.environment import SCRIPTED, TASKS, MiniWoB, scripted
from environments.contrib.miniwob.page import POOL, Element, View, found
from rlhf.child_process import Child, python_environment
from rlhf.errors import MissingPackageError
from tests.environments.worlds import play

HAS_DRIVER = bool(shutil.which("chromedriver") or os.environ.get("MINIWOB_CHROMEDRIVER"))
browsed = pytest.mark.skipif(
    importlib.util.find_spec("miniwob") is None or not HAS_DRIVER,
    reason="miniwob, chromium or chromium-driver is not installed",
)
LOGIN = View(
    'Enter the username "ann" and the password "x1" into the text fields and press login.',
    (
        Element(9, "label", "Username"),
        Element(10, "input_text", "", True),
        Element(-1, "t", "and then"),
        Element(12, "input_password", ""),
        Element(13, "button", "Login"),
    ),
)
LIST = View("Select Ida from the list and click Submit.", (Element(3, "select", "Bo", options=("Bo", "Ida")),
                                                           Element(4, "button", "Submit")))  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    """No browser is left behind."""
    yield
    POOL.clear()


def test_a_page_is_told_by_numbered_elements() -> None:
    assert LOGIN.text.splitlines() == [
        '[1] label "Username"', "[2] input_text (on)", '"and then"', "[3] input_password", '[4] button "Login"'
    ]  # fmt: skip
    assert LIST.text.splitlines() == ['[1] select "Bo" of Bo, Ida', '[2] button "Submit"']
    # The package's own numbers count on from page to page, and are no part of a state.
    moved = tuple(Element(e.ref + 5 if e.ref > 0 else e.ref, e.tag, e.text, e.is_on) for e in LOGIN.elements)
    assert View(LOGIN.asked, moved).key == LOGIN.key != View("Click.", LOGIN.elements).key
    assert View("", (), True, -1.0).key != View("", (), True, 1.0).key


def test_the_script_types_what_is_quoted_and_chooses_what_is_named() -> None:
    assert scripted(LOGIN) == ['type 2 "ann"', 'type 3 "x1"', "click 4"]
    assert scripted(LIST) == ['type 1 "Ida"', "click 2"]
    boxes = (Element(1, "input_checkbox", ""), Element(-1, "t", "ab"), Element(2, "input_checkbox", ""),
             Element(-2, "t", "cd"), Element(3, "button", "Submit"))  # fmt: skip
    assert scripted(View("Select cd and click Submit.", boxes)) == ["click 2", "click 3"]
    assert scripted(View("Select nothing and click Submit.", boxes)) == ["click 3"]
    words = (Element(1, "span", "ok"), Element(2, "input_text", ""), Element(3, "button", "ok"))
    assert scripted(View('Click on the "ok" button.', words)) == ["click 3"]
    assert scripted(View("Focus into the textbox.", words[1:2])) == ["click 1"]


def test_a_share_of_the_pay_of_a_page_is_no_solution() -> None:
    assert [View("", (), True, reward).solved for reward in (-1.0, 0.0, 0.6, 1.0)] == [False, False, False, True]
    assert not View("", (), False, 1.0).solved


def test_tasks_are_named_and_split_by_seed() -> None:
    with pytest.raises(ValidationError, match="did you mean 'click-button'"):
        MiniWoB(task="click-buton")
    assert MiniWoB(task="miniwob/click-test-v1").task == "click-test" and set(TASKS) > SCRIPTED
    assert MiniWoB().demonstrates and not MiniWoB(task="email-inbox").demonstrates
    assert pickle.loads(pickle.dumps(MiniWoB())) == MiniWoB()


def test_a_program_that_is_not_there_is_named() -> None:
    assert found("no-such-program", "sh").endswith("/sh")
    with pytest.raises(MissingPackageError, match="chromium-driver"):
        found("no-such-program")


@browsed
def test_a_login_is_typed_and_paid_without_regard_to_time() -> None:
    world = MiniWoB(task="login-user")
    assert isinstance(world, Environment)
    task = world.tasks("test")[0]
    plan = world.plan(task, ()) or ()
    opening, *results = play(world, task, plan)
    assert len(plan) == 3 and opening.reply.startswith("Task: Enter the username")
    # What is typed is read back from the page, and the last click ends it: 1, whatever the seconds.
    assert plan[0].split(" ")[2] in results[0].reply and results[0].state_key != opening.state_key
    assert results[-1].terminated and results[-1].success and results[-1].reward == 1.0
    assert world.plan(task, plan[:1]) is not None


@browsed
def test_wrong_clicks_and_other_words() -> None:
    world = MiniWoB(max_steps=2)
    task = world.tasks("test")[0]
    [right] = world.plan(task, ()) or ()
    wrong = next(a for a in play(world, task, [])[0].admissible_actions if a != right)
    _, result = play(world, task, [wrong])
    assert result.terminated is False or result.success is False
    _, first, second = play(world, task, ["please", "click 99"])
    assert not first.valid and first.reply.startswith("Unknown action.") and second.truncated
    assert second.success is False and second.state_key == first.state_key


@browsed
@pytest.mark.parametrize("name", ["choose-list", "click-checkboxes"])
def test_the_script_solves_and_seeds_are_pages(name: str) -> None:
    world = MiniWoB(task=name)
    tasks = world.tasks("test")[:5]
    assert all(world.plan(task, ()) for task in tasks)
    assert len({play(world, task, [])[0].reply for task in tasks}) == 5
    assert play(world, tasks[0], [])[0] == play(world, tasks[0], [])[0]


@browsed
def test_some_right_boxes_are_paid_and_do_not_solve() -> None:
    world, paid = MiniWoB(task="click-checkboxes"), 0
    for task in world.tasks("test")[:10]:
        opening = play(world, task, [])[0]
        submit = [action for action in opening.admissible_actions if action.startswith("click ")][-1]
        result = play(world, task, [submit])[-1]
        assert result.terminated and result.success is (result.reward == 1)
        paid += 0 < result.reward < 1
        assert world.plan(task, [submit]) == ([] if result.success else None)
    assert paid


@browsed
def test_random_actions_seldom_solve() -> None:
    world, solved = MiniWoB(task="click-button", max_steps=1), 0
    for task in world.tasks("test")[:10]:
        rng = random.Random(task.seed)
        opening = play(world, task, [])[0]
        solved += bool(play(world, task, [rng.choice(opening.admissible_actions)])[-1].success)
    assert solved < 8


BROWSES = """
import time
from environments.contrib.miniwob.environment import MiniWoB
world = MiniWoB()
episode = world.start(world.tasks("train")[0])
print("begun", flush=True)
time.sleep(600)
"""


@browsed
def test_a_browser_ends_with_a_process_that_is_killed() -> None:
    holder = Child([sys.executable, "-c", BROWSES], env=python_environment())
    try:
        assert holder.line(time.monotonic() + 60) == b"begun"
        started = psutil.Process(holder.popen.pid).children(recursive=True)
        assert any("chromium" in process.name() or "chrome" in process.name() for process in started)
        holder.popen.kill()  # this process alone
        assert not psutil.wait_procs(started, timeout=30)[1]
    finally:
        holder.kill()


@browsed
@pytest.mark.extended
def test_all_promises_are_kept() -> None:
    report = check_environment(MiniWoB(n_train=20, n_dev=20, n_test=20))
    assert report.ok, str(report)
