"""Quality of generated digits: a small classifier of handwritten digits, and the Frechet distance on its features.

The classifier and the moments of its features over held-out real digits are packaged (made by
`examples/training/digits_ar.py`). The distance is the FID of Heusel et al., "GANs Trained by a Two Time-Scale Update
Rule ...", arXiv 1706.08500, with this classifier's features instead of Inception's. Its values cannot be compared with
FIDs.
"""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from paradec.models.checkpoint import CheckpointError
from paradec.models.weights import read_weights

FEATURES = 64
SIZE = 28


class DigitClassifier(nn.Module):
    """Classifier of grey images [B, 1, 28, 28] in [0, 1]; returns logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 7 * 7, FEATURES)
        self.output = nn.Linear(FEATURES, 10)
        for name in ("held_out", "train"):
            self.register_buffer(f"{name}_mean", torch.zeros(FEATURES))
            self.register_buffer(f"{name}_covariance", torch.zeros(FEATURES, FEATURES))

    def features(self, images: Tensor) -> Tensor:
        """Compute the last layer's inputs [B, 64] of images [B, 1, 28, 28] in [0, 1].

        Raises:
            ValueError: images of another shape.
        """
        if images.shape[1:] != (1, SIZE, SIZE):
            raise ValueError(f"images have shape {tuple(images.shape)}; expected [batch, 1, {SIZE}, {SIZE}]")
        x = max_pool2d(relu(self.conv1(images)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        return relu(self.hidden(x.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.features(images))


def load_classifier(path: str | os.PathLike[str] | None = None) -> DigitClassifier:
    """Load the packaged classifier, or one from a file.

    Raises:
        CheckpointError: the file cannot be read, or its weights do not fit.
    """
    if path is None:
        path = Path(str(importlib.resources.files("paradec") / "assets" / "digits" / "classifier.safetensors"))
    model = DigitClassifier()
    weights = {name: tensor.float() for name, tensor in read_weights(path)[0].items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights of {os.fspath(path)!r} do not fit: {' '.join(str(error).split())}"
        ) from None
    return model.eval().requires_grad_(False)


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean [d] and covariance [d, d] of features [n, d], float64.

    Raises:
        ValueError: fewer than two rows of features.
    """
    if len(features) < 2:
        raise ValueError(f"a covariance needs at least 2 images, not {len(features)}")
    features = features.double()
    return features.mean(0), features.T.cov()


def frechet_distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Compute the squared Frechet distance of two normal distributions, each (mean [d], covariance [d, d]).

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1^(1/2) C2 C1^(1/2))^(1/2)); eigenvalues below 0, by rounding, count as 0.
    """
    (mean_a, cov_a), (mean_b, cov_b) = ((m.double(), c.double()) for m, c in (a, b))
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)
