"""Rescaling: exponents that bring a bf16-trained module into fp16's range without changing it."""
