"""The limits of a batch: how many items it has, how often one is begun, and when it is given up."""

MOST_ITEMS = 100_000

TRIES = 3
"""How often an item is begun before its workers' deaths are its result."""

MOST_DEATHS = 10
"""Deaths in a row, without an item between them, that end a batch: it is not the items then."""

MOST_EARLY_DEATHS = 5
"""Deaths in a row of workers that have not begun, which end a batch."""
