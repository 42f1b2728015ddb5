"""How far below fp16's maximum values stay: each figure that the search for exponents is held to."""

FREE_BITS = 4.0
"""Headroom that is free of charge: 65504 / 2**4. What few calls reach, others exceed."""

ASKED_BITS = 1.0
"""What every 16-bit value keeps, and a matrix that hooks leave in fp16."""

HARDLY_BITS = 0.01
"""The same where that takes too much in fp32. It holds for the calls that were measured and few others."""

CALIBRATED_BITS = 4.0
"""Over what was measured, where a bound is not taken although there are bounds."""
