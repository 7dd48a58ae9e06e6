"""Portable attention kernels (sm_80 and later), their launchers and default configs."""

from .backward import attention_bwd as attention_bwd
from .forward import attention_fwd as attention_fwd
