"""dbench: a server, a load generator and a capacity search for masked-diffusion language models."""

__version__ = "0.1.0"
