"""Numbers as a reader wants them: shares, sizes and durations."""

from __future__ import annotations


def percent_text(value: float) -> str:
    """Percentage with at most one decimal; near 0 or 100 is never rounded to it."""
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < 1:
        return ">99.9%"
    text = f"{100 * value:.1f}"
    return text.removesuffix(".0") + "%"


def number_text(value: float) -> str:
    """Write a number briefly: 0.25, 12k, 3.1e-6."""
    size = abs(value)
    if size >= 10_000:
        return f"{value / 1000:.4g}k" if size < 1e6 else f"{value / 1e6:.4g}M"
    if 0 < size < 0.001:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Duration in its two largest units, rounded first: 45 s, 5 min 0 s, 2 h 30 min, 3 d 4 h."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    if round(seconds) < 3600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return "{} h {} min".format(*divmod(minutes, 60))
    return "{} d {} h".format(*divmod(round(seconds / 3600), 24))
