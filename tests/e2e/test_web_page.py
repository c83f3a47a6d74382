"""Tests the web page in a real browser on a running cluster: pods appear, can be searched, and show why they wait.

Needs a chromium on PATH. Browsers of playwright are never downloaded.
"""

import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from playground.cluster import Cluster
from playground.nodes import make_nodes
from tests.e2e.bench import Bench, share
from tests.e2e.clusters import patient

SECONDS = 20_000
"""Timeout in milliseconds, long enough for a browser on a busy machine."""
FOCUS = """async () => {
  const { Waiting } = await import("/waiting.js");
  const list = document.body.appendChild(document.createElement("ul"));
  const waiting = new Waiting(list);
  const show = (names, nodes, at) => {
    const reasons = ["a", "b", "c", "d"].map((text) => ({ text, nodes, examples: [] }));
    const pods = names.map((name) => ({ name, asks: "", why: 0 }));
    waiting.show(pods, [], { total: names.length, pods, whys: [{ fits: 0, of: 9, reasons, at }] });
  };
  show(["p", "q"], 1, 1);
  const [, row] = list.children;
  row.querySelector("details").open = true;
  row.querySelector("summary").focus();
  show(["new", "q"], 1, 2);
  const stays = row === list.children[1];
  show(["new", "q"], 2, 3);
  const summary = list.children[1].querySelector("details[open] summary");
  const kept = document.activeElement === summary;
  list.remove();
  return [stays, kept];
}"""
TILE = 'section[data-node="{}"] .tile[data-card="{}"]'


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A separate cluster, because the page also shows reservations, and those of other modules may last for 30 s."""
    with patient(make_nodes(2, 4)) as made:
        yield made


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """The opened page. Any error or warning in the browser's console fails the module."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no chromium or google-chrome is installed")
    cluster: Cluster = request.getfixturevalue("cluster")  # started only if there is a browser
    complaints: list[str] = []
    with sync_playwright() as driver:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=found, args=root)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(SECONDS)
        expect.set_options(timeout=SECONDS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(cluster.page_url)
        expect(page.locator("#status")).to_have_text("live")
        yield page
        browser.close()
    assert complaints == []


def sees(page: Page, selector: str, text: str) -> None:
    expect(page.locator(selector).first).to_contain_text(text)


def count(page: Page, selector: str, number: int) -> None:
    expect(page.locator(selector)).to_have_count(number)


def test_a_pod_appears_by_itself_is_found_and_opened(page: Page, bench: Bench) -> None:
    sees(page, "#totals", "2 nodes · 8 cards · 8 idle")
    bench.create(share("training", core=30, mib=4096))
    sees(page, ".names", "training")
    sees(page, "#totals", "7 idle")
    node, card = bench.runs("training").spec.node_name, bench.cards("training")["c"][0]
    expect(page.locator(TILE.format(node, card))).to_contain_text(re.compile(r"30 % · (0/)?4 GiB"))

    page.keyboard.press("/")
    page.keyboard.type("default/TRAIN")
    count(page, ".tile", 1)
    expect(page.locator("#found")).to_have_text("1 node, 1 card")
    page.fill("#search", "node-1")
    count(page, ".tile", 4)
    page.fill("#search", "nobody has this name")
    expect(page.locator("#none")).to_be_visible()
    page.fill("#search", "")
    page.select_option("#state", "free")
    count(page, ".tile", 7)
    page.select_option("#state", "")
    page.select_option("#dialect", "mgpu")
    count(page, ".tile", 1)

    page.locator(".tile").click()
    detail = page.locator("#detail")
    expect(detail).to_contain_text(f"GPU-{node}-{card}")
    expect(detail.locator("tbody tr")).to_have_text(re.compile(r"default/trainingcmgpu([0?]/)?30 %([0?]/)?4 GiB"))
    page.keyboard.press("Escape")
    expect(detail).not_to_be_visible()
    bench.delete("training")
    count(page, ".tile", 0)
    page.select_option("#dialect", "")
    count(page, ".tile", 8)


def test_arrow_keys_move_between_the_cards_and_enter_opens_one(page: Page) -> None:
    page.locator(TILE.format("node-1", 0)).focus()
    for key, node, card in (
        ("ArrowRight", "node-1", "1"),
        ("ArrowLeft", "node-1", "0"),
        ("ArrowDown", "node-2", "0"),
        ("ArrowUp", "node-1", "0"),
        ("End", "node-2", "0"),
        ("ArrowLeft", "node-1", "3"),
    ):
        page.keyboard.press(key)
        expect(page.locator(f"{TILE.format(node, card)}:focus")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text("node-1, card 3")
    page.locator("#close").click()
    expect(page.locator(f"{TILE.format('node-1', 3)}:focus")).to_have_count(1)


def test_who_closes_a_card_is_where_he_was_though_the_node_has_changed(page: Page, bench: Bench) -> None:
    bench.create(share("ends"))
    node, card = bench.runs("ends").spec.node_name, bench.cards("ends")["c"][0]
    tile = page.locator(TILE.format(node, card))
    expect(tile).to_contain_text("ends")
    tile.click()
    bench.delete("ends")
    expect(tile).to_contain_text("idle")
    page.keyboard.press("Escape")
    expect(page.locator(f"{TILE.format(node, card)}:focus")).to_have_count(1)


def test_a_pod_that_fits_nowhere_waits_with_the_reason(page: Page, bench: Bench) -> None:
    bench.create(share("too-large", core=30, mib=900 * 1024))
    row = page.locator('#pods > li[data-pod="default/too-large"]')
    expect(row).to_contain_text("c: 30% and 900.0 GiB of one card")
    expect(row).to_contain_text("Its share is free on 0 of 2 nodes.")
    expect(row.locator(".reasons")).to_contain_text("short")
    bench.delete("too-large")
    expect(row).to_have_count(0)


def test_who_reads_the_reasons_with_the_keyboard_keeps_his_place(page: Page) -> None:
    assert page.evaluate(FOCUS) == [True, True]


def test_it_says_that_nobody_answers_and_goes_on_by_itself(page: Page, cluster: Cluster) -> None:
    browser = page.context.browser
    assert browser is not None
    other = browser.new_page()
    other.goto(cluster.page_url)
    status = other.locator("#status")
    expect(status).to_have_text("live")
    other.route("**/api/cluster*", lambda route: route.abort())
    expect(status).to_contain_text("no answer; does the port-forward still run?")
    expect(status).to_contain_text("not up to date since")
    other.unroute("**/api/cluster*")
    expect(status).to_have_text("live")
    other.close()


def test_on_a_telephone_nothing_is_wider_than_it(page: Page) -> None:
    wide: Any = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    for view in ("Waiting", "Cards"):
        page.get_by_role("button", name=view).click()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    expect(page.locator("aside")).not_to_be_visible()
    expect(page.locator(TILE.format("node-1", 0))).to_be_visible()
    page.set_viewport_size(wide)


def test_bars_are_seen_where_the_system_has_its_own_colours(page: Page) -> None:
    page.emulate_media(forced_colors="active")
    adjusts = "getComputedStyle(document.querySelector('.bar')).forcedColorAdjust"
    assert page.evaluate(adjusts) == "none"
    page.emulate_media(forced_colors="none")


def test_what_comes_from_the_cluster_is_text_whatever_it_says(page: Page, cluster: Cluster) -> None:
    evil = """"><img src=x onerror="document.title='hit'">"""

    def spoil(found: Any) -> Any:
        if isinstance(found, list):
            return [spoil(item) for item in found]
        if isinstance(found, dict):
            return {key: spoil(value) for key, value in found.items()}
        return found + evil if isinstance(found, str) else found

    browser = page.context.browser
    assert browser is not None
    other = browser.new_page()
    other.route("**/api/cluster*", lambda route: route.fulfill(json=spoil(route.fetch().json())))
    other.goto(cluster.page_url)
    name = other.locator("section .name").first
    expect(name).to_contain_text("node-1")
    expect(name).to_contain_text("onerror")
    assert other.evaluate("document.querySelector('section .name').offsetWidth") > 100
    assert other.evaluate("[document.images.length, document.title]") == [0, "mgpu: cards"]
    other.unroute_all(behavior="ignoreErrors")
    other.close()


def test_the_used_part_of_a_share_is_drawn_within_it(page: Page, cluster: Cluster, bench: Bench) -> None:
    evil = "<img src=x>"
    bench.create(share("uses", core=40, mib=8192))
    node, card = bench.runs("uses").spec.node_name, bench.cards("uses")["c"][0]
    nodes: dict[str, Any] = {"node-1": {"unknown": evil}, "node-2": {"unknown": evil}}
    nodes[node] = {"cards": [[card, 200, 5 << 30]], "pods": [[card, "default/uses", 100, 4 << 30]]}
    browser = page.context.browser
    assert browser is not None
    other = browser.new_page()
    other.route("**/api/use*", lambda route: route.fulfill(json=nodes))
    other.goto(cluster.page_url)
    tile = other.locator(TILE.format(node, card))
    expect(tile).to_contain_text("20/40 % · 5/8 GiB")
    width = "(b) => Math.round(100 * b.offsetWidth / b.parentElement.clientWidth)"
    assert [rest.evaluate(width) for rest in tile.locator(".rest").all()] == pytest.approx([75, 50], abs=4)
    badge = other.locator(f"section:not([data-node={node}]) .badge")
    expect(badge).to_have_text("use unknown")
    expect(badge).to_have_attribute("title", f"use unknown: {evil}")
    tile.click()
    expect(other.locator("#detail tbody tr")).to_have_text("default/usescmgpu10/40 %4/8 GiB")
    expect(other.locator("#detail dl")).to_contain_text("20 % of the SMs, 5 GiB")
    nodes[node] = {"cards": [[card, 300, 6 << 30]], "pods": [[card, "default/uses", 500, None]]}
    expect(other.locator("#detail tbody tr")).to_have_text("default/usescmgpu50/40 %?/8 GiB")
    expect(tile.locator(".part > .over")).to_have_count(1)
    expect(tile.locator(".unmeasured")).to_have_count(1)
    other.close()
    bench.delete("uses")


def test_probes(shared_cluster: Cluster) -> None:
    for path in ("healthz", "readyz", "leads"):
        with urllib.request.urlopen(f"{shared_cluster.page_url}{path}", timeout=10) as reply:
            assert reply.status == 200
