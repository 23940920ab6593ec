"""The shapes of models that people train."""

from typing import Any

Shapes = Any


def transformer(layers: int, width: int, tokens: int, positions: int) -> Shapes:
    """As GPT-2: of 12 layers 148 leaves."""
    normal = {"scale": (width,), "bias": (width,)}
    layer = {"norm_1": normal, "norm_2": normal}
    for name, (n, m) in {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}.items():
        layer[name] = {"kernel": (n * width, m * width), "bias": (m * width,)}
    return {
        "tokens": (tokens, width),
        "positions": (positions, width),
        "layers": [layer] * layers,
        "norm": normal,
    }


def plain(layers: int, width: int, tokens: int) -> Shapes:
    """A transformer without biases: of 4 layers 25 leaves."""
    layer = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "norm_1": (width,),
        "norm_2": (width,),
    }
    return {"tokens": (tokens, width), "layers": [layer] * layers}


def llama(layers: int, stacked: bool = False) -> Shapes:
    """As Llama 3 8B: of 32 layers 291 leaves, or 12 if they are stacked."""
    width, keys, hidden, tokens = 4096, 1024, 14336, 128256
    layer = {
        "query": (width, width),
        "key": (width, keys),
        "value": (width, keys),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
        "norm_before": (width,),
        "norm_after": (width,),
    }
    rest = {"embedding": (tokens, width), "norm": (width,), "head": (width, tokens)}
    if stacked:
        return rest | {"layers": {name: (layers, *shape) for name, shape in layer.items()}}
    return rest | {"layers": [layer] * layers}


def resnet(blocks: tuple[int, ...]) -> Shapes:
    """As ResNet-50 with (3, 4, 6, 3): 161 leaves."""

    def convolution(size: int, before: int, after: int) -> Shapes:
        return {"kernel": (size, size, before, after), "scale": (after,), "bias": (after,)}

    stages, before = [], 64
    for stage, number in enumerate(blocks):
        narrow = 64 << stage
        for block in range(number):
            layers = {
                "reduce": convolution(1, before, narrow),
                "middle": convolution(3, narrow, narrow),
                "expand": convolution(1, narrow, 4 * narrow),
            }
            if not block:
                layers["project"] = convolution(1, before, 4 * narrow)
            stages.append(layers)
            before = 4 * narrow
    head = {"kernel": (before, 1000), "bias": (1000,)}
    return {"stem": convolution(7, 3, 64), "stages": stages, "head": head}


MODELS = {
    "transformer4": lambda: plain(4, 2048, 32000),
    "gpt2": lambda: transformer(12, 768, 50257, 1024),
    "vmem": lambda: plain(12, 512, 4096),
    # For the tests: as those above and below, of fewer leaves; Llama's keys.
    "transformer2": lambda: plain(2, 2048, 32000),
    "vmem6": lambda: plain(6, 704, 4096),
    "vmem2": lambda: plain(2, 1216, 4096),
    "resnet14": lambda: resnet((1, 1, 1, 1)),
    "layers8": lambda: {"up": (8, 4096, 14336), "down": (8, 14336, 4096)},
    "keys": lambda: [(4096, 1024)] * 4,
    "small": lambda: [(1000,)] * 100,
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "llama8b": lambda: llama(32),
    "llama8b_stacked": lambda: llama(32, stacked=True),
}
