"""Real images without a network: scikit-learn's 1797 handwritten digits of 8 x 8 pixels, enlarged where asked."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

PIXELS, DIGITS = 8, 10
Batch = dict[str, np.ndarray]


def batches(batch: int, size: int = PIXELS, channels: int = 1, seed: int = 0) -> Iterator[Batch]:
    """Random draws without end: `images` f32 [batch, size, size, channels] in -1 to 1, `labels` int32 [batch].

    Every pixel is repeated size/8 times in both directions, and for every channel. Raises ValueError where `size` is
    no multiple of 8.
    """
    if size % PIXELS:
        raise ValueError(f"size {size} is no multiple of the {PIXELS} pixels of a digit. Nearest: {image_size(size)}.")
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = np.asarray(pixels / 8 - 1, np.float32).reshape(-1, PIXELS, PIXELS, 1)
    labels = np.asarray(digits, np.int32)
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(0, len(labels), batch)
        grown = images[chosen].repeat(size // PIXELS, 1).repeat(size // PIXELS, 2).repeat(channels, 3)
        yield {"images": grown, "labels": labels[chosen]}


def image_size(size: int) -> int:
    """The multiple of 8 nearest to `size`, at least 8."""
    return max(PIXELS, round(size / PIXELS) * PIXELS)


def image_batch(batch: int, size: int, channels: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what `batches` yields."""
    return {
        "images": jax.ShapeDtypeStruct((batch, size, size, channels), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
