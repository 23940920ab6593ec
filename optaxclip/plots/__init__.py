"""Plots of training runs and of the effects of clipping.

The functions draw on the axes `ax` and return them. If `ax` is None, they create new axes with a
legend. They require Matplotlib, which `optaxclip[plot]` installs.
"""

from optaxclip.plots.leaves import element_histogram as element_histogram
from optaxclip.plots.leaves import heatmap as heatmap
from optaxclip.plots.runs import loss_curves as loss_curves
from optaxclip.plots.runs import norm_curves as norm_curves
from optaxclip.plots.runs import norm_histogram as norm_histogram
from optaxclip.plots.runs import norms_over_steps as norms_over_steps
from optaxclip.plots.runs import sweep_curve as sweep_curve
from optaxclip.plots.style import COLORS as COLORS
from optaxclip.plots.style import STYLES as STYLES
