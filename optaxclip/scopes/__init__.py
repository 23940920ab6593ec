"""Scopes: which entries share one norm.

A `Scope` is a function from a flattened tree to a `Grouping`: the names of the groups, the leaves
of each group, and the axes of each leaf over which norms are taken.

  scope          | one norm for
  ---------------|---------------------------------------------------------------
  `tree()`       | all leaves together
  `group(labels)`| all leaves with the same label
  `leaf()`       | each leaf; with `stacked`, each layer of a leaf that stacks layers
  `axes(axes)`   | each slice of a leaf along these axes
  `unit()`       | each output unit of a weight (Brock et al., 2021, arXiv 2102.06171)
  `member()`     | each member of an ensemble that is stacked in one tree
  `muon()`       | all leaves that `optax.contrib.muon` trains by Muon; a second for all others
"""

from optaxclip._base.trees import FlatTree as FlatTree
from optaxclip._base.trees import Group as Group
from optaxclip._base.trees import Grouping as Grouping
from optaxclip.scopes.leaves import Scope as Scope
from optaxclip.scopes.leaves import group as group
from optaxclip.scopes.leaves import leaf as leaf
from optaxclip.scopes.leaves import tree as tree
from optaxclip.scopes.slices import axes as axes
from optaxclip.scopes.slices import ensemble_member as ensemble_member
from optaxclip.scopes.slices import muon as muon
from optaxclip.scopes.slices import muon_labels as muon_labels
from optaxclip.scopes.slices import unit as unit
