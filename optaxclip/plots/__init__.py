"""Pictures of training runs and of what clipping did in them.

Every function draws on the axes `ax` and returns them. Without `ax` it makes new axes with a
legend; on axes that you pass you place the legend. Matplotlib is needed: `optaxclip[plot]`.
"""

from optaxclip.plots.entries import element_histogram as element_histogram
from optaxclip.plots.groups import heatmap as heatmap
from optaxclip.plots.runs import loss_curves as loss_curves
from optaxclip.plots.runs import norm_curves as norm_curves
from optaxclip.plots.style import COLORS as COLORS
from optaxclip.plots.style import STYLES as STYLES
from optaxclip.plots.thresholds import norm_histogram as norm_histogram
from optaxclip.plots.thresholds import norms_over_steps as norms_over_steps
from optaxclip.plots.thresholds import sweep_curve as sweep_curve
