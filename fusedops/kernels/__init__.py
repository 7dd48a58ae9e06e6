"""The core that kernels stand on, and one module of kernels per op."""

from ._autotune import Config as Config
from ._call import TensorDescriptor as TensorDescriptor
from ._call import triton_call as triton_call
from ._call import triton_compile as triton_compile
