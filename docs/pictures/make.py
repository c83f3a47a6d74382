"""Creates the pictures of the web page and of `mgpu inspect` on a cluster of this machine: `make pictures`.

Needs a chromium or google-chrome on PATH.
"""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console

from mgpu.settings import load_settings
from playground.cluster import Cluster
from playground.demo import Demo
from playground.nodes import make_nodes, slice_nodes, two_cards

HERE = Path(__file__).parent
COLOURS = 128
SECONDS = 60_000
"""In milliseconds, as playwright has it."""
PAGES: tuple[tuple[str, int, int, Literal["light", "dark"]], ...] = (
    ("page", 1280, 800, "light"),
    ("page-narrow", 390, 844, "dark"),
)


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        raise SystemExit("no chromium or google-chrome is on PATH")
    with Cluster([*make_nodes(3, 4), *slice_nodes(), two_cards()], components=("dra",)) as cluster:
        print("The demo's pods are being created …", flush=True)
        problems = Demo(cluster, Console(file=io.StringIO()), load_settings()).run()
        if problems:
            raise SystemExit("; ".join(problems))
        page_pictures(cluster.page_url, browser)
        terminal = [sys.executable, str(HERE / "terminal.py"), "mgpu inspect", str(HERE / "inspect.svg")]
        environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        subprocess.run([*terminal, sys.executable, "-m", "mgpu.cli.main", "inspect"], env=environ, check=True)


def page_pictures(url: str, browser: str) -> None:
    with sync_playwright() as driver:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=browser, args=root)
        for name, width, height, scheme in PAGES:
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(url)
            expect(page.locator("#status")).to_have_text("live", timeout=SECONDS)
            expect(page.locator("#pods .reasons").first).not_to_be_empty(timeout=SECONDS)
            take(page, HERE / f"{name}.png")
        chromium.close()


def take(page: Page, file: Path) -> None:
    """With a palette: a fifth of the size."""
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size >> 10} KiB", flush=True)


if __name__ == "__main__":
    main()
