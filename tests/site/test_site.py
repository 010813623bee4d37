"""Tests of the pages of results, and of the site that is built from pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

import pytest

from fedexp.commands.table import run_command
from fedexp.config.folders import conf_dir
from fedexp.core.errors import FedexpError
from fedexp.site import build, leaderboards, records, results
from fedexp.site.page import Page
from fedexp.site.records import Result
from fedexp.tables.load import load_table
from fedexp.tables.report.report import Method
from scripts.check_site import broken
from tests.tables.reports import cell, report

RESULTS = conf_dir().parent / "scripts" / "results"


@pytest.fixture(scope="module")
def read() -> dict[str, list[Result]]:
    """Read a figure with a contradicted claim, in two variants, and a table.

    The table was not run.
    """
    forms = [records.of_record(RESULTS / "ma_echo" / name) for name in ("fig7", "fig7-reduced")]
    return {"ma_echo/table1": [records.absent(load_table("ma_echo/table1"))], "ma_echo/fig7": forms}


@pytest.fixture(scope="module")
def pages(read: dict[str, list[Result]]) -> dict[str, str]:
    return {page.path: page.text for page in results.pages(read)}


def test_the_first_page_says_what_came_out_and_whether_the_claim_held(
    read: dict[str, list[Result]], pages: dict[str, str]
) -> None:
    front = unescape(pages["results/index.md"])
    [card] = re.findall(r'<article class="card".*?</article>', front, re.DOTALL)
    cells = {cell.method: cell for cell in read["ma_echo/fig7"][0].report.cells}
    assert all(
        f"{cell.mean:.2f} ± {cell.sd:.2f}\N{NO-BREAK SPACE}%" in card for cell in cells.values()
    )
    assert "test accuracy · mnist · 3 seeds" in card
    # The runs of the other table are not included.
    assert "<td>1 contradicted, 1 undecided</td>" in front
    assert "2 claims of the paper: 1 contradicted, 1 undecided." in card
    assert re.search(r"contradicted</span> <span>five MLPs converge faster with the norm", card)
    assert ">full</span> 9 of 9 runs; also" in card and ">reduced</span> 3 of 3 runs" in card
    assert 'Not run: <a href="ma_echo/table1.html"' in front
    [paper] = results.papers({"ma_echo/fig7": read["ma_echo/fig7"][1:]})
    # Claims about reduced runs have states. They do not count for the paper.
    assert results.claims_sentence(paper.entries[0]) == "2 claims of the paper: 2 undecided."
    assert not paper.states()


def test_first_page_shows_all_papers_before_the_cards(pages: dict[str, str]) -> None:
    front = unescape(pages["results/index.md"])
    lead, figure, table, card = map(
        front.index, ('class="lead"', "<figure", "<table", '<article class="card"')
    )
    assert lead < figure < table < card
    # The lead describes the pages in two sentences.
    [sentences] = re.findall(r'<p class="lead">(.*?)</p>', front)
    assert sentences.count(". ") == 1 and "These pages" in sentences


def test_states_are_explained_once_where_they_are_used(
    read: dict[str, list[Result]], pages: dict[str, str]
) -> None:
    for path in ("results/index.md", "results/ma_echo/index.md", "results/ma_echo/fig7.md"):
        text = unescape(pages[path])
        for state, meaning in results.CLAIMS.items():
            used = any(claim.state == state for claim in read["ma_echo/fig7"][0].report.claims)
            assert text.count(meaning) == used, (path, state)

    judged = records.of_record(RESULTS / "ma_echo" / "table6")
    verdicts = {cell.verdict for cell in judged.report.cells}
    texts = {page.path: page.text for page in results.pages({"ma_echo/table6": [judged]})}
    for text in map(unescape, texts.values()):
        assert verdicts
        for state, meaning in results.VERDICTS.items():
            assert text.count(meaning) == (state in verdicts), state


def test_colours_of_a_card_are_about_numbers_only() -> None:
    read = {"ma_echo/table6": [records.of_record(RESULTS / "ma_echo" / "table6")]}
    texts = {page.path: unescape(page.text) for page in results.pages(read)}
    [card] = re.findall(r'<article class="card".*?</article>', texts["results/index.md"], re.DOTALL)
    assert '<span class="cell close" style="flex-grow: 6">6 close</span>' in card
    assert '<span class="state">supported</span>' in card
    # Numbers come before claims.
    assert card.index('class="cell ') < card.index('class="claims"')
    table = texts["results/ma_echo/table6.md"]
    assert table.index("## Numbers") < table.index("## Pictures") < table.index("## Claims")


def test_verdicts_of_a_paper_are_counted_in_order() -> None:
    # Table 1 has no cell that is different, so that Table 4 adds this verdict last.
    read = {
        f"ma_echo/{name}": [records.of_record(RESULTS / "ma_echo" / f"{name}-partial")]
        for name in ("table1", "table4")
    }
    [paper] = results.papers(read)
    assert list(paper.verdicts()) == ["reproduced", "close", "different", "undecided"]
    assert sum(paper.verdicts().values()) == sum(
        number for entry in paper.entries for _, number in results.cell_counts(entry)
    )


def test_costs_are_hours_on_named_hardware() -> None:
    runs = {"a": ("AMD EPYC", 3600.0), "b": ("AMD EPYC", 1800.0), "c": ("x86_64", 60000.0)}
    assert results.cost(runs) == "17 h on x86_64 (model not recorded), 1.5 h on AMD EPYC"
    assert results.cost({"a": ("NVIDIA H100", 1.0)}) == "less than 0.01 h on NVIDIA H100"
    result = records.of_record(RESULTS / "ma_echo" / "fig7")
    # Several cells may read the same run. It counts only once.
    assert len(result.costs) == result.done
    [page] = [p for p in results.pages({"ma_echo/fig7": [result]}) if p.path.endswith("fig7.md")]
    assert f"{results.cost(result.costs)} of computing time" in page.text


def test_wide_tables_say_that_they_scroll() -> None:
    read = {"ma_echo/table5": [records.of_record(RESULTS / "ma_echo" / "table5")]}
    [page] = [page for page in results.pages(read) if page.path.endswith("table5.md")]
    columns = len(re.findall(r'<th scope="col"', page.text))
    assert columns > 8 and f"The table has {columns} columns and scrolls sideways." in page.text
    # The proposed method is shown with its name.
    assert ">MA-Echo</th>" in page.text and "Ours" not in page.text


def test_pictures_store_their_sizes(read: dict[str, list[Result]], pages: dict[str, str]) -> None:
    text = pages["results/ma_echo/fig7.md"]
    images = re.findall(r"<img [^>]*>", text)
    assert len(images) == sum(len(result.report.pictures) for result in read["ma_echo/fig7"])
    assert all('data-font="7.0" data-width="374.4' in image for image in images)
    # A PNG file in an interactive page is as wide as it was drawn.
    assert 'data-width="374.413" xmlns="http://www.w3.org/2000/svg" width="374.413pt"' in (
        read["ma_echo/fig7"][0].page
    )


def test_benchmarks_explain_their_workloads_and_show_their_pictures(tmp_path: Path) -> None:
    (tmp_path / "bench_a.md").write_text("# A\n\n| W1s | 1 |\n")
    (tmp_path / "bench_b.md").write_text("| W10 | 1 |\n")
    shutil.copy(RESULTS / "bench_growth.png", tmp_path / "bench_b.png")
    first, second = results.benchmarks(tmp_path)
    assert first.text.index("- **W1**: ") < first.text.index("- **W1s**: ") < first.text.index("|")
    assert "W2" not in first.text and "<figure>" not in first.text
    assert "**W1" not in second.text and 'src="bench_b.png"' in second.text
    assert 'data-font="8.5"' in second.text
    assert {*results.WORKLOADS} >= {*re.findall(r"\bW\d\w?\b", _texts_of_benchmarks())}


def _texts_of_benchmarks() -> str:
    return "\n".join(path.read_text() for path in RESULTS.glob("*.md"))


def test_numbers_lead_to_their_cells_configs_and_commands(
    read: dict[str, list[Result]], pages: dict[str, str]
) -> None:
    text = unescape(pages["results/ma_echo/fig7.md"])
    for result in read["ma_echo/fig7"]:
        anchors = re.findall(rf'href="fig7/{result.variant}/report.html#([^"]+)"', text)
        assert len(anchors) == len(result.report.cells)
        for anchor in anchors:
            assert f'id="{anchor}"' in result.page
            [box] = re.findall(
                rf'<div popover id="{re.escape(anchor)}-more".*?</div>', result.page, re.DOTALL
            )
            assert "fedexp" in box and set(re.findall(r'href="#(config-\w+)"', box)) <= set(
                re.findall(r'<details id="(config-\w+)"', result.page)
            )
            assert 'href="#config-' in box
        assert set(re.findall(rf'"fig7/{result.variant}/([\w.-]+)', text)) <= {
            path.rpartition("/")[2] for path, _ in results.files_of({"ma_echo/fig7": [result]})
        }
    assert len(set(re.findall(r'id="([^"]+)"', text))) == len(re.findall(r'id="([^"]+)"', text))
    assert 'id="reduced-cell-' in text and 'id="cell-' in text
    unrun = unescape(pages["results/ma_echo/table1.md"])
    assert (
        "80.31 | –" in unrun
        and "fedexp-table run ma_echo/table1</code>" in unrun
        and "report.html" not in unrun
    )
    # A claim about a table that was not run has no state.
    assert 'class="state">not run</span>' in unrun and 'class="state">undecided' not in unrun


def _git(*arguments: str) -> list[str]:
    """Return the paths that a git command prints.

    The test is skipped outside a git checkout.
    """
    git = shutil.which("git")
    root = conf_dir().parent
    if git is None or not (root / ".git").exists():
        pytest.skip("not a git checkout")

    # The user's ignore rules must not count.
    command = [git, "-c", f"core.excludesFile={os.devnull}", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        pytest.skip(f"git cannot read the checkout: {done.stderr.strip()}")
    return done.stdout.splitlines()


def test_committed_records_contain_no_html() -> None:
    tracked = _git("ls-files", "scripts/results")
    assert any(path.endswith("/record.json") for path in tracked)
    assert [path for path in tracked if path.lower().endswith((".html", ".htm"))] == []


def test_git_ignores_only_the_html_of_a_record() -> None:
    folder = "scripts/results/ma_echo/fig7"
    names = ("record.json", "runs.csv", "configs.json", "report.md", "report-a.png", "report.html")
    ignored = _git("check-ignore", "--no-index", *(f"{folder}/{name}" for name in names))
    assert ignored == [f"{folder}/report.html"]


def test_every_record_has_a_table_page_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test reads only one record of each paper. `make site` builds the pages of all
    # records.
    for paper in (path for path in RESULTS.iterdir() if path.is_dir()):
        chosen = min(paper.glob("*/record.json")).parent
        shutil.copytree(chosen, tmp_path / paper.name / chosen.name)
    # One process is enough for so few records.
    monkeypatch.setattr(records, "ProcessPoolExecutor", lambda _, mp_context: ThreadPoolExecutor(1))
    read = records.read(tmp_path)
    reports = {
        path: data.decode()
        for path, data in results.files_of(read)
        if path.endswith("/report.html")
    }

    expected = set()
    for about in tmp_path.glob("*/*/record.json"):
        name = json.loads(about.read_text())["table"]
        # Leaderboards have pages of another kind.
        if load_table(name).paper == "none":
            continue
        table = name.rpartition("/")[2]
        form = about.parent.name.removeprefix(table).removeprefix("-") or "full"
        expected.add(f"results/{name}/{form}/report.html")
    assert reports.keys() == expected
    boards = [one for one in leaderboards.read(tmp_path) if one.board is not None]
    assert [page.path for page in leaderboards.pages(boards, with_methods=False)][1:] == [
        f"{about.parent.parent.name}s/{about.parent.name}.md"
        for about in tmp_path.glob("leaderboard/*/record.json")
    ]

    pages = {page.path: page.text for page in results.pages(read)}
    for path, html in reports.items():
        folder, form, _ = path.rsplit("/", 2)
        page = pages[f"{folder}.md"]
        assert f'href="{folder.rpartition("/")[2]}/{form}/report.html"' in page
        assert html.startswith("<!DOCTYPE html>") and html.rstrip().endswith("</html>")
        assert 'id="cell-' in html


def test_a_paper_says_what_does_not_come_out_and_what_was_assumed(pages: dict[str, str]) -> None:
    text = unescape(pages["results/ma_echo/index.md"])
    missing, _, assumed = text.partition("## Assumptions")
    assert (
        "five MLPs converge faster" in missing
        and "Where the paper and its code disagree" in missing
    )
    [batches] = re.findall(r"<dt>batches of 64</dt><dd>(.*?)</dd>", assumed)
    # The assumption is listed once, with a link to each of the two tables.
    assert batches.count("<a ") == 2


def test_methods_are_told_where_they_have_numbers(read: dict[str, list[Result]]) -> None:
    [full, reduced] = results.mentions(read)["ma_echo"]
    assert full.link == reduced.link == "results/ma_echo/fig7.md"
    means = sorted(
        cell.mean for cell in read["ma_echo/fig7"][0].report.cells if cell.mean is not None
    )
    assert full.text.startswith(f"3 numbers, {means[0]:.2f} to {means[-1]:.2f} %")
    assert reduced.text.endswith("reduced variant")


def test_a_site_is_built_whose_links_lead_somewhere(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    made = [
        Page("index.md", "First", "# A\n\n[b](b/index.md#here)\n"),
        Page("b/index.md", "B", "# B\n\n## Here\n"),
    ]
    for number, page in enumerate(made):
        (docs / page.path).parent.mkdir(parents=True, exist_ok=True)
        (docs / page.path).write_text(page.text)
        assert build.navigation(made)[number] in ({"First": "index.md"}, {"B": ["b/index.md"]})
    build.make(made, docs, tmp_path / "site")
    assert list(broken(tmp_path / "site")) == []
    html = (tmp_path / "site" / "index.html").read_text()
    assert (
        not re.findall(r'(?:src|stylesheet" href)="(?:https?:)?//', html)
        and "b/index.html#here" in html
    )
    (docs / "index.md").write_text("# A\n\n[b](b/index.md#there)\n")
    with pytest.raises(FedexpError) as caught:
        build.make(made, docs, tmp_path / "site")
    assert "there" in str(caught.value)


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x"></a><a href="b.html#y"></a><img src="no.png"><a href="#z"></a>'
    )
    (tmp_path / "b.html").write_text('<p id="x"></p><a href="https://example.org">')
    assert list(broken(tmp_path)) == ["a.html: b.html#y", "a.html: no.png", "a.html: #z"]


def test_what_is_lacking_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = ["site", "--out", str(tmp_path / "site"), "--results", str(tmp_path)]
    assert run_command(site) == 2 and "there are no results to publish" in capsys.readouterr().err
    for name in ("a", "b"):
        shutil.copytree(RESULTS / "ma_echo" / "fig6a", tmp_path / "ma_echo" / name)
    assert (
        run_command(site) == 2
        and "two records are of one table in one variant" in capsys.readouterr().err
    )
    (tmp_path / "mine.txt").touch()
    assert (
        run_command([*site, "--out", str(tmp_path)]) == 2
        and "something else than a site" in capsys.readouterr().err
    )
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    assert run_command(site) == 2 and "pip install 'fedexp[docs]'" in capsys.readouterr().err


@pytest.mark.parametrize(("baselines", "expected"), [
    ([(1.0, 1.0), (1.0, None), (9.0, 1.0), (None, None)], "1 of 2 rows"),
    ([(1.0, 1.0), (1.0, None), (1.0, None), (None, 1.0)], "1 of 1 row"),
    ([(9.0, None), (1.0, 1.0)], "1 of 1 row"),
    ([(9.0, None), (1.0, None)], "1 of 2 rows"),
    ([(1.0, None), (1.0, None), (None, 1.0), (None, 1.0)], ""),
])  # fmt: skip
def test_finding_counts_only_rows_in_which_all_baselines_were_run(
    baselines: list[tuple[float | None, ...]], expected: str
) -> None:
    cells = []
    for x, (a, b) in enumerate(baselines):
        for name, value in (("ours", 5.0), ("a", a), ("b", b)):
            cells.append(cell({"x": x}, name, None, *([] if value is None else [value])))
    methods = (Method("ours", "Ours", role="proposed"), Method("a", "A"), Method("b", "B"))
    text = results.finding(report(keys=("x",), methods=methods, cells=tuple(cells)))
    assert text == (
        f"Ours is ahead of every baseline that was run in {expected} in which all of them have "
        "results (means)."
        if expected
        else ""
    )


def test_numbers_of_another_paper_do_not_count_for_the_folders_paper() -> None:
    [result] = [records.of_record(RESULTS / "fedmrur" / "fedwmsam")]
    own = records.absent(load_table("fedmrur/table2"))
    more = records.absent(load_table("fedmrur/table3"))
    read = {"fedmrur/fedwmsam": [result], "fedmrur/table2": [own], "fedmrur/table3": [more]}
    [paper] = results.papers(read)
    assert paper.name == "FedMRUR" and not paper.verdicts() and not paper.states()
    [entry] = [entry for entry in paper.entries if entry.main.done]
    assert dict(results.cell_counts(entry))["different"] == 4
    page = {one.path: one.text for one in results.pages(read)}["results/fedmrur/index.md"]
    assert "from another source: FedWMSAM" in page and "numbers differ from print" not in page
