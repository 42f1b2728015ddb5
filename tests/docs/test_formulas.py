"""Formulas of the pages: MathML that a browser sets by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CHILDREN = {"msub": 2, "msup": 2, "msubsup": 3, "msqrt": 1}


@pytest.fixture(name="formulas")
def fixture_formulas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What sets formulas while the site is built."""
    monkeypatch.syspath_prepend(str(DOCS))
    import formulas

    return formulas


def test_a_formula_is_mathml(formulas: Any) -> None:
    """Indices, powers, roots and bars, and nothing that ends the cell of a table."""
    made = formulas.set_formula(r"\lvert x_i^2 \rvert \le \sqrt{d} \max_t p")
    assert made == (
        '<span class="formula"><math>'
        '<mo stretchy="false" lspace="0em" rspace="0em">&#124;</mo>'
        "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"
        '<mo stretchy="false" lspace="0em" rspace="0em">&#124;</mo>'
        "<mo>≤</mo><msqrt><mrow><mi>d</mi></mrow></msqrt>"
        '<msub><mi>max</mi><mi>t</mi></msub><mspace width="0.17em"></mspace><mi>p</mi>'
        "</math></span>"
    )


def test_every_formula_of_the_pages_is_well_formed(formulas: Any) -> None:
    """Each element has as many children as it takes; no dollar sign is left in the page of the checker."""
    page = formulas.set_formulas((DOCS / "certificate-file.md").read_text(encoding="utf-8"))
    assert "$" not in page
    found = page.split("<math>")[1:]
    assert len(found) > 80
    for part in found:
        tree = ElementTree.fromstring(f"<math>{part.partition('</math>')[0]}</math>")
        wrong = [x.tag for x in tree.iter() if len(x) != CHILDREN.get(x.tag, len(x))]
        assert wrong == [], part


@pytest.mark.parametrize(
    "text", ["a `$HOME/$x` b", "```sh\necho $a$\n```", "costs 5$ or 6$", "$ x $"]
)
def test_what_is_no_formula_stays(text: str, formulas: Any) -> None:
    """Code and dollars are left alone."""
    assert formulas.set_formulas(text) == text


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (r"\frac{a}{b}", r"has \\frac, expected one of le, ge"),
        ("{a", "has a brace without its other half"),
        ("a}", "has a closing brace too many"),
        ("a_", "ends too early"),
    ],
)
def test_a_wrong_formula_is_an_error(formula: str, words: str, formulas: Any) -> None:
    """The message has the formula, and the build ends."""
    with pytest.raises(ValueError, match=words):
        formulas.set_formula(formula)
