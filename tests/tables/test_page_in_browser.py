"""Tests of the page in a real browser.

The page works from disk, sends no request to the network, and fits a phone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedexp.tables.report import canvas
from fedexp.tables.report.page import Links, page
from fedexp.tables.report.pictures import pictures
from fedexp.tables.report.report import Origin, Picture
from tests.tables.reports import HOSTILE, cell, report

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)

# List every element that directly contains text, with the contrast (WCAG 2) between its
# colour and its background.
CONTRASTS = """
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const parse = colour => colour.match(/[\\d.]+/g).map(Number);
const ground = element => {
  for (; element; element = element.parentElement) {
    const colour = parse(getComputedStyle(element).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll("body *")]
  .filter(e => !e.closest("svg, script") && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(e => {
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [`${e.tagName} ${e.className}: ${e.textContent.slice(0, 30)}`, (a + .05) / (b + .05)];
  });
"""
# Return the scroll width, the window width, and the elements that extend beyond the
# window. Elements in a box that scrolls or is cut off are not listed.
OVERFLOWING = """
const width = document.documentElement.clientWidth;
return [document.documentElement.scrollWidth, width, [...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility() && !e.closest(".scroll, [popover], .unseen, .skip"))
  .filter(e => e.getBoundingClientRect().right > width + .5 || e.getBoundingClientRect().left < -.5)
  .map(e => `${e.tagName} ${e.className}`)];
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "needs Debian's chromium and chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}; with CI=true the browser test has to run")
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield window
    window.quit()


@pytest.fixture
def opened(chrome: Chrome, tmp_path: Path) -> Iterator[Chrome]:
    """Open the page of the sample report.

    After the test, the console must be empty, and the browser must have requested only
    the file.
    """
    written = tmp_path / "report.html"
    whole = report()
    written.write_text(page(replace(whole, pictures=pictures(whole))), encoding="utf-8")
    # Reading the logs empties them.
    chrome.get_log("browser"), chrome.get_log("performance")
    chrome.get(written.as_uri())
    yield chrome
    assert chrome.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # The browser's first tab may still be loading its chrome:// parts.
    asked = [s["request"]["url"] for s in sent if not s["documentURL"].startswith("chrome://")]
    assert asked == [written.as_uri()]
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def column(chrome: Chrome, heading: str) -> list[str]:
    """Return the visible texts of one column of the long table."""
    return chrome.execute_script(
        """
        const at = [...document.querySelectorAll(".long thead th")].findIndex(h => h.textContent.trim() === arguments[0]);
        return [...document.querySelectorAll(".long tbody tr")].filter(r => !r.hidden).map(r => r.cells[at].textContent.trim());
        """,
        heading,
    )


def press(chrome: Chrome, heading: str) -> str | None:
    """Sort by a column with the keyboard and return the column's aria-sort."""
    from selenium.webdriver.common.keys import Keys

    head = next(
        h
        for h in chrome.find_elements("css selector", ".long thead th")
        if h.text.strip() == heading
    )
    head.find_element("css selector", "button").send_keys(Keys.ENTER)
    return head.get_attribute("aria-sort")


def test_it_sorts_by_number_and_by_text_with_missing_ones_last(opened: Chrome) -> None:
    assert press(opened, "Our runs, %") == "ascending"
    assert column(opened, "Our runs, %") == [
        "19.50", "21.42", "37.44", "59.75", "66.12", "66.13", "80.00", "81.92", "inf", "nan", "–",
    ]  # fmt: skip
    assert press(opened, "Our runs, %") == "descending"
    assert column(opened, "Our runs, %") == [
        "inf", "81.92", "80.00", "66.13", "66.12", "59.75", "37.44", "21.42", "19.50", "nan", "–",
    ]  # fmt: skip
    assert press(opened, "Method") == "ascending"
    assert column(opened, "Method") == ["Average"] * 4 + ["OT †"] * 4 + ["Ours (ma_echo)"] * 3
    assert press(opened, "clients") == "ascending"
    # The values are sorted as numbers. As texts, 10 would come first.
    assert column(opened, "clients") == ["5"] * 6 + ["10"] * 5
    assert len(opened.find_elements("css selector", "[aria-sort]")) == 1


def test_it_filters_by_text_method_and_verdict(opened: Chrome) -> None:
    from selenium.webdriver.support.ui import Select

    shown = opened.find_element("name", "shown")
    assert shown.text == "11 of 11 cells"
    Select(opened.find_element("name", "method")).select_by_value("ot")
    assert column(opened, "Method") == ["OT †"] * 4
    Select(opened.find_element("name", "verdict")).select_by_value("undecided")
    assert column(opened, "Verdict") == ["? undecided"] * 2
    opened.find_element("name", "text").send_keys("DISK full")
    assert (column(opened, "Why"), shown.text) == (
        [
            "the difference is +8.61, 95 % interval -13.2 to +30.4; 6 seeds would settle itfailed: OSError: disk full"
        ],
        "1 of 11 cells",
    )
    opened.find_element("css selector", "[type=reset]").click()
    Select(opened.find_element("name", "c1")).select_by_visible_text("0.5")
    assert column(opened, "beta") == ["0.5"] * 6
    Select(opened.find_element("name", "c0")).select_by_visible_text("10")
    assert column(opened, "clients") == ["10"] * 3
    opened.find_element("css selector", "[type=reset]").click()
    # The filter matches whole values, never a part of a number.
    for typed, clients in (("5", ["5"] * 6), ("10.0", ["10"] * 5), ("0.0", [])):
        box = opened.find_element("name", "text")
        box.clear()
        box.send_keys(typed)
        assert column(opened, "clients") == clients, typed
    opened.find_element("css selector", "[type=reset]").click()
    assert len(column(opened, "Method")) == 11
    assert shown.text == "11 of 11 cells"


@pytest.mark.parametrize("system", ["light", "dark"])
def test_it_follows_the_system_until_the_button_is_pressed(opened: Chrome, system: str) -> None:
    opened.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": system}]},
    )
    ground = "return getComputedStyle(document.body).backgroundColor"
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}
    other = "light" if system == "dark" else "dark"
    assert opened.execute_script(ground) == grounds[system]
    opened.find_element("id", "theme").click()
    assert opened.execute_script(ground) == grounds[other]
    ink = opened.execute_script(
        "return getComputedStyle(document.querySelector('figure svg')).color"
    )
    assert ink == opened.execute_script("return getComputedStyle(document.body).color")
    opened.find_element("id", "theme").click()
    assert opened.execute_script(ground) == grounds[system]
    assert opened.execute_script("return localStorage.length + sessionStorage.length") == 0


@pytest.mark.parametrize("system", ["light", "dark"])
def test_every_text_has_contrast(opened: Chrome, system: str) -> None:
    opened.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": system}]},
    )
    measured = opened.execute_script(CONTRASTS)
    assert len(measured) > 100
    assert [text for text, ratio in measured if ratio < 4.5] == []


@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_nothing_to_object_to(opened: Chrome, width: int) -> None:
    """There are no violations, in light and dark, with a cell open and closed.

    If axe cannot compute a contrast, `CONTRASTS` computes it.
    """
    opened.execute_script(
        files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    )
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    for system in ("light", "dark"):
        opened.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": system}]},
        )
        found = opened.execute_async_script(
            "axe.run(document).then(arguments[0], error => arguments[0](String(error)))"
        )
        assert len(found["passes"]) > 40
        assert [(rule["id"], rule["nodes"][0]["target"]) for rule in found["violations"]] == []
        opened.execute_script("document.querySelector('[popover]').showPopover()")


def test_a_cell_says_more_by_click_by_key_and_by_hovering(opened: Chrome) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    def box() -> Any:
        return opened.execute_script("return document.querySelector(':popover-open')")

    button = opened.find_element("id", "cell-clients-5-beta-0.01-ot")
    button.click()
    text = box().text
    assert all(
        part in text
        for part in (
            "OT †, clients 5, beta 0.01",
            "95 % interval",
            "seed 0: 36.11",
            "1: 38.77",
            "OSError: disk full",
        )
    )
    button.send_keys(Keys.ESCAPE)
    assert box() is None
    button.send_keys(Keys.ENTER)
    assert box() is not None
    button.send_keys(Keys.ESCAPE)
    opened.execute_script("scrollTo(0, 0)")
    heading = opened.find_element("tag name", "h1")
    entry = opened.find_element("id", "cell-clients-5-beta-0.01-fedavg")

    def hover() -> Any:
        """Move the pointer onto the cell. A busy machine can lose a movement."""
        ActionChains(opened).move_to_element(heading).move_to_element(entry).pause(0.5).perform()
        return box()

    WebDriverWait(opened, 30).until(lambda _: hover() is not None)
    assert "runs/fedavg-mnist-0a/1b" in box().text
    ActionChains(opened).move_to_element(heading).perform()
    WebDriverWait(opened, 5).until(lambda _: box() is None)
    # An address with the anchor of a cell opens the cell.
    opened.execute_script("location.hash = '#cell-clients-10-beta-0.5-ma_echo'")
    WebDriverWait(opened, 5).until(lambda _: box() is not None)
    assert "Ours (ma_echo), clients 10, beta 0.5" in box().text


def test_heads_and_the_proposed_method_stay_in_sight(opened: Chrome) -> None:
    where = """
      const box = document.querySelector(".scroll:has(.long)"), head = box.querySelector("th");
      box.style.maxHeight = "12rem";
      box.scrollTop = 200;
      const own = document.querySelector(".wide td.proposed").getBoundingClientRect();
      return [box.scrollTop > 0, head.getBoundingClientRect().top - box.getBoundingClientRect().top, own.right < innerWidth];
    """
    assert opened.execute_script(where) == [True, 0, True]


def test_a_command_is_copied_or_selected(chrome: Chrome, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    hashes = {seed: f"{seed}" * 32 for seed in (0, 1)}
    made = tuple(
        Origin(f"runs/{seed}", f"fedexp-table run t --seeds {seed}", hashes[seed])
        for seed in (0, 1)
    )
    written = tmp_path / "commands.html"
    configs = {name: {"rounds": 3, "seed": seed} for seed, name in hashes.items()}
    cells = (cell({"clients": 5, "beta": 1}, "m", 1.0, 2.0, 3.0, origins=made),)
    written.write_text(page(report(cells=cells), Links(configs=configs)), "utf-8")
    chrome.get(f"{written.as_uri()}#cell-clients-5-beta-1-m")
    button = chrome.find_elements("css selector", ".copy")[1]
    button.send_keys(Keys.ENTER)
    WebDriverWait(chrome, 5).until(lambda _: button.text.split()[0] in ("Copied", "Selected"))
    if button.text.startswith("Selected"):
        assert (
            chrome.execute_script("return String(getSelection())").strip()
            == "fedexp-table run t --seeds 1"
        )
    # This is the second click after the one on the number.
    chrome.find_element("link text", f"config {hashes[1][:16]}").click()
    opened = chrome.find_element("css selector", f"[id='config-{hashes[1][:16]}']")
    WebDriverWait(chrome, 5).until(lambda _: opened.get_attribute("open"))
    assert "seed: 1" in opened.text and "rounds" not in opened.text
    assert not chrome.find_elements("css selector", ":popover-open")
    top, bottom = chrome.execute_script(
        "return [arguments[0].getBoundingClientRect().top, innerHeight]", opened
    )
    assert -1 < top < bottom


def test_on_a_phone_each_row_is_a_card(opened: Chrome) -> None:
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True},
    )
    reach, width, beyond = opened.execute_script(OVERFLOWING)
    assert (reach, width, beyond) == (360, 360, [])
    scrolls = "return [...document.querySelectorAll('.scroll:has(table)')].map(e => e.scrollWidth > e.clientWidth)"
    # Each row is a card that does not scroll.
    assert opened.execute_script(scrolls) == [False, False, False, False]
    cards = "return [...document.querySelectorAll('.wide tbody tr')].map(r => r.getBoundingClientRect().width)"
    assert opened.execute_script(cards) == [328.0] * 4
    said = "return getComputedStyle(document.querySelector('.wide tbody td'), '::before').content"
    assert opened.execute_script(said) == '"Ours (ma_echo)"'
    claimed = "return document.querySelector('.headline').getBoundingClientRect().bottom"
    assert opened.execute_script(claimed) < 740  # The headline is in the first screen.
    opened.find_elements("css selector", ".cell")[1].click()
    left, right = opened.execute_script(
        "const at = document.querySelector(':popover-open').getBoundingClientRect(); return [at.left, at.right]"
    )
    assert 0 <= left < right <= 360


def test_hostile_and_very_long_texts_stay_texts_and_inside(chrome: Chrome, tmp_path: Path) -> None:
    long = "an_extremely_long_label_without_a_single_space_" * 4
    whole = report(
        title=HOSTILE,
        paper=long,
        keys=(long, HOSTILE),
        cells=(
            cell(
                {long: long, HOSTILE: HOSTILE},
                HOSTILE,
                1.0,
                2.0,
                reason=HOSTILE,
                runs=(long,),
                failed=(long,),
            ),
        ),
        agreement=(),
        warnings=(HOSTILE, long),
        facts=((long, long), (HOSTILE, HOSTILE)),
        assumptions=((long, HOSTILE),),
        command=f"{long} {HOSTILE}",
    )
    written = tmp_path / "hostile.html"
    written.write_text(page(replace(whole, pictures=pictures(whole))), encoding="utf-8")
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True},
    )
    chrome.get(written.as_uri())
    assert chrome.title == f"ma_echo/table1: {HOSTILE}"
    assert chrome.find_element("tag name", "h1").text == HOSTILE
    assert chrome.execute_script(OVERFLOWING) == [360, 360, []]
    assert chrome.execute_script("return document.scripts.length") == 1
    assert chrome.get_log("browser") == []
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_script_inside_a_picture_neither_runs_nor_loads(chrome: Chrome, tmp_path: Path) -> None:
    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' onload='document.title=1'><script>document.title=2</script>"
        "<image href='http://127.0.0.1:9/x.png'/></svg>"
    )
    written = tmp_path / "scripted.html"
    written.write_text(page(report(pictures=(Picture("p", "p", svg, b""),))), encoding="utf-8")
    chrome.get(written.as_uri())
    assert chrome.title == "ma_echo/table1: One-shot aggregation of MLPs"
    refused = [entry["message"] for entry in chrome.get_log("browser")]
    assert len(refused) == 3
    assert all("Content Security Policy" in message for message in refused)


def test_an_image_inside_a_picture_shows(chrome: Chrome, tmp_path: Path) -> None:
    with canvas.use_style():
        figure = canvas.figure(2, 2)
        canvas.axes(figure, 1, 1, 1).imshow([[0.0, 1.0], [1.0, 0.0]])
        drawn = canvas.render_picture("p", "p", figure)
    written = tmp_path / "images.html"
    written.write_text(page(report(pictures=(drawn,))), encoding="utf-8")
    chrome.get_log("browser")
    chrome.get(written.as_uri())
    decoded = "document.querySelector('svg image').decode().then(() => arguments[0](true), () => arguments[0](false))"
    assert chrome.execute_async_script(decoded) is True
    assert chrome.get_log("browser") == []
