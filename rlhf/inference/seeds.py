"""Seeds derived by a hash of what they are for."""

from __future__ import annotations

import hashlib


def stable_seed(*parts: int | str) -> int:
    """63-bit seed from `parts`, the same on every process, machine and Python version.

    Parts keep their kind and their borders: `("ab", "c")`, `("a", "bc")`, `(1,)` and `("1",)` give four seeds.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'i' if isinstance(part, int) else 's'}{part}".encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> 1
