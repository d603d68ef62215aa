"""ONNX for ONNX Runtime and what else reads it: input "image", output "tokens" or "logits"."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.export import EXPORTERS, Exporter
from mimkit.export._graph import output_name, traced
from mimkit.export._headed import classes_said
from mimkit.export._optional import optional
from mimkit.models.encoder import ImageEncoder

_MOST_BYTES = 2**31 - 2**24  # protobuf's limit is 2 GiB, and there is a graph besides the weights


class Session(nn.Module):
    """ONNX Runtime on the CPU with torch's number of threads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        runtime = optional("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = runtime.InferenceSession(
            path.read_bytes(), options, providers=["CPUExecutionProvider"]
        )

    def forward(self, image_BCHW: Tensor) -> Tensor:
        (output,) = self._session.run(None, {"image": image_BCHW.numpy()})
        return torch.from_numpy(output)


@EXPORTERS.register
class Onnx(Exporter):
    """Any batch; positions are baked at the encoder's size, and batch norms are folded.

    ONNX Runtime sums in another order and approximates GELU's error function, so the tolerance is
    1e-4.
    """

    library = "onnx"
    tolerance = 1e-4
    casts = False
    packages = ("onnx", "onnxscript", "onnxruntime")

    def architecture(self, encoder: ImageEncoder) -> str:
        size = 4 * sum(parameter.numel() for parameter in encoder.parameters())
        if size > _MOST_BYTES:
            raise UserError(
                f"the encoder has {size / 2**30:.1f} GiB of weights, and one ONNX file holds less "
                "than 2; take --format pt2, hf or safetensors"
            )
        return "ONNX graph"

    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        program = torch.onnx.export(
            traced(encoder), dynamo=True, verbose=False, input_names=["image"],
            output_names=[output_name(encoder)],
        )  # fmt: skip
        assert program is not None
        program.model.metadata_props.update({**metadata, **classes_said(encoder)})
        program.save(path)

    def load(self, path: Path) -> nn.Module:
        return Session(path)

    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        tokens_BND: Tensor = loaded(image_BCHW)
        return tokens_BND

    def usage(self, encoder: ImageEncoder, path: Path) -> str:
        name = output_name(encoder)
        shape = "(B, V)" if name == "logits" else "(B, 1 + N, D)"
        return (
            "import onnxruntime\n"
            f'session = onnxruntime.InferenceSession("{path.name}")\n'
            f'{name} = session.run(["{name}"], {{"image": images.numpy()}})[0]  # {shape}'
        )
