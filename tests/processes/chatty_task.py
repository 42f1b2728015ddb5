"""A certifier's process in which a library prints: more than a pipe holds, with progress among it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stdin.readline()
    sys.stdout.write('Setting the accelerator to cuda\n"text"\n5\n["certify", "vae", 1, 2]\n')
    sys.stdout.write("[2026-11-30 05:00:00] INFO\n" * 20_000)
