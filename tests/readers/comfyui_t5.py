"""Run by ComfyUI's own code in a process of its own: a T5 of a quantised file, in fp32 and in fp16.

Arguments: the configuration as JSON, the file, the prefix of its weights, where the outputs go.
"""

import json
import sys

config, path, prefix, output = sys.argv[1:5]
sys.argv = ["comfyui", "--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.ops  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
from comfy.text_encoders.t5 import T5  # noqa: E402

state, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
state, metadata = comfy.utils.convert_old_quants(state, prefix, metadata)
assert comfy.utils.detect_layer_quantization(state, prefix) == {"mixed_ops": True}
found = {}
for name in ("fp32", "fp16", "bf16"):
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    operations = comfy.ops.mixed_precision_ops({}, dtype, full_precision_mm=True)
    model = T5(json.loads(config), dtype, "cpu", operations)
    missing = model.load_state_dict(dict(state), strict=False)
    assert not missing.missing_keys, missing
    assert not missing.unexpected_keys, missing
    with torch.no_grad():
        made, _ = model.eval()(torch.arange(12)[None], torch.ones(1, 12), dtype=dtype)
    weight = model.encoder.block[0].layer[1].DenseReluDense.wo.weight
    found[name] = made
    found[f"{name}-weight"] = weight.dequantize()
torch.save(found, output)
