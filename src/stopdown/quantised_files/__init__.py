"""Files by themselves: values and findings of any weight file, and exponents in quantised ones."""

OFFERS = {
    "open_weight_file": "weight_reader.open_weight_file",
    "put_file_bounds": "scale_exponents.put_file_bounds",
    "fold_file": "scale_exponents.fold_file",
    "inspect_file": "file_values.inspect_file",
}
