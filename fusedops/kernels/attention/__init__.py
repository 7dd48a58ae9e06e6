"""Portable attention kernels (sm_80 and later), their launchers and configs."""

from .backward import attention_bwd as attention_bwd
from .configs import describe as describe
from .forward import attention_fwd as attention_fwd
