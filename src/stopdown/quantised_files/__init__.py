"""Files by themselves: values and findings of any weight file, quantised ones too."""

OFFERS = {
    "open_weight_file": "weight_reader.open_weight_file",
    "inspect_file": "file_values.inspect_file",
}
