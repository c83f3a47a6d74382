"""Makes text from the cluster safe to print on a terminal.

Kubernetes restricts the names of objects, but annotations, conditions, card models, addresses and answers of webhooks
can contain any text of a user: escape sequences that clear the screen or set the window title, or line ends that
imitate further output. Every command must print such text through `printable`, `one_line` or
`mgpu.presentation.terminal`.
"""

from collections.abc import Sequence


def printable(text: str) -> str:
    """Return the text with each character that is not printable, except line ends, replaced by U+FFFD."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def one_line(text: str) -> str:
    """Return the text on one line, with each character that is not printable replaced by U+FFFD."""
    return printable(" ".join(text.split()))


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first `most` names and the number of the others, such as `n1, n2, n3 and 4 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
