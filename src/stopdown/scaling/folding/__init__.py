"""Application of exponents, casts and fp32 residual streams to a module's weights and attributes."""
