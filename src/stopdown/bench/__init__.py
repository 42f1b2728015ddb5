"""What a device makes of each precision: `stopdown bench`."""

OFFERS = {"command bench": "bench_command.main"}
