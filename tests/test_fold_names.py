"""Names of folds, to the exponents of rows and columns and back."""

from __future__ import annotations

import torch

from stopdown.fold_names import (
    list_folds,
    name_block,
    name_exponents,
    name_parameters,
    split_fold_name,
    spread_columns,
    spread_rows,
)


def test_names_say_the_place() -> None:
    """What is written is read as the place that it indexes."""
    table = torch.arange(12).view(3, 4)
    for dim, wanted in ((0, table[1:3]), (1, table[:, 1:3])):
        name, place = split_fold_name(name_block("a.weight", dim, 1, 3))
        assert name == "a.weight"
        assert torch.equal(table[place], wanted)
    assert split_fold_name("a.weight") == ("a.weight", ())
    assert torch.equal(table[()], table)


def test_rows_and_columns_add_up() -> None:
    """Each fold multiplies its place; names, spread and named again, are the same."""
    exponents = {"a": -5, "a[:,4:6]": 3, "b[0:2]": 1, "b[2:3]": -1, "c[:,0:1]": 2}
    shapes = {"a": (2, 6), "b": (4, 2), "c": (1, 3)}
    folds = list_folds(exponents)
    rows = {name: spread_rows(folds[name], shape[0]) for name, shape in shapes.items()}
    columns = {name: spread_columns(folds[name], shape[1]) for name, shape in shapes.items()}
    assert rows["a"].tolist() == [-5, -5]
    assert columns["a"].tolist() == [0, 0, 0, 0, 3, 3]
    assert name_exponents(rows, columns) == exponents
    for name, shape in shapes.items():
        scaled = torch.ones(shape)
        for place, exponent in folds[name]:
            scaled[place] *= 2.0**exponent
        both = rows[name][:, None] + columns[name]
        assert torch.equal(torch.ldexp(torch.ones(shape), both), scaled)


def test_a_tied_tensor_has_one_name() -> None:
    """A parameter that two layers share is under its first name only; buffers are named as well."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module.register_buffer("table", torch.zeros(2))
    assert list(name_parameters(module)) == ["0.weight", "0.bias", "1.bias", "table"]
