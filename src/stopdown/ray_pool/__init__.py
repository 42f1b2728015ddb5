"""Workers of a batch on a Ray cluster: `stopdown batch --ray`."""

OFFERS = {"connect_ray": "actors.connect"}
