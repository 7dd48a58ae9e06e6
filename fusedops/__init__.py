"""Fused GPU kernels for transformer workloads in JAX: functions, Flax modules, and the core to write
kernels of your own."""

from . import testing as testing
from ._attention import attention as attention
from ._dispatch import explain as explain
from .kernels._call import TensorDescriptor as TensorDescriptor
from .kernels._call import strides_from_shape as strides_from_shape
from .kernels._call import triton_call as triton_call
from .kernels._call import triton_compile as triton_compile
from .kernels._compile import CUSTOM_CALL_TARGET_NAME as CUSTOM_CALL_TARGET_NAME
from .kernels._compile import KernelCompileError as KernelCompileError
from .kernels._launch import interpret as interpret

__version__ = "0.1.0"
