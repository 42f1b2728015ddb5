"""Messages of failures, and the class of each."""

from __future__ import annotations

CAST = "RuntimeWarning: invalid value encountered in cast"

MESSAGES = [
    (CAST, "unattributed"),
    ("mat1 and mat2 must have the same dtype, but got Float and Half", "dtype-mismatch"),
    ("expected scalar type Float but found BFloat16", "dtype-mismatch"),
    (
        "Input type (float) and bias type (struct c10::Half) should be the same",
        "dtype-mismatch",
    ),
    ("\"LayerNormKernelImpl\" not implemented for 'Half'", "not-implemented"),
    ("fp8e4nv data type is not supported on CUDA arch < 89", "not-implemented"),
    # of PyTorch
    ("'mps.add' op requires the same element type for all operands and results", "dtype-mismatch"),
    (
        "index_add_(): self (Half) and source (Float) must have the same scalar type",
        "dtype-mismatch",
    ),
    ("index_copy_(): self and source expected to have the same dtype, but got", "dtype-mismatch"),
    ("torch.meshgrid expects all tensors to have the same dtype", "dtype-mismatch"),
    ("linalg.solve: Expected A and B to have the same dtype, but found A of", "dtype-mismatch"),
    ("Unsupported dtype Half", "not-implemented"),
    ("softmax with half to float conversion is not supported on CPU", "not-implemented"),
    ("linalg.inv: Low precision dtypes not supported. Got BFloat16", "not-implemented"),
    ("quantile() input tensor must be either float or double dtype", "not-implemented"),
    ("No available kernel. Aborting execution.", "not-implemented"),
    ("cutlassF: no kernel found to launch!", "not-implemented"),
    (
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
        "precision, but got a signal size of[50]",
        "not-implemented",
    ),
    (
        "value cannot be converted to type at::Half without overflow: -1e+09",
        "attention-mask",
    ),
    ("RuntimeWarning: overflow encountered in cast", "unattributed"),
    (
        "SVD unet gives NaN on A100, not on V100: compiled, attention accumulates in half precision",
        "attention-range",
    ),
    ("probability tensor contains either `inf`, `nan` or element < 0", "encoder-range"),
    (
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, CUDA_R_16BF`",
        "bf16-emulated",
    ),
    # of Diffusers and Transformers
    ("Query, key, and value must be bfloat16.", "not-implemented"),
    (
        "There are modules in T5EncoderModel that should be kept in float32: ['wo'].",
        "fp32-module",
    ),
    (
        "The input hidden states seems to be silently casted in float32, this might be related",
        "fp32-module",
    ),
    ("`.half()` is not supported for quantized model.", "quantised"),
    ("`torch.bfloat16` is not supported for AWQ CUDA kernels yet.", "quantised"),
    (
        "MXFP4 quantization is only supported on GPUs with compute capability >= 7.5",
        "not-implemented",
    ),
    (
        "transformer needs to be of type `torch.dtype`, e.g. `torch.float16`, but is x.",
        "dtype-option",
    ),
    (
        "Falling back to torch.float32 because loading with the original dtype failed",
        "bf16-emulated",
    ),
    ("LayerwiseCastingHook does not support deinitialization.", "quality"),
    ("Potential NSFW content was detected in one or more images. A black image", "look-alike"),
]
