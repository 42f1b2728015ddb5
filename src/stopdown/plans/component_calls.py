"""Calls of components whose pipeline is not there, recorded elsewhere.

A recorded call is a `.safetensors` file of its arguments by name (`hidden_states`,
`added_cond_kwargs.text_embeds`); what is no tensor stands as JSON in the entry `arguments` of its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stopdown.component_calls.components import Callee, list_component_calls
from stopdown.errors import OptionError, take_first_line

Arguments = Mapping[str, Any]
"""Of one call by their names."""


def read_call(text: str) -> Arguments:
    """The arguments in `FILE`; in `vae.decode=FILE` below the name of the call."""
    name, is_named, rest = text.partition("=")
    path = Path(rest if is_named else text).expanduser()
    arguments: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as file:
            arguments |= json.loads((file.metadata() or {}).get("arguments", "{}"))
            for key in file.keys():  # noqa: SIM118 - no dict
                value, table = file.get_tensor(key), arguments
                *path, last = key.split(".")
                for part in path:
                    table = table.setdefault(part, {})
                table[last] = value.float() if value.is_floating_point() else value
    except (OSError, SafetensorError, ValueError) as error:
        raise OptionError(
            f"The recorded call {path} cannot be read: {error}.",
            expected="It is a .safetensors file with the arguments of a component's call by their names.",
            remedy="Record it: safetensors.torch.save_file(arguments, 'call.safetensors').",
        ) from error
    return {name: arguments} if is_named else arguments


def list_part_calls(program: Any) -> dict[str, Callee]:
    """The calls of a program of parts by name: `transformer`, `vae.decode`."""
    return {callee.name: callee for callee in list_component_calls(vars(program))}


def play_calls(program: Any, given: Sequence[str | Mapping[str, Any]]) -> None:
    known = list_part_calls(program)
    for one in given:
        for callee, arguments in _name_calls(known, one):
            try:
                with torch.no_grad():
                    callee.bind(callee.owner)(**arguments)
            except Exception as error:  # whatever a model's code raises for other arguments
                raise OptionError(
                    f"{callee.name} did not run as recorded: {take_first_line(error)}.",
                    expected="A call has the arguments of the component's own class by their names.",
                    remedy="Record a call of this model, or bound every call: `certify`.",
                ) from error


def _name_calls(
    known: Mapping[str, Callee], given: str | Mapping[str, Any]
) -> Iterator[tuple[Callee, Arguments]]:
    if not isinstance(given, str) and given and given.keys() <= known.keys():
        yield from ((known[name], arguments) for name, arguments in given.items())
        return
    if isinstance(given, str) or len(known) != 1:
        what = f"the prompt {given!r}" if isinstance(given, str) else "a call without a name"
        raise OptionError(
            f"The file holds no pipeline but what is called as {' and '.join(known)}, and {what} was "
            "given.",
            expected="Arguments of these calls by name, as a program gave them to the component.",
            remedy=f'Name the call: call="{next(iter(known))}=FILE", or bound every call: `certify`.',
        )
    yield next(iter(known.values())), given
