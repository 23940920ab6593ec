"""What a clip adds to an AdamW step on a GPU and a TPU, seen from a machine that has neither.

XLA's compilers for both run on Linux x86-64 for devices that are only described. Counts are the
same at every run; seconds are not.

  pip install "jax[tpu]" && pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt
  python -m benchmarks.accelerators --device h100 --model transformer4 --method global_norm
"""

import argparse
import pathlib
import statistics

from benchmarks.accelerators.devices import is_gpu
from benchmarks.accelerators.methods import METHODS, NONE, OURS, THEIRS, adamw
from benchmarks.accelerators.models import MODELS
from benchmarks.accelerators.steps import MESHES, Compiled, Place, compiled

HEADER = [
    "device",
    "model",
    "dtype",
    "mesh",
    "method",
    "way",
    "moved",
    "read",
    "written",
    "kernels",
    "branches",
    "loops",
]
HEADER += ["collectives", "temporary, % of gradients", "trace, s", "compile, s"]


def main() -> None:
    """Prints the table."""
    options = _options()
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for device in options.device:
        for model in options.model:
            for dtype in options.dtype:
                for mesh in options.mesh:
                    _cells(options, device, model, dtype, mesh)


def _cells(options: argparse.Namespace, device: str, model: str, dtype: str, mesh: str) -> None:
    place = Place(device, None if mesh == "one" else mesh.removesuffix("+specs"))
    shapes = MODELS[model]()
    told = {}
    if mesh.endswith("+specs"):
        told["specs"] = place.shardings(shapes)
    builds = {NONE: adamw}
    for method in options.method:
        ours, theirs = METHODS[method]
        builds[method, OURS] = lambda ours=ours: ours(**told)
        if options.optax:
            builds[method, THEIRS] = theirs
    runs: dict[object, list[Compiled]] = {}
    for turn in range(options.rounds):
        for name, build in builds.items():
            if not turn or name != NONE:
                run = compiled(build(), shapes, dtype, _place_for(name, place))
                runs.setdefault(name, []).append(run)
    plain = runs.pop(NONE)[0]
    if options.text:
        options.text.write_text(next(iter(runs.values()))[0].text)
    for (method, way), results in runs.items():
        head = [device, model, dtype, mesh, method, way]
        print("| " + " | ".join([*head, *_figures(device, plain, results)]) + " |", flush=True)


def _place_for(name: object, place: Place) -> Place:
    """Inside of `shard_map` Optax's clips measure each shard, so they are seen on a mesh."""
    alone = place.mesh == "shard_map" and isinstance(name, tuple) and name[1] == THEIRS
    return Place(place.device, "auto") if alone else place


def _figures(device: str, plain: Compiled, results: list[Compiled]) -> list[str]:
    run, size = results[0], plain.gradients
    added = run.counts - plain.counts
    collectives = {name: number for name, number in added.collectives.items() if number}
    return [
        f"{(added.read + added.written) / size:.2f}",
        f"{added.read / size:.2f}",
        f"{added.written / size:.2f}",
        f"{added.kernels:+}" if is_gpu(device) else "",
        str(run.counts.branches),
        str(run.counts.loops),
        ", ".join(f"{number} {name}" for name, number in collectives.items()) or "0",
        f"{100 * (run.temporary - plain.temporary) / size:.2f}",
        f"{statistics.median(x.trace for x in results):.2f}",
        f"{statistics.median(x.compile for x in results):.2f}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    meshes = ["one", *(name + told for name in MESHES for told in ("", "+specs"))]
    parser.add_argument("--device", nargs="+", default=["h100", "v5e"], help="h100, a100, v5e ...")
    parser.add_argument("--model", nargs="+", default=["transformer4"], choices=MODELS)
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mesh", nargs="+", default=["one"], choices=meshes)
    parser.add_argument("--rounds", type=int, default=1, help="of which times are the median")
    parser.add_argument("--no-optax", dest="optax", action="store_false", help="ours only")
    parser.add_argument(
        "--text", type=pathlib.Path, help="a file for the first program's compiled text"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
