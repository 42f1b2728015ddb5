"""Plans as `quantization_config` of `from_pretrained` in Diffusers and Transformers."""
