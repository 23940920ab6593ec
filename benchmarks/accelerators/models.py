"""Defines the parameter shapes of well-known models."""

from typing import Any

Shapes = Any


def build_gpt2(layers: int, width: int, tokens: int, positions: int) -> Shapes:
    """Returns the shapes of a GPT-2 model, with 148 leaves for 12 layers."""
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


def build_transformer(layers: int, width: int, tokens: int) -> Shapes:
    """Returns the shapes of a transformer without biases, with 25 leaves for 4 layers."""
    layer = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "norm_1": (width,),
        "norm_2": (width,),
    }
    return {"tokens": (tokens, width), "layers": [layer] * layers}


def build_llama(layers: int, stacked: bool = False) -> Shapes:
    """Returns the shapes of Llama 3 8B, with 291 leaves for 32 layers, or 12 if stacked."""
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


def build_resnet(blocks: tuple[int, ...]) -> Shapes:
    """Returns the shapes of a residual network, with 161 leaves for (3, 4, 6, 3), ResNet-50."""

    def build_convolution(size: int, before: int, after: int) -> Shapes:
        return {"kernel": (size, size, before, after), "scale": (after,), "bias": (after,)}

    stages, before = [], 64
    for stage, number in enumerate(blocks):
        narrow = 64 << stage
        for block in range(number):
            layers = {
                "reduce": build_convolution(1, before, narrow),
                "middle": build_convolution(3, narrow, narrow),
                "expand": build_convolution(1, narrow, 4 * narrow),
            }
            if not block:
                layers["project"] = build_convolution(1, before, 4 * narrow)
            stages.append(layers)
            before = 4 * narrow
    head = {"kernel": (before, 1000), "bias": (1000,)}
    return {"stem": build_convolution(7, 3, 64), "stages": stages, "head": head}


MODELS = {
    "transformer4": lambda: build_transformer(4, 2048, 32000),
    "gpt2": lambda: build_gpt2(12, 768, 50257, 1024),
    "vmem": lambda: build_transformer(12, 512, 4096),
    # Smaller variants for the tests, and the key matrices of Llama.
    "transformer2": lambda: build_transformer(2, 2048, 32000),
    "vmem6": lambda: build_transformer(6, 704, 4096),
    "vmem2": lambda: build_transformer(2, 1216, 4096),
    "resnet14": lambda: build_resnet((1, 1, 1, 1)),
    "layers8": lambda: {"up": (8, 4096, 14336), "down": (8, 14336, 4096)},
    "keys": lambda: [(4096, 1024)] * 4,
    "small": lambda: [(1000,)] * 100,
    "resnet50": lambda: build_resnet((3, 4, 6, 3)),
    "llama8b": lambda: build_llama(32),
    "llama8b_stacked": lambda: build_llama(32, stacked=True),
}
