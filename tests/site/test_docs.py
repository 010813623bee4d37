"""The pages that are generated from code, configs and texts."""

from __future__ import annotations

import posixpath
import re
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError
from fedexp.core.needs import Needs
from fedexp.core.runner import run
from fedexp.engines.serial import Serial
from fedexp.running.experiment import Experiment
from fedexp.site import api, config_reference, guides, methods
from fedexp.site.page import Mention, Page
from fedexp.site.markdown import docstring, escaped

MENTION = Mention("Table 1", "results/t1.md#c", "85.6 ± 0.3 (n = 3), reduced")


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    """By path, all of them; ma_echo is in one table."""
    made = [
        *methods.pages({"ma_echo": [MENTION]}),
        *config_reference.pages(),
        *guides.pages(),
        *api.pages(),
        Page("results/t1.md", "", '<a id="c"></a>'),
    ]
    assert len({page.path for page in made}) == len(made)
    return {page.path: page for page in made}


def leaves(node: object, above: str = "") -> set[str]:
    """Dotted names of a config file's keys that hold values, plug-ins' classes aside."""
    if not isinstance(node, dict) or not node:
        return {above.removesuffix(".")}
    return {
        name
        for key, value in node.items()
        if key not in ("defaults", "_target_")
        for name in leaves(value, f"{above}{key}.")
    }


def anchors(text: str) -> set[str]:
    """Those that the Markdown sets, and those of its headings."""
    headings = re.findall(r"^#+ ([^{\n]+)$", text, re.MULTILINE)
    return {*re.findall(r'(?:id="|\{#)([^"}]+)', text), *map(guides.slug, headings)}


def test_every_method_has_a_page_with_its_files_and_is_listed(pages: dict[str, Page]) -> None:
    paths = sorted((conf_dir() / "method").glob("*.yaml"))
    for path in paths:
        text = pages[f"methods/{path.stem}.md"].text
        preset = yaml.safe_load(path.read_text())
        parts = [entry.popitem() for entry in preset["defaults"] if entry != "_self_"]
        chosen = [(group.split(" /"), option) for group, option in parts]
        files = [
            path,
            *(
                conf_dir() / group / f"{option}.yaml"
                for (how, group), option in chosen
                if how == "override"
            ),
        ]
        files += [
            file
            for (how, group), _ in chosen
            if how == "optional"
            for file in (conf_dir() / group).glob("*")
        ]
        for file in files:
            assert file.read_text().strip() in text, (path.stem, file.name)
        assert f"]({path.stem}.md)" in pages["methods/index.md"].text
    assert "Others" not in pages["methods/index.md"].text
    assert (
        "[Table 1](../results/t1.md#c): 85.6 ± 0.3 (n = 3), reduced"
        in pages["methods/ma_echo.md"].text
    )
    assert sum("Our results" in page.text for page in pages.values()) == 1


@pytest.mark.parametrize("name", ["feddf_paper", "fed_dafl", "dense_coboost"])
def test_a_preset_is_composed_as_by_hydra(name: str) -> None:
    made = methods.composed(conf_dir() / "method" / f"{name}.yaml", compose([]))
    theirs = compose([f"method={name}"])
    assert (made.values, made.contents) == (theirs.values, theirs.contents)


def test_what_is_sent_is_what_a_run_counts(pages: dict[str, Page]) -> None:
    """SCAFFOLD's model and controls, both ways; an average of models sends the model
    alone.
    """
    experiment = Experiment.of(compose(["method=scaffold", "clients=1", "partition=iid"]))
    data = experiment.load(torch.device("cpu"))
    counted = next(
        run(experiment.aggregator, experiment.env(data, torch.device("cpu")), Serial(), data)
    ).metrics
    text = unescape(pages["methods/scaffold.md"].text)
    assert counted["bytes/down"] == counted["bytes/up"] == 38480
    assert "| down, to a client | 38.5 kB | the model, <code>c</code> (as the model) |" in text
    assert "| up, from a client | 38.5 kB | the model, <code>dc_i</code> (as the model) |" in text
    assert (
        "| stored at the server | 38.5 kB | <code>weights</code> (as the model), <code>shared.c</code> (as the model) |"
        in text
    )
    assert "| stored at a client | 19.2 kB | <code>c_i</code> (as the model) |" in text
    assert "| down, to a client | 19.2 kB | the model |" in unescape(
        pages["methods/average.md"].text
    )
    assert "no bytes are counted" in pages["methods/local.md"].text


def test_needs_are_said(pages: dict[str, Page]) -> None:
    assert methods.NEEDS.keys() == vars(Needs()).keys() - {"demands", "lifted_by"}
    text = unescape(pages["methods/fedlaw.md"].text)
    assert (
        "data on the server: [<code>proxy.source</code>](../config/index.md#proxy.source)" in text
    )
    assert "labels of the server's data" in text
    text = unescape(pages["methods/feddyn.md"].text)
    assert (
        "[<code>aggregator.weights</code>](../config/aggregator.md) = <code>uniform</code>" in text
    )
    assert (
        "[<code>server_optimizer</code>](../config/server_optimizer.md) = <code>FedDynServer</code>"
        in text
    )


def test_a_preset_says_what_it_sets_otherwise(pages: dict[str, Page]) -> None:
    text = unescape(pages["methods/dense_coboost.md"].text)
    assert (
        "| <code>aggregator.generator.clip</code> | <code>10.0</code> | <code>null</code> |" in text
    )
    assert (
        "<code>aggregator.lambda_2</code> | <code>1.0</code> | <code>0.5</code>" in text
        and "aggregator.T_G</code> |" not in text
    )
    assert "| key |" not in pages["methods/dense.md"].text


def test_comments_are_those_of_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    lines = [
        "# Head.",
        "# More.",
        "a: '#1' # one",
        "",
        "# Two",
        "# lines.",
        "b: # below",
        "  c: {d: 1} # e",
        "  # Above",
        "  # it.",
        "  h: 2",
        "  f:",
    ]
    path.write_text("\n".join([*lines, "    - 1 # g", "    - 2", ""]))
    assert config_reference.header(path) == "Head. More."
    assert [
        (key.name, key.default, key.comment, key.note) for key in config_reference.keys_of(path)
    ] == [
        ("a", "'#1'", "one", ""),
        ("b", None, "below", "Two lines."),
        ("b.c", "{d: 1}", "e", ""),
        ("b.h", "2", "Above it.", ""),
        ("b.f", "1; 2", "g", ""),
    ]


def test_every_key_of_the_config_has_a_comment(pages: dict[str, Page]) -> None:
    keys = config_reference.keys_of(conf_dir() / "config.yaml")
    written = leaves(yaml.safe_load((conf_dir() / "config.yaml").read_text()))
    assert (
        keys.pop(0).name == "defaults"
        and {key.name for key in keys if key.default is not None} == written
    )
    page = pages["config/index.md"].text
    for key in keys:
        assert key.comment or (key.default is None and "." in key.name), (
            f"{key.name} has no comment"
        )
        if key.default is not None:
            assert f'<a id="{key.name}"></a>' in page and escaped(key.comment) in page, key.name
    assert "The keys below do not change a result" in page


def test_every_option_of_every_group_is_there_with_its_keys(pages: dict[str, Page]) -> None:
    for path in sorted(conf_dir().glob("*/**/*.yaml")):
        group, _, option = path.relative_to(conf_dir()).with_suffix("").as_posix().partition("/")
        if group in ("by_dataset", "method", "table", "tuned"):
            continue
        page = pages[f"config/{group}.md"].text
        anchor = option.replace("/", "-")
        assert f"{{#{anchor}}}" in page
        valued = [key.name for key in config_reference.keys_of(path) if key.default is not None]
        for name in leaves(yaml.safe_load(path.read_text()) or {}) - {""}:
            assert any(f"{name}.".startswith(f"{key}.") for key in valued), (path, name)
        for name in valued:
            assert name == "_target_" or f'<a id="{anchor}.{name}"></a>' in page, (path, name)
        for comment in re.findall(r"(?:^|\s)# ?(.+)$", path.read_text(), re.MULTILINE):
            assert comment.startswith("@package") or escaped(comment.strip()) in page, (
                path,
                comment,
            )


def test_guides_are_sections_that_are_there(
    pages: dict[str, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pages["guides/own-method.md"].text
    assert (
        "class PowerMean(Mean)" in text
        and "class Anchored(Trainer)" in text
        and "## A data set" not in text
    )
    assert "[Your own plug-ins](own-method.md#your-own-plug-ins)" in text
    assert "[`conf/config.yaml`](../config/index.md)" in pages["guides/first-steps.md"].text
    assert guides.sections_of("# T\n## A\nx\n```\n## b\n```\n## C") == {
        "A": "x\n```\n## b\n```",
        "C": "",
    }
    monkeypatch.setattr(
        guides, "GUIDES", (guides.Guide("x", "X", (("README.md", "No such heading"),)),)
    )
    with pytest.raises(ConfigError, match="No such heading"):
        guides.pages()


def test_no_link_among_the_pages_dangles(pages: dict[str, Page]) -> None:
    for page in pages.values():
        prose = re.sub(r"```.*?```", "", page.text, flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", prose):
            path, _, anchor = target.partition("#")
            place = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page.path), path))
                if path
                else page.path
            )
            assert place in pages, (page.path, target)
            assert not anchor or anchor in anchors(pages[place].text), (page.path, target)


def test_the_api_has_the_hooks(pages: dict[str, Page]) -> None:
    text = pages["api/core.trainer.md"].text
    assert (
        "def adjustment(self, ctx: Ctx) -> Adjustment | None" in text
        and "{#Trainer.adjustment}" in text
    )
    assert not any(
        re.search(r"def _[a-z]|__post_", page.text)
        for path, page in pages.items()
        if path[:4] == "api/"
    )
    assert (
        "def run(overrides: Sequence[str]=(), *, say: Callable[[str], None] | None=None) -> Run"
        in pages["api/api.md"].text
    )


def test_docstring_sections_become_lists_and_labels() -> None:
    text = """Return ``a_b * c``
and d_e.

Args:
    x: Size of `y`.
        More.
    *w: A <t>.

Returns:
    The sum.

    It is positive.

Update:
    Two steps:

        a <- b_c
          + d

Differences from the paper:
    - One.
    - Two
      lines.

The end."""
    assert docstring(text, {"y": "p.md"}) == (
        "Return <code>a&#95;b &#42; c</code> and d&#95;e.\n\n"
        "**Args:**\n\n"
        "- <code>x</code>: Size of [<code>y</code>](p.md). More.\n"
        "- <code>&#42;w</code>: A &#60;t&#62;.\n\n"
        "**Returns:** The sum.\n\nIt is positive.\n\n"
        "**Update:** Two steps:\n\n```text\na <- b_c\n  + d\n```\n\n"
        "**Differences from the paper:**\n\n- One.\n- Two lines.\n\n"
        "The end."
    )


def test_docstring_label_without_indented_text_is_a_paragraph() -> None:
    text = "State:\n\n    a <- b_c\n\nUpdate: one\n    two."
    assert docstring(text) == "State:\n\n```text\na <- b_c\n```\n\nUpdate: one two."


def test_labelled_parts_of_a_method_are_on_its_pages(pages: dict[str, Page]) -> None:
    text = pages["methods/scaffold.md"].text
    labels = ("Reference", "Update", "Communication", "State", "Differences from the paper")
    places = [text.index(f"**{label}:** ") for label in labels]
    assert places == sorted(places)
    text = pages["api/core.trainer.md"].text
    assert "**Args:**\n\n- <code>loss</code>: " in text and "**Returns:** " in text
    assert "Args: " not in text and "\nAttributes: " not in text


def test_links_of_the_readme_into_the_site_are_its_pages(pages: dict[str, Page]) -> None:
    found = re.findall(
        r"\(outputs/site/([^)]+)\.html\)", (conf_dir().parent / "README.md").read_text()
    )
    assert len(found) > 3 and set(found) - {"index"} <= {path.removesuffix(".md") for path in pages}
