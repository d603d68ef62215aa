"""mimkit: masked image modelling with pluggable patch stems. Importing it does no work."""

__version__ = "0.1.0"
