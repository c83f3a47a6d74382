"""A picture of what a command prints on a terminal: `terminal.py TITLE FILE.svg COMMAND…`."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100


def printed(command: list[str]) -> str:
    """With colours, since it runs on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    found = b""
    try:
        while piece := os.read(ours, 65536):
            found += piece
    except OSError:  # on Linux the end of a pseudo-terminal is an error
        pass
    process.wait()
    return found.decode().replace("\r\n", "\n").rstrip("\n")


def main() -> None:
    title, file, *command = sys.argv[1:]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(printed(command)))
    # Without the fonts that rich would have fetched from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
    Path(file).write_text(svg.replace("Fira Code, monospace", "monospace").replace("font-family: Fira Code;", ""))


if __name__ == "__main__":
    main()
