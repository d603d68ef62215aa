"""`torch.hub.load(FOLDER_OR_REPOSITORY, "encoder", PATH)`: a trained encoder as a plain module."""

from mimkit.encoder_io import load_encoder as encoder

dependencies = ["torch", "timm", "einops", "safetensors", "pydantic", "yaml"]

__all__ = ["dependencies", "encoder"]
