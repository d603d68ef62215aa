"""What every tokenizer must do; a new file in tokenizers/ is tested the day it is added."""

import inspect

import pytest
import torch

from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer


@pytest.fixture(params=TOKENIZERS.names())
def tokenizer(request: pytest.FixtureRequest) -> VisualTokenizer:
    """A part that takes a path finds a small file in the fixture called after it: `dvae_file`."""
    part = TOKENIZERS[request.param]
    if "path" not in inspect.signature(part).parameters:
        return part()
    return part(path=str(request.getfixturevalue(f"{request.param}_file")))


def _views(seed: int = 0) -> torch.Tensor:
    return torch.rand(3, 3, 32, 48, generator=torch.Generator().manual_seed(seed))


def test_one_target_a_patch_on_a_grid_that_is_not_square(tokenizer: VisualTokenizer) -> None:
    rows, columns = tokenizer.grid(32, 48)
    target_BN = tokenizer.encode(_views())
    assert target_BN.shape[:2] == (3, rows * columns)
    if tokenizer.vocabulary is None:
        assert target_BN.dtype == torch.float32
        assert target_BN.shape[2:] == (tokenizer.prediction_dim,)
    else:
        assert target_BN.dtype == torch.int64
        assert int(target_BN.min()) >= 0 and int(target_BN.max()) < tokenizer.vocabulary
        assert tokenizer.vocabulary == tokenizer.prediction_dim


def test_targets_do_not_depend_on_mode_neighbours_or_earlier_calls(
    tokenizer: VisualTokenizer,
) -> None:
    first = tokenizer.encode(_views())
    tokenizer.train()
    assert torch.equal(tokenizer.encode(_views()), first)
    alone = tokenizer.encode(_views()[1:2])
    # a batch of another size may be added up in another order: not where there are words
    tolerance = 0 if tokenizer.vocabulary is not None else 1e-5
    torch.testing.assert_close(alone, first[1:2], rtol=0, atol=tolerance)


def test_nothing_is_trained(tokenizer: VisualTokenizer) -> None:
    assert not any(p.requires_grad for p in tokenizer.parameters())
    assert not tokenizer.encode(_views().requires_grad_()).requires_grad


def test_the_right_answer_has_the_smaller_loss(tokenizer: VisualTokenizer) -> None:
    target_M = tokenizer.encode(_views()).flatten(0, 1)
    wrong_M = tokenizer.encode(_views(1)).flatten(0, 1)
    if tokenizer.vocabulary is not None:
        logits = torch.zeros(len(target_M), tokenizer.prediction_dim, requires_grad=True)
        assert tokenizer.loss(logits, target_M).item() == pytest.approx(
            torch.tensor(float(tokenizer.vocabulary)).log().item(), rel=1e-6
        )
        right = torch.nn.functional.one_hot(target_M, tokenizer.prediction_dim).float() * 20
        wrong_M = (target_M + 1) % tokenizer.prediction_dim
    else:
        right = target_M
    assert tokenizer.loss(right, target_M) < tokenizer.loss(right, wrong_M)
    prediction = right.clone().requires_grad_()
    tokenizer.loss(prediction, wrong_M).backward()
    assert prediction.grad is not None and float(prediction.grad.abs().sum()) > 0


def test_what_can_be_decoded_comes_back_as_an_image(tokenizer: VisualTokenizer) -> None:
    if not tokenizer.can_decode:
        pytest.skip("this tokenizer draws nothing")
    image = tokenizer.decode(tokenizer.encode(_views()), tokenizer.grid(32, 48))
    assert image.shape == (3, 3, 32, 48)
    assert float(image.min()) >= 0 and float(image.max()) <= 1


def test_a_size_that_does_not_fit_is_refused(tokenizer: VisualTokenizer) -> None:
    with pytest.raises(UserError, match="token_size"):
        tokenizer.grid(33, 48)


def test_the_fingerprint_is_stable(tokenizer: VisualTokenizer) -> None:
    assert tokenizer.fingerprint and len(tokenizer.fingerprint) >= 16
