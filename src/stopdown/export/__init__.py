"""Plans in the form that other programs take: ONNX, OpenVINO, tables of scales: `stopdown export`."""

OFFERS = {"command export": "export_command.main"}
