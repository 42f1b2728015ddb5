"""Registration of commands from dataclasses: fields are arguments and options, the docstring is the help.

A field is written `name: Annotated[type, typer.Option(...)] = default`, in the order of `--help`.
Inherited fields come after the command's own. A field with several values is a tuple; Typer sees a list,
and an empty list is replaced by the default. The docstring's lines below `Examples:` are not rewrapped.

Errors of the package name arguments as in Python, precision="fp16" or `precision`, and write SOURCE where
they do not know the model's name. `reword` replaces these by flags and by the name that was typed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from stopdown.app.flags import SHOWN
from stopdown.errors import OptionError, StopdownError
from stopdown.number_formats import find_format


def add_command(app: typer.Typer, name: str, run: Callable[[Any], int], **settings: bool) -> None:
    """Add a command to the command line.

    Args:
        run: does the work; takes the dataclass of the command's options, and returns the exit code.
        settings: Click's context settings, such as `ignore_unknown_options`.
    """
    record = next(iter(get_type_hints(run).values()))
    hints = get_type_hints(record, include_extras=True)
    entries = list_options(record)

    def call(**given: Any) -> None:
        for entry in entries:
            if _is_tuple(hints[entry.name]):
                given[entry.name] = tuple(given[entry.name] or getattr(record, entry.name))
        options = record(**given)
        try:
            code = run(options)
        except StopdownError as error:
            reword(error, options)
            raise
        raise typer.Exit(code)

    parameters = [_make_parameter(entry, hints[entry.name]) for entry in entries]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by Typer
    text = (inspect.getdoc(record) or "").replace("Examples:\n", "\b\nExamples:\n")
    app.command(name, cls=_Command, help=text, context_settings=settings)(call)


class _Command(typer.core.TyperCommand):
    """Command that also reads its prompt from `--prompt`, and names the right option for `--dtype`.

    Its help shows an argument as SOURCE, where Typer has `{SOURCE}` and `SOURCE <str>`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for entry in self.params:
            if entry.param_type_name == "argument":
                entry.display_type = lambda ctx: ""  # type: ignore[attr-defined]  # read by Typer

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.ignore_unknown_options:  # a script has options of its own
            _refuse_dtype(args)
        kinds = {entry.name: entry.param_type_name for entry in self.params}
        if kinds.get("prompt") == "argument":
            args = _move_prompt(args)
        ctx.allow_extra_args |= "prompt" in kinds
        rest = super().parse_args(ctx, args)
        if "prompt" not in kinds or not ctx.args or ctx.resilient_parsing:
            return rest
        if kinds["prompt"] == "option":
            ctx.params["prompt"] = [*(ctx.params.get("prompt") or ()), *ctx.args]
            ctx.args = []
            return []
        words = " ".join([ctx.params["prompt"], *ctx.args])
        raise OptionError(
            f"The prompt has {1 + len(ctx.args)} parts: {words}.",
            expected="A shell splits what isn't in quotes.",
            remedy=f"Put the prompt in quotes: stopdown {self.name} "
            f"{shlex.quote(ctx.params['source'])} {shlex.quote(words)}",
        )


_DTYPES = ("--dtype", "--torch-dtype", "--torch_dtype")
"""Names of `--precision` in other programs."""


def _refuse_dtype(args: Sequence[str]) -> None:
    """Refuse `--dtype` and the like with an error that names `--precision`."""
    for index, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag in _DTYPES:
            value = value if equals else next(iter(args[index + 1 :]), "fp16")
            known = find_format(value.removeprefix("torch."))
            raise OptionError(
                f"There's no option {flag}.",
                expected="In Stopdown it's called --precision.",
                remedy=f"Use --precision {known.name if known else 'fp16'}.",
            )


def _move_prompt(args: Sequence[str]) -> list[str]:
    """Move the values of `--prompt` to the end of a command's words, where Typer reads an argument."""
    rest, prompts = list[str](), list[str]()
    words = iter(args)
    for word in words:
        if word == "--prompt":
            prompts += [given for given in [next(words, None)] if given is not None]
        elif word.startswith("--prompt="):
            prompts.append(word.partition("=")[2])
        else:
            rest.append(word)
    return [*rest, *(["--"] if prompts and "--" not in rest else []), *prompts]


def list_options(record: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a command's dataclass of options: its own first, inherited ones after them."""
    levels = [vars(kind).get("__annotations__", {}) for kind in record.__mro__]
    places = list(dict.fromkeys(name for level in levels for name in level))
    return sorted(dataclasses.fields(record), key=lambda entry: places.index(entry.name))


def describe_command(name: str, options: Any, *, always: Sequence[str] = ()) -> str:
    """Return the command line that repeats a command.

    Args:
        always: options to include even if they have their default values.
    """
    words = ["stopdown", name, options.source]
    for entry in list_options(type(options)):
        value = getattr(options, entry.name)
        if entry.name in ("source", *SHOWN) or value is None:
            continue
        if value != entry.default or entry.name in always:
            flag = "-o" if entry.name == "output" else f"--{entry.name.replace('_', '-')}"
            for item in value if isinstance(value, tuple) else (value,):
                words += [flag] if item is True else [flag, str(item)]
    return shlex.join(words)


def _is_tuple(hint: Any) -> bool:
    return get_origin(get_args(hint)[0]) is tuple


_METAVARS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}


def _describe_value(entry: dataclasses.Field[Any], hint: Any) -> Any:
    """Return the type hint of an option with a readable name for its value and a strict parser."""
    values, *described = get_args(hint)
    info = copy.copy(described[0])
    parts = (values,) if get_origin(values) is list else get_args(values) or (values,)
    inner = next(part for part in parts if part is not type(None))
    inner = get_args(inner)[0] if get_origin(inner) is list else inner
    is_option = isinstance(info, typer.models.OptionInfo)
    if is_option and inner in _METAVARS and not info.metavar:
        info.metavar = _METAVARS[inner]
    said = f"--{entry.name.replace('_', '-')}" if is_option else entry.name.upper()
    if inner in (int, float):
        info.parser = functools.partial(_read_number, said, inner)
    elif inner is Path or entry.name == "output":
        info.parser = functools.partial(_read_path, said, inner)
    return Annotated[(values, info)]


_DECIMAL = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def _read_number(flag: str, kind: type[int] | type[float], given: object) -> int | float:
    """Parse a number in plain digits; unlike Python, refuse `1_000`, `١٠`, ` 10 ` and `nan`."""
    if isinstance(given, (int, kind)) and not isinstance(given, bool) and math.isfinite(given):
        return kind(given)
    text = str(given)
    if (re.fullmatch("-?[0-9]+", text) if kind is int else _DECIMAL.fullmatch(text)) and (
        len(text) <= _MOST_DIGITS and math.isfinite(float(text))
    ):
        return kind(text)
    raise OptionError(
        f"{flag} {shlex.quote(text)} isn't a {'whole ' * (kind is int)}number.",
        expected="A number is written in the digits 0 to 9"
        + ("." if kind is int else ", with a point where it has decimals."),
        remedy=f"For example: {flag} {_EXAMPLES[kind]}.",
    )


_MOST_DIGITS = 300
_EXAMPLES = {int: "20", float: "6.5"}


def _read_path(flag: str, kind: type, given: object) -> object:
    """Return a path, and refuse an empty one, which would mean the working folder."""
    if given == "":
        raise OptionError(
            f"{flag} is empty.",
            expected="It takes a path. An empty one often comes from a shell variable that isn't set.",
            remedy=f"Leave {flag} out, or name a file.",
        )
    return kind(given)


def _make_parameter(entry: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if entry.default is dataclasses.MISSING else entry.default
    if _is_tuple(hint):
        values, *described = get_args(hint)
        hint = Annotated[(list[get_args(values)[0]] | None, *described)]  # type: ignore[misc]
        default = None
    hint = _describe_value(entry, hint)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(entry.name, kind, default=default, annotation=hint)


_VALUE = r'("[^"]*"|-?\w(?:[\w.]*\w)?)'
_ALIASES = {"precisions": ("precision",)}
"""Other names that the package's messages use for an option."""

_FLAGS = {'allow="overwrite"': "--force", 'allow="eps"': "--allow-eps"}
"""Arguments in the package's messages, and the flags that they are on the command line."""


def reword(error: StopdownError, options: Any) -> None:
    """Rewrite the texts of an error for the command line, in place."""
    error.what, error.expected, remedy = (
        reword_text(part, options) for part in (error.what, error.expected, error.remedy)
    )
    error.remedy = name_source(remedy, getattr(options, "source", None) or "SOURCE")


def reword_text(text: str, options: Any) -> str:
    """Replace option names in a message, such as `frames` and frames=9, with flags or argument names."""
    for said, flag in _FLAGS.items():
        text = text.replace(said, flag)
    pattern, arguments = _read_options(options.__class__)

    def write(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name in arguments:
            return name.upper()
        value = "True" if found[1] else found[3].strip('"')
        flag = f"--{name.replace('_', '-')}"
        return flag if value == "True" else f"{flag} {shlex.quote(value)}"

    text = pattern.sub(write, text)
    if any(entry.name == "arg" for entry in dataclasses.fields(options)):
        text = _ARGUMENTS.sub(lambda found: _NAMED.sub(r"--arg \1=VALUE", found[1]), text)
        text = text.replace("=VALUE, --arg", "=VALUE --arg")
    return text


_ARGUMENTS = re.compile(r"request=stopdown\.Request\(arguments=\{([^{}]*)\}\)")
_NAMED = re.compile(r'"(\w+)": \.\.\.')
"""Patterns for pipeline arguments as the package's messages write them; commands write `--arg`."""


@functools.cache
def _read_options(command: type) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return a pattern that matches a command's options in messages, and the names of its arguments."""
    names = [entry.name for entry in dataclasses.fields(command)]
    names += [alias for name in names for alias in _ALIASES.get(name, ())]
    either = "|".join(names)
    hints = get_type_hints(command, include_extras=True)
    return re.compile(rf"(?<![\w.(])(?:(?<!field )`({either})`|({either})={_VALUE})"), frozenset(
        name
        for name, hint in hints.items()
        if any(isinstance(x, ArgumentInfo) for x in get_args(hint))
    )


def name_source(text: str, source: str) -> str:
    """Replace SOURCE in a text with the name of the model, quoted for a shell."""
    return re.sub(r"\bSOURCE\b", lambda _: shlex.quote(source), text)
