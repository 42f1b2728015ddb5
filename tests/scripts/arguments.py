"""Arguments, with options that Stopdown has as well."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--device", default="cpu")
parser.add_argument("--json", action="store_true")
parser.add_argument("--steps", type=int, default=1)
print(parser.parse_args())
