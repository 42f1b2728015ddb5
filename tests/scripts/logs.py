"""Logging that the script configures."""

import logging
import sys

print(logging.getLogger().level, logging.getLogger().handlers)
logging.basicConfig(
    stream=sys.stdout, level=logging.INFO, format="%(name)s %(levelname)s %(message)s"
)
logging.getLogger("its.own").info("said")
logging.getLogger("its.own").debug("not said")
