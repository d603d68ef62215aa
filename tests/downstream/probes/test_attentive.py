"""The attentive head against torch's multi-head attention with one query."""

import torch
from torch import nn

from mimkit.downstream.probes.attentive import AttentiveHead


def test_same_function_as_cross_attention_of_one_query() -> None:
    draw, width, heads = torch.Generator().manual_seed(0), 12, 3
    token_BND = torch.randn(5, 7, width, generator=draw)
    query_11D = torch.randn(1, 1, width, generator=draw)
    judge = nn.MultiheadAttention(width, heads, batch_first=True, bias=False)
    with torch.no_grad():
        judge.in_proj_weight.copy_(torch.randn(3 * width, width, generator=draw))
        judge.out_proj.weight.copy_(torch.eye(width))
        w_query, w_key, w_value = judge.in_proj_weight.chunk(3)
        expected_BD = judge(query_11D.expand(5, 1, width), token_BND, token_BND)[0][:, 0]
        head = AttentiveHead(width, heads=heads, num_classes=width, generator=draw)
        query_KD = (query_11D[0, 0] @ w_query.T).view(heads, width // heads)
        folded_KD = torch.einsum("kd,kdc->kc", query_KD, w_key.view(heads, -1, width))
        # torch divides by sqrt(width / heads), the head by sqrt(width)
        head.query_KD.copy_(folded_KD * heads**0.5)
        head.value_KDd.copy_(w_value.view(heads, -1, width).transpose(1, 2))
        head.weight_DV.copy_(torch.eye(width))
        torch.testing.assert_close(head(token_BND)[0], expected_BD, rtol=1e-4, atol=1e-5)
