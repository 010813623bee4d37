"""Tests of the pages that are generated from code, configs and texts."""

from __future__ import annotations

import importlib
import re
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml

from fedexp.commands.help import help_text
from fedexp.commands.table import parser
from fedexp.config import comments
from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.needs import Needs
from fedexp.core.runner import run
from fedexp.engines.serial import Serial
from fedexp.running.experiment import Experiment
from fedexp.site import api_reference, command_reference, config_reference, methods
from fedexp.site.docstrings import as_markdown, parts_of
from fedexp.site.markdown import escaped
from fedexp.site.page import Mention, Page

MENTION = Mention("Table 1", "results/t1.md#c", "85.6 ± 0.3 (n = 3), reduced")


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    """Return all pages by their paths.

    One table has a column for ma_echo.
    """
    made = [
        *methods.pages({"ma_echo": [MENTION]}, {}, {"scaffold": "$c - c_i$"}),
        *config_reference.pages(),
        *api_reference.pages(),
        Page("results/t1.md", "", '<a id="c"></a>'),
    ]
    assert len({page.path for page in made}) == len(made)
    return {page.path: page for page in made}


def leaves(node: object, above: str = "") -> set[str]:
    """Return the dotted names of a file's keys that have values, except classes."""
    if not isinstance(node, dict) or not node:
        return {above.removesuffix(".")}
    return {
        name
        for key, value in node.items()
        if key not in ("defaults", "_target_")
        for name in leaves(value, f"{above}{key}.")
    }


def test_every_method_has_a_page_with_its_files_and_is_listed(pages: dict[str, Page]) -> None:
    paths = sorted((conf_dir() / "method").glob("*.yaml"))
    for path in paths:
        text = pages[f"methods/{path.stem}.md"].text
        preset = yaml.safe_load(path.read_text())
        parts = [entry.popitem() for entry in preset["defaults"] if entry != "_self_"]
        chosen = [(group.split(" /"), option) for group, option in parts]
        files = [
            file
            for (how, group), _ in chosen
            if how == "optional"
            for file in (conf_dir() / group).glob("*")
        ]
        for file in [path, *files]:
            assert file.read_text().strip() in text, (path.stem, file.name)
        for (how, group), option in chosen:
            if how == "override":
                assert f"]({'../reference/config/' + group}.md#{option})" in text
                for key in leaves(
                    yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
                ):
                    assert not key or f"<code>{group}.{key}" in unescape(text), (path.stem, key)
        assert f"]({path.stem}.md)" in pages["methods/index.md"].text
    assert "Others" not in pages["methods/index.md"].text
    assert (
        "[Table 1](../results/t1.md#c): 85.6 ± 0.3 (n = 3), reduced"
        in pages["methods/ma_echo.md"].text
    )
    assert sum("Our numbers" in page.text for page in pages.values()) == 1


@pytest.mark.parametrize("name", ["feddf_paper", "fed_dafl", "dense_coboost"])
def test_a_preset_is_composed_as_by_hydra(name: str) -> None:
    made = methods.composed(conf_dir() / "method" / f"{name}.yaml", compose([]))
    theirs = compose([f"method={name}"])
    assert (made.values, made.contents) == (theirs.values, theirs.contents)


def test_what_is_sent_is_what_a_run_counts(pages: dict[str, Page]) -> None:
    """SCAFFOLD sends the model and the controls both ways.

    Averaging sends only the model.
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
        "data on the server: [<code>proxy.source</code>](../reference/config/index.md#proxy.source)"
        in text
    )
    assert "labels of the server's data" in text
    text = unescape(pages["methods/feddyn.md"].text)
    assert (
        "[<code>aggregator.weights</code>](../reference/config/aggregator.md) = <code>uniform</code>"
        in text
    )
    assert (
        "[<code>server_optimizer</code>](../reference/config/server_optimizer.md) = <code>FedDynServer</code>"
        in text
    )


def test_a_preset_says_what_it_sets_otherwise(pages: dict[str, Page]) -> None:
    text = unescape(pages["methods/dense_coboost.md"].text)
    assert (
        "| <code>aggregator.generator.clip</code> | <code>10.0</code> | <code>null</code> |" in text
    )
    differences = text.partition("| key | <code>dense_coboost</code> |")[2].partition("##")[0]
    assert "<code>aggregator.lambda_2</code> | <code>1.0</code> | <code>0.5</code>" in differences
    assert "aggregator.T_G" not in differences
    assert "| key | <code>" not in pages["methods/dense.md"].text


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
    assert comments.header(path) == "Head. More."
    assert [(key.name, key.default, key.comment, key.note) for key in comments.keys_of(path)] == [
        ("a", "'#1'", "one", ""),
        ("b", None, "below", "Two lines."),
        ("b.c", "{d: 1}", "e", ""),
        ("b.h", "2", "Above it.", ""),
        ("b.f", "1; 2", "g", ""),
    ]


def test_every_key_of_the_config_has_a_comment(pages: dict[str, Page]) -> None:
    keys = comments.keys_of(conf_dir() / "config.yaml")
    written = leaves(yaml.safe_load((conf_dir() / "config.yaml").read_text()))
    assert (
        keys.pop(0).name == "defaults"
        and {key.name for key in keys if key.default is not None} == written
    )
    page = pages["reference/config/index.md"].text
    for key in keys:
        assert key.comment or (key.default is None and "." in key.name), (
            f"{key.name} has no comment"
        )
        if key.default is not None:
            assert f'<a id="{key.name}"></a>' in page and escaped(key.comment) in page, key.name
    assert "The run ID does not depend on the keys below" in page


def test_every_option_of_every_group_is_there_with_its_keys(pages: dict[str, Page]) -> None:
    for path in sorted(conf_dir().glob("*/**/*.yaml")):
        group, _, option = path.relative_to(conf_dir()).with_suffix("").as_posix().partition("/")
        if group in ("by_dataset", "method", "table", "tuned"):
            continue
        page = pages[f"reference/config/{group}.md"].text
        anchor = option.replace("/", "-")
        assert f"{{#{anchor}}}" in page
        valued = [key.name for key in comments.keys_of(path) if key.default is not None]
        for name in leaves(yaml.safe_load(path.read_text()) or {}) - {""}:
            assert any(f"{name}.".startswith(f"{key}.") for key in valued), (path, name)
        for name in valued:
            assert name == "_target_" or f'<a id="{anchor}.{name}"></a>' in page, (path, name)
        for comment in re.findall(r"(?:^|\s)# ?(.+)$", path.read_text(), re.MULTILINE):
            assert comment.startswith("@package") or escaped(comment.strip()) in page, (
                path,
                comment,
            )


def test_labelled_parts_of_a_method_are_sections_of_its_page(pages: dict[str, Page]) -> None:
    text = pages["methods/scaffold.md"].text
    titles = ("Reference", "Update {#update}", "Usage", "Communication and state", "Differences")
    places = [text.index(f"## {title}") for title in titles]
    assert places == sorted(places)
    assert "Karimireddy" in text[places[0] : places[1]]
    assert "$c - c_i$" in text[places[1] : places[2]]


def test_docstring_is_split_into_its_labelled_parts() -> None:
    text = """Mean of `x`
and y.

More.

Update:
    Two steps::

        a <- b_c

Differences from the paper:
    None.

Returns:
    The sum."""
    parts = parts_of(text)
    assert parts.idea == "Mean of `x` and y."
    assert parts.rest == "More.\n\nReturns:\n    The sum."
    assert parts.labelled == {
        "Update": "Two steps:\n\n    a <- b_c",
        "Differences from the paper": "None.",
    }
    made = as_markdown(text)
    assert "**Update**\n\nTwo steps:\n\n    a <- b_c\n\n" in made
    assert made.endswith("Returns:\n    The sum.")


def test_every_public_module_has_a_page_and_a_summary(pages: dict[str, Page]) -> None:
    index = pages["reference/api/index.md"].text
    for module in api_reference.MODULES:
        importlib.import_module(module)
        assert pages[api_reference.page_of(module)].text == f"::: {module}\n"
        assert re.search(rf"\]\({re.escape(module)}\.md\) \| \w", index), module


def test_commands_have_pages_with_all_their_arguments() -> None:
    made = {
        page.path: page.text
        for page in command_reference.pages(help_text(conf_dir()), {"fedexp-table": parser()})
    }
    text = unescape(made["reference/commands/fedexp-table.md"])
    assert "## run {#run}" in text and "<code>--only key=value</code>" in text
    assert "Usage: fedexp [key=value ...]" in made["reference/commands/fedexp.md"]
