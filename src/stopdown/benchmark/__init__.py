"""What a device makes of each precision, measured: the table that `stopdown bench` writes."""
