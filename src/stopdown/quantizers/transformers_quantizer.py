"""The quantizer of `StopdownConfig` for Transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from stopdown.quantizers.config import StopdownConfig
from stopdown.quantizers.loading import ModelLoad, PlannedModel, check_device_map


class StopdownTransformersQuantizer(PlannedModel, HfQuantizer):
    """A quantizer that scales and casts each weight when Transformers has read it."""

    def __init__(self, quantization_config: StopdownConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.pre_quantized = False  # weights of a folder that carries a plan are folded as well
        self._loading, self._files = ModelLoad(quantization_config), list[str]()

    def validate_environment(self, *args: Any, **options: Any) -> None:
        """Refuse weights on disk."""
        check_device_map(options.get("device_map"))

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Check the dtype; return fp32, so that weights arrive in a format that holds every stored one."""
        self._loading.request(dtype)
        return torch.float32

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Return whether a weight is scaled or cast when it arrives."""
        return param_name in self._loading

    def get_quantize_ops(self) -> ConversionOps:
        return _Fold(self._loading)

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        self._files = list(options.get("checkpoint_files") or ())
        return model

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Choose the plan before any weight is loaded; return Transformers' weight conversions unchanged.

        Of the hooks that Transformers calls before a load, this is the first after weights are tied.
        """
        self._loading.begin(model, self._files)
        return super().update_weight_conversions(weight_conversions, model)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        check_device_map(getattr(model, "hf_device_map", None))
        carried = self._loading.finish(model)
        if carried is None:
            self.remove_quantization_config(model)
        else:
            self.quantization_config = model.config.quantization_config = carried
        for config in (model.config, *_list_parts(model.config)):
            config.dtype = model.dtype
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the weights to save, without exponents.

        Without Stopdown, Transformers ignores the unknown quantization method in the config, and would use
        scaled weights as they are.
        """
        return self._loading.unfold_weights(model), {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Remove the plan, which leaves the weights in fp32, whatever dtype the model was loaded in."""
        self._loading.undo(model)
        for config in (model.config, *_list_parts(model.config)):
            config.dtype = model.dtype
        return model

    def is_serializable(self) -> bool:
        """Return True: `config.json` contains the plan."""
        return True


def _list_parts(config: Any) -> list[Any]:
    found = (getattr(config, name, None) for name in config.sub_configs)
    return [x for x in found if x is not None]


class _Fold(ConversionOps):
    """A conversion that scales and casts a stored weight."""

    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading

    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
        """Return the weights scaled by their exponents and cast."""
        made = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            made[name] = self._loading.take(name, tensor, tensor.device)
        return made
