"""Formulas of the pages: `$p_a + p_b$` as a Git host shows it, and as MathML on the site.

A browser sets MathML by itself, so that a page loads nothing. The few commands that pages need are in the
tables below; another one ends the build.
"""

from __future__ import annotations

import html
import re

FORMULA = re.compile(r"(?<![\w$`\\])\$(?=\S)([^$`\n]+?)(?<=\S)\$(?![\w$])")
CODE = re.compile(r"^ *```.*?^ *```[^\n]*$|`+[^`\n]*`+", re.DOTALL | re.MULTILINE)
OPERATORS = {
    "le": "≤", "ge": "≥", "cdot": "⋅", "sum": "∑", "lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|",
    "in": "∈", "dots": "…", "approx": "≈", "times": "×",
}  # fmt: skip
NAMES = {"sigma": "σ", "varepsilon": "ε", "delta": "δ"}
FUNCTIONS = ("max", "min", "exp")
FENCES = "()|‖"
THIN, WIDE = '<mspace width="0.17em"></mspace>', '<mspace width="0.4em"></mspace>'
SPACES = {r"\,": THIN, r"\;": WIDE}


def set_formulas(text: str) -> str:
    """Markdown whose formulas are MathML; code stays as it is."""
    made, at = [], 0
    for code in [*CODE.finditer(text), None]:
        end = code.start() if code else len(text)
        made.append(FORMULA.sub(lambda found: set_formula(found[1]), text[at:end]))
        made.append(code[0] if code else "")
        at = code.end() if code else end
    return "".join(made)


def set_formula(formula: str) -> str:
    """One formula as MathML, which no cell of a table ends in, nor a line begins with as a block does.

    Raises:
        ValueError: a command that the tables don't have, or a brace without its other half.
    """
    tokens = re.findall(r"\\[A-Za-z]+|\\.|[A-Za-z]|\d+(?:[.,]\d+)*|[^\s]", formula)[::-1]
    row = _read_row(tokens, formula)
    if tokens:
        raise ValueError(f"The formula {formula!r} has a closing brace too many.")
    return f'<span class="formula"><math>{row}</math></span>'


def _read_row(tokens: list[str], formula: str, closing: str = "") -> str:
    """Atoms with their indices up to the end, or to a closing brace."""
    made = []
    while tokens and tokens[-1] != "}":
        is_function = tokens[-1][1:] in FUNCTIONS
        base, index = _read_atom(tokens, formula), {}
        while tokens and tokens[-1] in ("_", "^"):
            mark = tokens.pop()
            index[mark] = _read_atom(tokens, formula)
        parts = "".join(index[mark] for mark in "_^" if mark in index)
        kind = {"_": "msub", "^": "msup", "_^": "msubsup"}.get("".join(sorted(index, reverse=True)))
        made.append(f"<{kind}>{base}{parts}</{kind}>" if kind else base)
        if is_function and tokens[-1:] != ["("]:
            made.append(THIN)
    if closing and not (tokens and tokens.pop() == closing):
        raise ValueError(f"The formula {formula!r} has a brace without its other half.")
    return "".join(made)


def _read_atom(tokens: list[str], formula: str) -> str:
    if not tokens:
        raise ValueError(f"The formula {formula!r} ends too early.")
    token = tokens.pop()
    if token == "{":
        return f"<mrow>{_read_row(tokens, formula, '}')}</mrow>"
    if token == r"\sqrt":
        return f"<msqrt>{_read_atom(tokens, formula)}</msqrt>"
    return _set_token(token, formula)


def _set_token(token: str, formula: str) -> str:
    """A letter, a number, a sign, or a command without an argument."""
    if token in SPACES:
        return SPACES[token]
    if token.startswith("\\"):
        name = token[1:]
        if name in FUNCTIONS or name in NAMES:
            return f"<mi>{NAMES.get(name, name)}</mi>"
        if name not in OPERATORS:
            known = ", ".join([*OPERATORS, *NAMES, *FUNCTIONS, "sqrt"])
            raise ValueError(f"The formula {formula!r} has {token}, expected one of {known}.")
        token = OPERATORS[name]
    if token.isalpha():
        return f"<mi>{token}</mi>"
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    still = ' stretchy="false" lspace="0em" rspace="0em"' if token in FENCES else ""
    shown = "&#124;" if token == "|" else html.escape("−" if token == "-" else token)
    return f"<mo{still}>{shown}</mo>"
