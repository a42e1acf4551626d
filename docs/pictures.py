"""The pictures of the README: pages of the viewer while the quickstart trains, and when it is done.

    python docs/pictures.py                    # trains the quickstart, minutes
    python docs/pictures.py --run runs/mine    # of a run that is finished

It takes Debian's `chromium` and the extra `dev`. Each picture is at most 150 kB.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).parent / "images"
WIDTH, HEIGHT, MOST = 1440, 900, 150_000
#: Window of a phone.
NARROW, TALL = 390, 844
#: Step at which the live picture is taken.
LIVE = 12
CLI = [sys.executable, "-m", "rlhf.cli"]


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """Inside, a viewer shows the runs of a folder; its address."""
    command = [*CLI, "view", str(folder), "--port", "0", "--json", "--until-closed"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.stdin.close()


def taken(page: Any) -> Image.Image:
    """Screenshot of a page after its animations."""
    page.wait_for_timeout(800)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def keep(picture: Image.Image, name: str) -> None:
    """Write a picture in as few colours as it takes to be small."""
    path = FOLDER / f"viewer-{name}.png"
    for colours in (256, 128, 64):
        picture.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= MOST:
            break
    print(f"{path}  {path.stat().st_size / 1000:.0f} kB", flush=True)


def curves(page: Any, url: str, run: str) -> None:
    """The curves of a run, as it trains or as it was."""
    page.goto(f"{url}#/run/{run}")
    page.wait_for_selector("#live.on")
    page.evaluate("window.scrollTo(0, 0)")
    keep(taken(page), "curves")


def finished(page: Any, url: str, run: str) -> str:
    """Attempts of an early step, one of them token by token, and the evaluation; returns where the tokens are."""
    with urllib.request.urlopen(f"{url}api/run/{run}/steps") as answer:
        stage = next(one for one in json.load(answer)["stored"] if one["phase"] == "train")
    where = f"stage={stage['stage']}&phase=train&step={stage['steps'][min(2, len(stage['steps']) - 1)]}"
    page.goto(f"{url}#/groups/{run}?{where}")
    page.wait_for_selector("table a.cell")
    keep(taken(page), "attempts")
    telling(page)
    tokens = str(page.url)
    page.locator(".t.down").first.hover()
    keep(taken(page), "tokens")
    page.goto(f"{url}#/evaluation/{run}")
    page.wait_for_selector("table.flips")
    page.evaluate("window.scrollTo(0, 0)")
    keep(taken(page), "evaluation")
    return tokens


def phone(page: Any, url: str, run: str, tokens: str) -> None:
    """Curves, attempts and the tokens of one on a phone in the dark, side by side."""
    shown = []
    for where, there in ((f"{url}#/run/{run}", ".chart canvas"), (f"{url}#/groups/{run}", "a.cell"), (tokens, ".t.up")):
        page.goto(where)
        page.wait_for_selector(there)
        page.evaluate("window.scrollTo(0, 0)")
        shown.append(taken(page))
    gap = 24
    beside = Image.new("RGB", (3 * NARROW + 2 * gap, TALL), "white")
    for i, one in enumerate(shown):
        beside.paste(one, (i * (NARROW + gap), 0))
    keep(beside, "phone")


def telling(page: Any) -> None:
    """Open an attempt that was trained towards in some tokens and away from in others, near its beginning."""
    found = page.locator("tr:has(a.cell.solved):has(a.cell.failed) a.cell")
    for address in [found.nth(i).get_attribute("href") for i in range(min(found.count(), 40))]:
        page.goto(page.url.partition("#")[0] + address)
        page.wait_for_selector(f"a.cell.here[href*='{address.rpartition('row=')[2]}']")
        page.wait_for_selector(".turns .t")
        signs = page.evaluate("[...document.querySelectorAll('.t')].slice(0, 12).map((t) => t.className)")
        if {"t up", "t down"} <= set(signs):
            return


def steps_of(url: str, run: str) -> int:
    """Steps that a run has done of its last stage, 0 before that."""
    with urllib.request.urlopen(f"{url}api/runs") as answer:
        found = [one for one in json.load(answer)["runs"] if one["id"] == run]
    return int(found[0]["step"]) if found and found[0]["stage"].endswith("policy_gradient") else 0


def main() -> None:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run that is finished")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home, sync_playwright() as play:
        folder = given.run or Path(home) / "quickstart"
        training = None
        if given.run is None:
            folder.mkdir()
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*CLI, "train", "quickstart", "stages.1.token_stats={}", "--out", str(folder)]
            training = subprocess.Popen(command, env=environment)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        with viewer(folder) as url:
            if training is not None:
                while steps_of(url, folder.name) < LIVE:
                    if training.poll() is not None:
                        sys.exit("the training ended before its picture was taken")
                    time.sleep(1)
            curves(page, url, folder.name)
            if training is not None:
                training.wait()
            tokens = finished(page, url, folder.name)
            narrow = browser.new_page(viewport={"width": NARROW, "height": TALL}, color_scheme="dark")
            phone(narrow, url, folder.name, tokens)
        browser.close()


if __name__ == "__main__":
    main()
