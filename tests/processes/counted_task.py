"""In the place of the certifier's process: counts the components of its task."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    count = len(json.loads(sys.stdin.readline())["components"])
    sys.stdout.write(f"{json.dumps(['counted', 'components', count, count])}\n")
