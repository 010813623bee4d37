"""Check the site as it was built.

    python scripts/check_site.py outputs/site

Every link must have a target. Every page is opened in chromium in three widths, and
these rules must hold:

- No text is clipped, and no page is wider than the window.
- No name is broken between two lines inside a word.
- A table with more than eight columns can be scrolled.
- The letters of a drawing are at least 9 pixels high in a window of 1400 pixels. The
  attribute `data-font` of an image is the size of its smallest letters in points. The
  attribute `data-width` is the width of the image in points.
- No page is twice in the navigation.

The index and the largest page of every folder are also opened in the light and the dark
theme. They must not request anything from outside the site, or print anything on the
console. The accessibility checker axe must find no violation. It must be possible to
search with only the keyboard. Faults are printed one per line, and the exit code is 1
if there are any.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

WIDTHS = (1400, 800, 390)
# Smallest height of a drawing's letters in pixels, at the first width in WIDTHS.
SMALLEST = 9.0
# A table with more columns than this must be scrollable.
MOST_COLUMNS = 8
# Schemes of links that this script does not follow
NEVER = ("http", "https", "mailto", "data")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Links(HTMLParser):
    """The anchors of a page, and everything that it links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.leading: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None and tag != "base":
                self.leading.append(value)


def broken(site: Path) -> Iterator[str]:
    """Yield links without a target, as ``page: link``.

    Links to other sites are not checked.
    """
    pages = {
        path.resolve(): Links(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }

    for page, links in pages.items():
        for link in dict.fromkeys(links.leading):
            parts = urlsplit(link)
            if parts.scheme in NEVER:
                continue

            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if page.name == "404.html" and parts.path.startswith("/"):
                target = (site / unquote(parts.path).lstrip("/")).resolve()

            known = pages.get(target)
            if not target.exists() or (
                known is not None and unquote(parts.fragment) not in known.anchors
            ):
                yield f"{page.relative_to(site.resolve())}: {link}"


@contextmanager
def chromium() -> Iterator[Any]:
    """Start chromium without a window, and stop it at the end."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        window = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
        )
        try:
            window.set_script_timeout(120)  # for axe on a busy machine
            yield window
        finally:
            window.quit()


def misplaced(window: Any, site: Path) -> Iterator[str]:
    """Yield the faults of the layout of every page, as ``page: fault``."""
    for page in sorted(site.rglob("*.html")):
        window.get(page.resolve().as_uri())
        for width in WIDTHS:
            _resize(window, width)
            for fault in layout_faults(window, smallest=SMALLEST if width == WIDTHS[0] else 0.0):
                yield f"{page.relative_to(site)}: {width}: {fault}"


def layout_faults(window: Any, smallest: float) -> list[str]:
    """Return the faults of the layout of the page that is open.

    Args:
        window: The browser.
        smallest: Smallest height of a drawing's letters in pixels. If 0, the height is
            not checked.
    """
    script = Path(__file__).with_name("check_layout.js").read_text(encoding="utf-8")
    found: list[str] = window.execute_async_script(script, MOST_COLUMNS, smallest)
    return found


def loud(window: Any, site: Path) -> Iterator[str]:
    """Yield the faults of pages in chromium.

    Faults are messages on the console, requests to other sites, violations that axe
    finds, and parts that the keyboard cannot reach.
    """
    window.get("about:blank")
    # Reading empties the logs of earlier pages.
    window.get_log("performance")
    window.get_log("browser")
    for page in sample(site):
        yield from (f"{page.relative_to(site)}: {fault}" for fault in _faults(window, page))
    yield from _unreachable(window, site / "index.html")


def _resize(window: Any, width: int) -> None:
    window.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def sample(site: Path) -> list[Path]:
    """Return the pages to open in the light and the dark theme.

    They are the index and the largest page of every folder that has pages.
    """
    folders: dict[Path, list[Path]] = {}
    for path in site.rglob("*.html"):
        # All reports count as one folder, because one report represents them all
        kind = path.parent if path.name != "report.html" else site / "report.html"
        folders.setdefault(kind, []).append(path)
    largest = (max(paths, key=lambda path: path.stat().st_size) for paths in folders.values())
    indices = (path for paths in folders.values() for path in paths if path.name == "index.html")
    return sorted({*largest, *indices})


def _faults(window: Any, page: Path) -> Iterator[str]:
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            window.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
            )
            _resize(window, width)
            window.get(page.resolve().as_uri())

            # axe does not check reports here, because a test in tests/tables does
            if width == WIDTHS[0] and page.name != "report.html":
                yield from (f"{scheme}: {fault}" for fault in _objections(window))
            yield from (
                f"{width}, {scheme}: {entry['message']}" for entry in window.get_log("browser")
            )

            events = (
                json.loads(entry["message"])["message"] for entry in window.get_log("performance")
            )
            sent = (e["params"] for e in events if e["method"] == "Network.requestWillBeSent")
            # The first tab of the browser may still be loading chrome:// pages
            asked = (
                s["request"]["url"] for s in sent if not s["documentURL"].startswith("chrome://")
            )
            yield from (
                f"requests {url}"
                for url in asked
                if not url.startswith(("file:", "data:", "about:", "blob:"))
            )


def _objections(window: Any) -> Iterator[str]:
    """Yield the violations that axe finds."""
    window.execute_script(
        files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    )

    found = window.execute_async_script(
        # The rule is off, because Material's navigation has nested landmarks of the
        # same name
        "axe.run(document, {rules: {'landmark-unique': {enabled: false}}})"
        ".then(arguments[0], error => arguments[0](String(error)))"
    )

    if isinstance(found, str):
        yield f"axe: {found}"
        return
    for rule in found["violations"]:
        yield f"axe: {rule['id']} ({len(rule['nodes'])}): {rule['nodes'][0]['html'][:120]}"


def _unreachable(window: Any, page: Path) -> Iterator[str]:
    """Yield the parts of a page that cannot be reached with only the keyboard.

    The function checks that the first stop of the tab key skips the navigation, that a
    page of results can be opened, that the search finds a page, and that this page can
    be opened.
    """
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    def press(*keys: str) -> None:
        window.switch_to.active_element.send_keys(*keys)

    def reached(condition: Any) -> bool:
        try:
            return bool(WebDriverWait(window, 20).until(condition))
        except TimeoutException:
            return False

    window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    window.get(page.resolve().as_uri())

    press(Keys.TAB)
    if "md-skip" not in window.switch_to.active_element.get_attribute("class").split():
        yield f"{page.name}: the first stop of the tab key does not skip the navigation"
    for _ in range(60):
        press(Keys.TAB)
        if "/results/" in (window.switch_to.active_element.get_attribute("href") or ""):
            break

    at = window.current_url
    press(Keys.ENTER)
    if not reached(lambda w: w.current_url != at):
        yield f"{page.name}: no page of results can be opened with tab and enter"
    window.get(page.resolve().as_uri())

    press("/")
    press("projections")
    if not reached(lambda w: w.find_elements("css selector", ".md-search-result__item")):
        yield f"{page.name}: the search finds nothing"
        return

    at = window.current_url
    press(Keys.ARROW_DOWN)
    press(Keys.ENTER)
    if not reached(lambda w: w.current_url != at):
        yield f"{page.name}: a page that the search finds cannot be opened"


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/site")
    if not (site / "index.html").is_file():
        print(f"there is no site in {site}: run 'make site'", file=sys.stderr)
        return 1
    with chromium() as window:
        found = [*broken(site), *misplaced(window, site), *loud(window, site)]
    faults = list(dict.fromkeys(found))
    print(
        "\n".join(faults)
        or f"{site}: all links have targets, no text is clipped, no name is broken, all labels can "
        "be read, the console is silent, nothing is requested, axe finds no violation, the "
        "keyboard is enough"
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
