"""Charts are valid SVG, say what they show, and put points where their values are."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.charts import (
    Band,
    Series,
    line_chart,
    nice_ticks,
    number_text,
    smooth,
)
from rlhf.errors import DataError
from rlhf.evaluation.wording import duration_text, percent_text

NS = "{http://www.w3.org/2000/svg}"
VALUES = st.lists(st.none() | st.floats(-1e6, 1e6) | st.just(math.nan), max_size=30)


def chart(*series: Series, **options: object) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(series, "T", "step", "share", **options))  # type: ignore[arg-type]


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{NS}text")]


def test_points_lie_where_their_values_are() -> None:
    svg = chart(Series("a", [0, 10, 20], [0.0, 0.5, 1.0]), y_range=(0.0, 1.0), percent=True, width=600, height=300)
    [line] = svg.iter(f"{NS}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    # The plot spans x 52..584 and y 262..58: margins of 52, 16 (right), 38 (below) and 58 pixels (above).
    assert points == [(52, 262), (318, 160), (584, 58)]
    assert {"0%", "20%", "100%"} <= set(texts(svg))


@given(a=VALUES, b=VALUES)
def test_any_values_give_a_valid_chart_inside_its_frame(a: list[float | None], b: list[float | None]) -> None:
    svg = chart(Series("a", range(len(a)), a), Series("b", range(len(b)), b))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for line in svg.iter(f"{NS}polyline"):
        for x, y in re.findall(r"([-\d.]+),([-\d.]+)", line.attrib["points"]):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height
    for dot in svg.iter(f"{NS}circle"):
        assert 0 <= float(dot.attrib["cx"]) <= width and 0 <= float(dot.attrib["cy"]) <= height


def test_a_gap_splits_the_line() -> None:
    svg = chart(Series("a", range(6), [1, 2, None, 3, math.nan, 4]))
    assert [len(line.attrib["points"].split()) for line in svg.iter(f"{NS}polyline")] == [2, 1, 1]


def test_it_says_in_words_what_it_shows() -> None:
    svg = chart(Series("ours <1>", [1, 60], [0.1, 0.9]), percent=True)
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "T. ours <1>: 10% at step 1, 90% at step 60."
    assert [t.text for t in svg.iter(f"{NS}title")] == ["ours <1>, step 1: 10%", "ours <1>, step 60: 90%"]
    assert "No data" in chart().attrib["aria-label"]


def test_long_curves_have_few_hover_targets() -> None:
    svg = chart(Series("a", range(10_000), [float(i) for i in range(10_000)]))
    assert len(list(svg.iter(f"{NS}title"))) <= 150


def test_series_of_one_label_share_colour_and_legend() -> None:
    svg = chart(Series("a", [0, 1], [0.0, 1.0]), Series("a", [0, 1], [0.1, 0.9]), Series("b", [0, 1], [0.5, 0.6]))
    first, second, other = (line.attrib["style"] for line in svg.iter(f"{NS}polyline"))
    assert first == second != other
    assert texts(svg).count("a") == texts(svg).count("b") == 1


@given(
    labels=st.lists(st.text("abcdefgh -_", min_size=1, max_size=30), min_size=2, max_size=6, unique=True),
    y_label=st.text("share of", max_size=40),
)
def test_a_legend_covers_neither_itself_nor_the_label_of_its_axis(labels: list[str], y_label: str) -> None:
    drawn = [Series(label, [0, 1], [0.0, 1.0]) for label in labels]
    svg = ElementTree.fromstring(line_chart(drawn, "T", "step", y_label, width=400))
    height, spans = float(svg.attrib["viewBox"].split()[3]), []
    for element in list(svg.iter(f"{NS}text"))[-len(labels) - 1 :]:
        # A character of the 12 pixel fonts that a page names is 6.7 pixels wide at most on average.
        x, y, n = float(element.attrib["x"]), float(element.attrib["y"]), len(element.text or "")
        mark = 19 if spans else 0  # an entry begins with its line
        spans.append((y, x - mark, x + 6.7 * n))
    top = min(float(line.attrib["y1"]) for line in svg.iter(f"{NS}line") if line.attrib["class"] == "grid")
    for i, (y, left, right) in enumerate(spans):
        assert left >= 0 and right <= 400 and y < top < height
        assert all(y != other or right <= begin or end <= left for other, begin, end in spans[:i])


def test_a_legend_with_room_stands_beside_the_label() -> None:
    svg = chart(Series("a", [0, 1], [0.0, 1.0]), Series("b", [0, 1], [1.0, 0.0]), height=300)
    assert svg.attrib["viewBox"] == "0 0 560 300"
    assert [t.attrib["y"] for t in svg.iter(f"{NS}text") if t.text in ("a", "b", "share")] == ["40", "40", "40"]
    # 400 pixels less margins of 8 and 16 hold an entry of 36 + 6.7 x 20 = 170 pixels twice, but not beside a label.
    svg = chart(Series("a" * 20, [0, 1], [0.0, 1.0]), Series("b" * 20, [0, 1], [1.0, 0.0]), width=400, height=300)
    assert svg.attrib["viewBox"] == "0 0 400 320"


def test_rounding_is_drawn_flat() -> None:
    svg = chart(Series("a", [0, 1, 2], [0.999998, 1.0, 0.999999]), percent=True)
    [line] = svg.iter(f"{NS}polyline")
    heights = [float(p.split(",")[1]) for p in line.attrib["points"].split()]
    assert max(heights) - min(heights) < 1
    percents = [t for t in texts(svg) if t.endswith("%")]
    assert len(set(percents)) == len(percents) > 2


def test_intervals_are_shades_around_lines() -> None:
    band = Band("a", [0, 1], [0.1, 0.2], [0.3, 0.4])
    assert len(list(chart(Series("a", [0, 1], [0.2, 0.3]), bands=[band]).iter(f"{NS}polygon"))) == 1


def test_a_chart_carries_its_styles() -> None:
    assert "prefers-color-scheme: dark" in line_chart([], "T", "x", "y")


def test_unequal_lengths_are_an_error() -> None:
    with pytest.raises(DataError):
        Series("a", [1, 2], [1.0])


@given(low=st.floats(-1e5, 1e5), span=st.floats(1e-3, 1e5))
def test_ticks_are_round_even_and_inside(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert 1 <= len(ticks) <= 7
    assert all(low - span * 1e-6 <= t <= low + span * (1 + 1e-6) for t in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        leading = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(leading - nice) for nice in (1, 2, 5, 10)) < 0.01


def test_smoothing_by_hand() -> None:
    # window 3: ends average two values; the gap is left out: (2 + 6)/2 and (6 + 8)/2
    assert smooth([1.0, 2.0, None, 6.0, 8.0], 3) == [1.5, 1.5, 4.0, 7.0, 7.0]
    assert smooth([None, None], 3) == [None, None]
    assert smooth([1.0, 5.0], 1) == [1.0, 5.0]


def test_numbers_are_written_briefly() -> None:
    assert [number_text(x) for x in (0, 0.25, 3.14159, 12_000, 2.5e6, 3.1e-6, -2e-5)] == [
        "0", "0.25", "3.142", "12k", "2.5M", "3.1e-6", "-2e-5",
    ]  # fmt: skip
    assert [percent_text(x) for x in (0, 0.6000000001, 0.975, 1)] == ["0%", "60%", "97.5%", "100%"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (299.7, "5 min 0 s"),
        (3599.6, "1 h 0 min"),
        (9000, "2 h 30 min"),
        (86_400 * 3, "3 d 0 h"),
    ],
)
def test_a_duration_is_rounded_before_it_is_split(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_share_that_is_not_quite_none_or_all_does_not_look_so() -> None:
    assert [percent_text(x) for x in (0.0001, 0.0005, 0.9994, 0.99999)] == ["<0.1%", "0.1%", "99.9%", ">99.9%"]
