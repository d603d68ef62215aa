"""The end of a modelling file for transformers: text, for transformers is imported in it.

What stands before it is made of mimkit's own sources: the stem `{stem}`, ImageEncoder, `resized`,
`check_images`.
"""

IMPORTS = """
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput"""

MODEL = '''

class MimkitConfig(PretrainedConfig):
    """Settings of the stem, and arguments of the encoder."""

    model_type = "mimkit_encoder"

    def __init__(self, stem=None, encoder=None, **kwargs):
        self.stem = stem
        self.encoder = encoder
        super().__init__(**kwargs)


class MimkitModel(PreTrainedModel):
    """pixel_values of any size that is a multiple of the patch -> tokens, the class token first.

    At another size than its own, positions are interpolated.
    """

    config_class = MimkitConfig
    main_input_name = "pixel_values"
    base_model_prefix = "mimkit"

    def __init__(self, config):
        super().__init__(config)
        settings = dict(config.encoder)
        settings["grid"] = tuple(settings["grid"])
        self.stem = {stem}(**config.stem)
        self.encoder = Encoder(**settings)
        self.post_init()

    def forward(self, pixel_values, output_hidden_states=False, return_dict=True):
        dtype = self.encoder.cls_token.dtype
        check_images(pixel_values, patch=self.stem.patch_size, dtype=dtype)
        grid = self.stem.grid(*pixel_values.shape[2:])
        model = resized(ImageEncoder(self.stem, self.encoder), grid)
        tokens = model(pixel_values)
        blocks = range(1, self.encoder.depth + 1)
        hidden = model.intermediates(pixel_values, blocks) if output_hidden_states else None
        output = BaseModelOutputWithPooling(
            last_hidden_state=tokens,
            pooler_output=tokens[:, 0],
            hidden_states=None if hidden is None else tuple(hidden),
        )
        return output if return_dict else output.to_tuple()

    def _init_weights(self, module):
        """Weights are the file's; indices of relative positions are computed, no file has them."""
        if isinstance(module, RelativePositionBias):
            module.index.copy_(RelativePositionBias(grid=self.encoder.grid, heads=1).index)
'''

CLASSIFIER = '''

class MimkitForImageClassification(MimkitModel):
    """The same with logits of classes, which config.id2label names."""

    def __init__(self, config):
        super().__init__(config)
        width = config.encoder["width"]
        norm = nn.LayerNorm(width, eps=EPS) if config.pool_norm else nn.Identity()
        self.pool_norm, self.head = norm, nn.Linear(width, config.num_labels)
        self.post_init()

    def forward(self, pixel_values, labels=None, output_hidden_states=False, return_dict=True):
        found = super().forward(pixel_values, output_hidden_states=output_hidden_states)
        tokens = found.last_hidden_state
        pooled = tokens[:, 1:].mean(1) if self.config.pooling == "mean" else tokens[:, 0]
        logits = self.head(self.pool_norm(pooled))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        output = ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=found.hidden_states
        )
        return output if return_dict else output.to_tuple()
'''
