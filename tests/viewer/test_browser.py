"""The pages in a real browser: clicked through while a run grows, with nothing asked of another machine.

Left out where there is no Chromium or no Playwright: `apt-get install chromium` and `pip install playwright`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.evaluation.attempts import read_attempts
from rlhf.evaluation.summary import summarize
from rlhf.sinks import JsonlSink, LogLine
from rlhf.viewer.report import write_leaderboard, write_report
from tests.evaluation.synthetic import make_run
from tests.evaluation.test_evaluation_report import attempt, write
from tests.viewer.served import Viewer, hostile_run, viewer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: Where `make install-axe` puts it.
AXE = Path(os.environ.get("AXE_JS", Path(__file__).parents[2] / ".venv/axe/node_modules/axe-core/axe.min.js"))
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    home = tmp_path_factory.mktemp("runs")
    make_run(home / "coin", n_steps=12, n_eval=20)
    make_run(home / "other", n_steps=6, n_eval=20, seed=1)
    hostile_run(home / "hostile")
    with viewer(home) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=[1440, 390])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that must not complain, ask anybody else, or be wider than its window."""
    scheme = "light" if request.param == 1440 else "dark"
    context = browser.new_context(viewport={"width": request.param, "height": 900}, color_scheme=scheme)
    found, wrong = context.new_page(), list[str]()
    found.set_default_timeout(30_000)
    found.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on(
        "request",
        lambda r: None if r.url.startswith(("http://127.0.0.1:", "data:", "file:///")) else wrong.append(r.url),
    )
    yield found
    width = found.evaluate("document.documentElement.scrollWidth")
    context.close()
    assert wrong == []
    assert width <= request.param


def test_runs_curves_and_their_metrics(page: Any, shown: Viewer) -> None:
    page.goto(shown.url)
    page.wait_for_selector(".chart canvas")
    page.get_by_role("link", name="coin").click()
    page.wait_for_selector(".findings")
    assert page.locator("figure.chart:visible").count() >= 6
    assert page.locator(".timeline svg .bar").count() > 10
    page.locator(".fold > summary", has_text="metrics").click()
    page.get_by_label("Find a metric").fill("zero_std")
    page.locator("tr:visible", has_text="n_zero_std_groups").get_by_role("link").click()
    page.wait_for_selector("figure:has-text('credit/n_zero_std_groups') canvas")
    assert "also=credit" in page.url
    page.get_by_label("Overlay another run").select_option("other")
    page.wait_for_selector(".chip:has-text('other')")
    assert "95% interval" in page.locator(".tiles").inner_text()


def test_attempts_are_filtered_opened_and_walked_through_by_keys(page: Any, shown: Viewer) -> None:
    page.goto(f"{shown.url}#/groups/coin")
    page.wait_for_selector("table a.cell")
    page.get_by_label("Outcome").select_option("solved")
    page.get_by_role("button", name="This step").click()
    page.wait_for_selector("a.cell.other")
    assert "outcome=solved" in page.url
    page.locator("a.cell.solved").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".turns .t")
    page.locator(".turns").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "token 3 of" in page.locator(".readout").inner_text()
    assert page.locator(".t.current").count() == 1
    assert page.locator(".t.up, .t.down").count() > 0
    page.locator("label:has(input[value=version])").click()
    page.wait_for_selector(".t.v0")
    assert page.locator("input[value=entropy]").is_disabled()
    page.locator(".siblings select").select_option(index=1)
    page.wait_for_selector(".pair .pane >> nth=1")
    page.get_by_role("button", name="This task at other steps").click()
    page.wait_for_selector(".same:has-text('attempts at this task elsewhere.')")


def test_tokens_are_coloured_by_what_was_stored_of_them(page: Any, shown: Viewer) -> None:
    place = "stage=policy_gradient&phase=train&row=0"
    page.goto(f"{shown.url}#/attempt/coin?{place}&step=11&colour=entropy")
    page.wait_for_selector(".turns .t.sure")
    page.locator("label:has(input[value=gap])").click()
    page.wait_for_selector(".turns .t.down")
    assert page.locator(".t.up").count() == 0  # every gap of these is below 0
    page.locator(".t").first.hover()
    assert {"entropy", "gap"} <= set(page.locator(".readout").inner_text().split())
    page.goto(f"{shown.url}#/attempt/coin?{place}&step=12&colour=gap")
    why = page.locator("label:has(input[value=gap]:disabled)")
    why.wait_for()
    assert page.locator(".turns .t.up, .turns .t.down").count() > 0
    assert why.get_attribute("title").startswith("not recorded: the stage's key token_stats")


def test_all_steps_are_searched_and_evaluations_compared(page: Any, shown: Viewer) -> None:
    page.goto(f"{shown.url}#/groups/coin?all=1&text=pantry")
    page.wait_for_selector(".count:has-text('of 14 files')")
    assert page.locator("td.around", has_text="pantry").count() > 5
    page.goto(f"{shown.url}#/evaluation/coin")
    page.wait_for_selector("table.flips")
    assert page.locator("svg.whisker").count() == 2  # of the two evaluations; the last one's figures are in its row
    page.goto(f"{shown.url}#/evaluation/coin?first=coin:before&second=other:after")
    page.wait_for_selector(".tiles + .findings")
    assert page.locator(".tiles + .findings .look").first.inner_text().startswith("not measured at the same time")
    page.goto(f"{shown.url}#/evaluation/coin")
    page.wait_for_selector("table.flips")
    page.locator("table.flips a").first.click()
    page.wait_for_selector("table.groups a.cell")


def test_hostile_texts_stay_text(page: Any, shown: Viewer) -> None:
    for row in range(8):
        page.goto(f"{shown.url}#/attempt/hostile?stage=0-policy_gradient&phase=train&step=1&row={row}")
        page.wait_for_selector(".summary")
        page.wait_for_selector(f"b:text-is('attempt {row}')")
        assert page.title() == "hostile · rlhf view"
        assert page.locator("main script, main img").count() == 0
    page.goto(f"{shown.url}#/attempt/hostile?stage=0-policy_gradient&phase=train&step=1&row=2")
    page.wait_for_selector("text=<202e>right to left<202c> >> nth=0")
    for view in ("groups", "run", "evaluation"):
        page.goto(f"{shown.url}#/{view}/hostile")
        page.wait_for_selector("h1")
        assert page.title() == "hostile · rlhf view"
    assert "sk-proj" not in page.content()


def test_a_run_that_grows_is_drawn_live(page: Any, tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    values = {"rollout/success": 0.25, "rollout/n_episodes": 8.0}
    for step in (1, 2):
        sink.write(LogLine(step, "0-policy_gradient", time.time(), values))
    with viewer(tmp_path / "run") as own:
        page.goto(f"{own.url}#/run/run")
        page.wait_for_selector("#live.on")
        sink.write(LogLine(3, "0-policy_gradient", time.time(), {**values, "rollout/success": 1.0}))
        written = time.monotonic()
        page.wait_for_selector(".tile:has-text('100%')")
        assert time.monotonic() - written < 10
        assert page.locator(".tile").first.inner_text().split()[1] == "3"
        page.goto("about:blank")


def test_a_page_that_is_opened_before_the_first_step_shows_all_of_it_later(page: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("stages: [{kind: supervised, epochs: 2, batch_size: 8}]\n")
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    with viewer(tmp_path / "run") as own:
        page.goto(f"{own.url}#/run/run")
        page.wait_for_selector("#live.on")
        assert page.locator("figure.chart:visible, summary:has-text('metrics'):visible").count() == 0
        values = {"supervised/loss": 1.25, "supervised/n_demonstrations": 40.0, "train/tokens_per_s": 700.0}
        sink.write(LogLine(1, "0-supervised", time.time(), values))
        page.wait_for_selector(".tile:has-text('1 of 10')")
        assert page.locator(".tile:has-text('Loss')").inner_text().split()[1] == "1.25"
        page.wait_for_selector("figure:has-text('Loss') canvas")
        page.wait_for_selector("summary:has-text('All 3 metrics')")
        page.goto("about:blank")


def test_the_report_is_the_same_page_without_a_server(page: Any, shown: Viewer) -> None:
    run = shown.library.get("coin")
    assert run is not None
    page.goto(f"file://{write_report(run.folder)}")
    page.wait_for_selector("figure.chart:visible canvas")
    assert page.title() == "coin · rlhf report" and "Learned:" in page.locator("main").inner_text()
    page.locator("summary", has_text="Details").click()
    page.wait_for_selector(".facts pre:has-text('policy_gradient')")
    page.get_by_role("link", name="Attempts").click()
    page.wait_for_selector("table a.cell")
    page.get_by_label("Outcome").select_option("solved")
    page.get_by_role("button", name="This step").click()
    page.wait_for_selector("a.cell.other")
    page.locator("a.cell.solved").first.click()
    page.wait_for_selector(".turns .t.up, .turns .t.down")
    page.locator("summary", has_text="prompt tokens").first.click()
    page.get_by_label("Play on after turn").fill("1")
    assert page.locator(".play code").inner_text().endswith("--turns 1")
    page.get_by_role("link", name="Attempts").click()
    page.wait_for_selector("input[name=text]")
    page.locator("input[name=text]").fill("PANTRY")
    page.get_by_role("button", name="All steps").click()
    page.wait_for_selector("td.around:has-text('pantry')")
    page.get_by_role("link", name="Evaluation").click()
    page.wait_for_selector("table.flips")
    page.locator("select[name=first]").select_option("coin:after")  # the other way round than it is held
    page.wait_for_selector("text=These are the same evaluation.")
    page.locator("select[name=second]").select_option("coin:before")
    page.wait_for_selector(".tile:has-text('−')")


def test_ranks_and_a_pair_of_runs(page: Any, shown: Viewer) -> None:
    page.goto(f"{shown.url}#/leaderboard")
    page.wait_for_selector(".board .whisker >> nth=1")
    assert page.locator(".board .whisker").count() == 2
    page.goto(f"{shown.url}#/run/coin?with=other")
    page.wait_for_selector("table:has-text('coin against other')")


def test_ranks_show_pass_at_k_where_tasks_were_attempted_k_times(page: Any, tmp_path: Path) -> None:
    for n in (2, 1):  # the second task is solved in one of two attempts: pass@2 is 1, and success 3/4
        tasks = {f"house/{i}": [attempt(f"house/{i}", j, i == 0 or j == 0, 2) for j in range(n)] for i in range(2)}
        page.goto(f"file://{write_leaderboard(tmp_path / 'board.html', [write(tmp_path / str(n), dict(tasks))])}")
        page.wait_for_selector(".board .whisker")
        heads = page.locator(".board thead th").all_text_contents()
        assert [head for head in heads if "pass" in head] == ["pass@2"] * (n == 2)
        assert page.locator(".board td[data-title='pass@2']").all_text_contents() == ["100%"] * (n == 2)
        assert page.locator(".board td[data-title='Success']").all_text_contents() == ["75%" if n == 2 else "100%"]


def test_a_report_has_a_table_of_each_column_that_results_are_broken_down_by(page: Any, tmp_path: Path) -> None:
    tasks = {f"house/{i}": [attempt(f"house/{i}", 0, i == 0, 2)] for i in range(3)}
    folder = write(tmp_path / "one", dict(tasks))
    by = {"level": {f"house/{i}": f"Level {i // 2}" for i in range(3)}}
    summary = json.loads((folder / "summary.json").read_text())
    summary |= summarize(read_attempts(folder / "trajectories"), by=by)
    (folder / "summary.json").write_text(json.dumps(summary))
    page.goto(f"file://{write_report(folder)}")
    found = page.locator("table:has-text('By level')")
    found.wait_for()
    assert found.locator("th.task").all_text_contents() == ["Level 0", "Level 1"]
    assert found.locator("td[data-title='Success']").all_text_contents() == ["50%", "0%"]
    assert found.locator("td[data-title='Tasks']").all_text_contents() == ["2", "1"]


def test_nothing_keeps_a_screen_reader_out(page: Any, shown: Viewer) -> None:
    if not AXE.is_file():
        pytest.skip("no axe-core: make install-axe")
    run, place = shown.library.get("coin"), "stage=policy_gradient&phase=train&step=11"
    assert run is not None
    views = {
        "runs": ".chart canvas",
        "run/coin?with=other": "table:has-text('coin against other')",
        f"groups/coin?{place}&outcome=solved": "a.cell",
        "groups/coin?all=1&text=pantry": "td.around",
        f"attempt/coin?{place}&row=0&beside=1": ".pair .pane >> nth=1",
        f"attempt/coin?{place}&row=0&colour=entropy": ".t.sure",
        "evaluation/coin": "table.flips",
        "leaderboard": ".board",
    }
    report = f"file://{write_report(run.folder)}"
    pages = [(f"{shown.url}#/{view}", there) for view, there in views.items()]
    for address, there in [*pages, (report, "figure.chart:visible canvas")]:
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector(there)
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        page.wait_for_timeout(300)
        page.evaluate(f"() => {{ {AXE.read_text()} }}")
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        assert len(found["passes"]) > 10
        faults = [
            (v["id"], v["nodes"][0]["html"]) for v in found["violations"] if v["impact"] in ("serious", "critical")
        ]
        assert not faults, address


def test_a_long_table_shows_its_first_rows_and_then_all(page: Any, shown: Viewer) -> None:
    page.goto(shown.url)
    page.wait_for_selector(".chart canvas")
    n = page.evaluate(
        """async () => {
            const { h, table } = await import("./static/dom.js");
            const rows = [...Array(23).keys()].map((i) => h("tr", null, h("td", null, i)));
            document.body.append(h("div", { id: "long" }, table("Many", [{ title: "n" }], rows, { most: 20 })));
            return rows.length;
        }"""
    )
    assert page.locator("#long tbody tr:visible").count() == 20
    page.locator("#long").get_by_role("button", name=f"Show all {n}").click()
    assert page.locator("#long tbody tr:visible").count() == n
    assert page.locator("#long button").count() == 0


def test_numbers_and_times_are_written_alike(page: Any, shown: Viewer) -> None:
    page.goto(shown.url)
    written = page.evaluate(
        """async () => {
            const { clock, number } = await import("./static/dom.js");
            return [[-1.5, 0.0004, 0.00001, -12345, null].map((v) => number(v)), [45, 187, 3780].map((v) => clock(v))];
        }"""
    )
    assert written == [["−1.5", "0.0004", "1.0e−5", "−12,345", "–"], ["45 s", "3:07", "1:03 h"]]


def test_a_page_is_small(browser: Any, shown: Viewer) -> None:
    page, sizes = browser.new_page(), list[int]()
    page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    for view, there in (("run/coin", ".chart canvas"), ("groups/coin", "a.cell"), ("evaluation/coin", "table.flips")):
        page.goto("about:blank")
        sizes.clear()
        page.goto(f"{shown.url}#/{view}")
        page.wait_for_selector(there)
        page.wait_for_timeout(200)
        assert 50_000 < sum(sizes) < 600_000
    page.close()
