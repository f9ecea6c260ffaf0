"""Corolla serves one large language model as a chain of block ranges on Triton Inference Server."""

__version__ = "0.1.0"
