"""Plans through `quantization_config`, which `from_pretrained` of Diffusers and Transformers takes."""
