"""Vellum: explicit virtual memory for data-intensive programs on Linux.

vellum.morsel has Morsels: memory that processes share, and model files as arrays without a copy.
"""

from vellum import morsel
from vellum._native import __version__

__all__ = ["__version__", "morsel"]
