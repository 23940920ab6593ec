"""What tells many curves in one picture apart."""

import numpy as np
import pytest

from optaxclip import plots

colors = pytest.importorskip("matplotlib.colors")
figure = pytest.importorskip("matplotlib.figure")


def test_eight_colours_can_be_told_apart():
    srgb = np.array([colors.to_rgb(color) for color in plots.COLORS])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(linear @ np.transpose(to_xyz) / [0.9505, 1.0, 1.089]).T
    lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)  # CIELAB, its bright part
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)
    assert len(lab) == 8
    assert apart[np.triu_indices(8, 1)].min() > 20  # 2 can just be seen


def test_two_runs_never_look_alike():
    names = [str(i) for i in range(len(plots.COLORS) * len(plots.STYLES))]
    ax = plots.loss_curves({name: [2.0, 1.0] for name in names}, ax=figure.Figure().subplots())
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == len(names)
