"""What a device makes of each precision, memory strategy and kernel."""
