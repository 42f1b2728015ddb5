"""Rescaling: exponents that bring a bf16-trained module into fp16's range without changing it."""

from stopdown.scaling.folds import Rescaling, cast_, fold_scaling
from stopdown.scaling.measurement import measure_again, measure_call
from stopdown.scaling.problem import MeasuredCall
from stopdown.scaling.rescale import check_residual, rescale_
from stopdown.scaling.search import find_folds, find_scaling, scale_calls

__all__ = [
    "MeasuredCall",
    "Rescaling",
    "cast_",
    "check_residual",
    "find_folds",
    "find_scaling",
    "fold_scaling",
    "measure_again",
    "measure_call",
    "rescale_",
    "scale_calls",
]
