"""`PromptMaker`: make items one by one or in tables, for use in Ray Data, Ray actors or loops.

Ray is not required. `PromptMaker` is the callable class for `ray.data.Dataset.map_batches`, and
`ray.remote(PromptMaker)` is an actor. Each instance loads the model once, at its first item. A repair only
lasts for the item that needed it, so results do not depend on the order of items.

Not covered: if two instances receive the same item at the same time, both make it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from stopdown.batch.jobs import PreparedBatch, Settings, prepare_batch
from stopdown.batch.output_folder import find_batch_folder, make_folder
from stopdown.batch.prompts import Item, make_item
from stopdown.batch.worker import Worker
from stopdown.errors import InputError

_COLUMNS = ("item", "status", "output", "error", "elapsed_s", "plan")


class PromptMaker:
    """Callable that makes items one by one (`make`), or all rows of a table when it is called.

    Args:
        source: Hub id, Diffusers folder, single safetensors file or bundled model.
        output: folder of the outputs, to which every worker can write.
        defaults: values for fields that an item lacks: `steps=20`, `seed=0`; and settings of
            `stopdown.batch.jobs.Settings`: `precision="fp16"`, `device`, `fps`, `journal`.
    """

    def __init__(self, source: str, output: str, **defaults: Any) -> None:
        names = {entry.name for entry in dataclasses.fields(Settings)}
        shared = {k: v for k, v in defaults.items() if k in names}
        self._settings = Settings(source, output, **shared)
        self._defaults = {k: v for k, v in defaults.items() if k not in names}
        self._prepared: PreparedBatch | None = None
        self._worker: Worker | None = None

    def make(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Make one item, or find its finished output.

        Args:
            fields: fields of `stopdown.batch.prompts.Item`: prompt, seed, steps…

        Returns:
            The item's hash `item`, `status` (made, also if its output was found, or failed), `output` (file
            name), `error`, `elapsed_s` and `plan` (the checksum of its plan).

        Raises:
            InputError: a field is unknown or wrong, or the pipeline does not accept it.
            StopdownError: the model cannot be loaded, or the output cannot be written.
        """
        item = _read_item({**self._defaults, **fields})
        request = item.make_request()
        if self._prepared is None or self._worker is None:
            make_folder(find_batch_folder(self._settings.output))
            self._prepared = prepare_batch(self._settings, [(item, request)])
            self._worker = Worker(self._prepared.job, self._settings.device)
        (task,), _ = self._prepared.sign([(item, request)])
        result = self._worker.make(task.complete(), self._prepared.plan).result
        return {name: getattr(result, name) for name in _COLUMNS}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Make each row of a table, as Ray's `map_batches` passes it, and add the columns of `make`."""
        names = list(batch)
        rows = [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        made = [self.make(row) for row in rows]
        return {**batch, **{name: np.array([x[name] for x in made]) for name in _COLUMNS}}


def _read_item(fields: Mapping[str, Any]) -> Item:
    plain = {name: x.item() if hasattr(x, "item") else x for name, x in fields.items()}
    return make_item(plain, 1, lambda what: InputError(f"The item {plain!r:.200} is wrong: {what}"))
