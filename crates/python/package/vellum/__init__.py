"""Vellum: explicit virtual memory for data-intensive programs on Linux.

vellum.store has stores: ordered maps in files larger than memory, with values of any length.
vellum.morsel has Morsels: memory that processes share, and model files as arrays without a copy.
"""

from vellum import morsel, store
from vellum._native import __version__

__all__ = ["__version__", "morsel", "store"]
