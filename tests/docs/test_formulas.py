"""Every method has a file of formulas, and each formula converts to MathML."""

import html
import re
from pathlib import Path

import pytest

from fedexp.site.methods import formula_names

FORMULAS = Path(__file__).parents[2] / "docs" / "methods" / "formulas"
FILES = sorted(FORMULAS.glob("*.md"))


def formulas_of(text: str) -> tuple[list[str], str]:
    """Return the formulas of a file, and its text without formulas."""
    displayed = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    prose = re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL)
    return [*displayed, *re.findall(r"\$([^$]+)\$", prose)], re.sub(r"\$[^$]+\$", "", prose)


def test_formula_files_match_modules_of_presets() -> None:
    assert {path.stem for path in FILES} == set(formula_names())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_formula_converts_without_raw_command(path: Path) -> None:
    converter = pytest.importorskip("latex2mathml.converter")
    formulas, prose = formulas_of(path.read_text())

    assert formulas
    assert "$" not in prose
    assert "\\" not in prose
    for formula in formulas:
        shown = html.unescape(re.sub(r"<[^>]*>", "", converter.convert(formula)))
        assert "\\" not in shown, f"{formula} leaves {shown}"
