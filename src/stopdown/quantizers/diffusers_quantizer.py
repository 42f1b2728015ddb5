"""The quantizer of `StopdownConfig` for Diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_module_tensor_to_device
from diffusers.quantizers.base import DiffusersQuantizer

from stopdown.quantizers.config import StopdownConfig
from stopdown.quantizers.loading import ModelLoad, PlannedModel, check_device_map


class StopdownDiffusersQuantizer(PlannedModel, DiffusersQuantizer):
    """A quantizer that scales and casts each weight when Diffusers places it."""

    def __init__(self, quantization_config: StopdownConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._loading, self._files = ModelLoad(quantization_config), list[str | Path]()

    def validate_environment(self, *args: Any, **options: Any) -> None:
        """Refuse dtypes in which a plan can't be loaded, and device maps that offload weights to disk.

        Diffusers calls this a second time once the device map is known.
        """
        self._loading.request(options.get("torch_dtype"))
        check_device_map(options.get("device_map"))

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return fp32, so that weights arrive in a format that holds every stored one."""
        return torch.float32

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of most of the loaded weights, for the device map's sizes."""
        return self._loading.bare or torch.float16

    def maybe_update_loaded_keys(
        self, loaded_keys: list[str], checkpoint_files: list[str]
    ) -> list[str]:
        """Record the weight files; return the names unchanged."""
        self._files = [x for x in checkpoint_files if isinstance(x, (str, Path))]
        return loaded_keys

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, *args: Any, **options: Any
    ) -> bool:
        """Return whether this quantizer places a weight."""
        return param_name in self._loading

    def create_quantized_param(
        self, model: Any, param_value: Any, param_name: str, target_device: Any, *_: Any, **__: Any
    ) -> None:
        made = self._loading.take(param_name, param_value, target_device)
        set_module_tensor_to_device(model, param_name, target_device, value=made, dtype=made.dtype)

    @property
    def supports_parallel_loading(self) -> bool:
        """Return False, so that only one weight at a time is in memory in fp32."""
        return False

    def get_cuda_warm_up_factor(self) -> int:
        """Return 2, Diffusers' own divisor of the bytes that it reserves before loading."""
        return 2

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        self._loading.begin(model, self._files)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        if (carried := self._loading.finish(model)) is None:
            del model.quantization_method
            model.is_quantized = False
            return self._dequantize(model)
        self.quantization_config = carried
        model.register_to_config(quantization_config=carried)
        return model

    def _dequantize(self, model: Any) -> Any:  # what the model's own `dequantize` calls
        self._loading.undo(model)
        kept = {name: x for name, x in model.config.items() if name != "quantization_config"}
        model._internal_dict = type(model.config)(kept)
        return model

    @property
    def is_serializable(self) -> bool:
        """Return True: scaled weights are saved as they are, and `config.json` contains the plan."""
        return True
