"""Plans in the form that other programs take: ONNX and OpenVINO: `stopdown export`."""

OFFERS = {"command export": "export_command.main"}
