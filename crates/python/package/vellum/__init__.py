"""Vellum: explicit virtual memory for data-intensive programs on Linux.

vellum.morsel has Morsels: memory that processes share, and model files as arrays without a copy.
"""

from vellum import morsel

__all__ = ["morsel"]
