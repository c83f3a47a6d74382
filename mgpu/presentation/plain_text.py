"""Text for a terminal: whatever others have put into the cluster's objects is text there, and no command.

Names of pods are harmless. Annotations, conditions, models, addresses and what webhooks answer may hold anything:
sequences that clear the screen or retitle the window, line ends that feign a further line. Pure.
"""

from collections.abc import Sequence


def plain(text: str) -> str:
    """Each character that is no print is replaced by one that says so; lines stay lines."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def one_line(text: str) -> str:
    """The same, on one line."""
    return plain(" ".join(text.split()))


def listed(names: Sequence[str], most: int = 3) -> str:
    """`n1, n2, n3 and 4 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
