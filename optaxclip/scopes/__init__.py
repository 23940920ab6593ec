"""Scopes: the groups of elements that share a norm.

A `Scope` is a function from a flattened tree to a `Grouping`: the names and leaves of the groups,
and the axes of the leaves over which norms are computed.

  scope          | groups
  ---------------|---------------------------------------------------------------
  `tree()`       | all leaves together
  `group(labels)`| leaves with the same label
  `leaf()`       | single leaves, or with `stacked` single layers of stacked leaves
  `axes(axes)`   | slices of leaves along these axes
  `unit()`       | output units of a layer (Brock et al., 2021, arXiv 2102.06171)
  `ensemble_member()` | members of an ensemble that is stacked in a tree
  `muon()`       | the leaves that `optax.contrib.muon` trains with Muon, and all other leaves
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
