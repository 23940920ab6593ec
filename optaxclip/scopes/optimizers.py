"""Scopes that group leaves by the optimizer that trains them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optaxclip._base.arguments import asks
from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import FlatTree, is_function, is_sparse
from optaxclip._base.types import PyTree
from optaxclip.scopes.leaves import Scope, group, of_trees


@asks()
def muon(weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None) -> Scope:
    """Two norms: one for the leaves that `optax.contrib.muon` trains by Muon, one for all others.

    Muon's updates do not depend on the scale of its gradients, so these gradients should not count
    in the norm by which Adam's gradients are clipped. Muon needs a limit only against spikes, which
    its momentum remembers for about a hundred steps; `docs/muon.md` has more.

    Args:
      weight_dimension_numbers: the argument `muon_weight_dimension_numbers` of Muon: a pytree
        prefix of the parameters, with `MuonDimensionNumbers` for leaves that Muon trains and None
        for those that Adam trains; or a function from the parameters to such a prefix. If None,
        Muon trains all matrices.

    Raises:
      ValueError: (when used) if the dimension numbers do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.muon(), {"adam": 1.0, "muon": 500.0})
      >>> grads = {"w": jnp.full((2, 2), 50.0), "b": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"][0], updates["b"].round(3))
      [50. 50.] [0.6 0.8]
      >>> print(list(state.info.names), state.info.norm, state.info.factor)
      ['adam', 'muon'] [  5. 100.] [0.2 1. ]
    """
    labels = muon_labels(weight_dimension_numbers)

    @of_trees
    def assign(flat: FlatTree) -> Grouping:
        tree = jax.tree_util.tree_unflatten(flat.treedef, flat.leaves)
        return group(labels(tree) if flat.measured else {})(flat)

    return assign


@asks()
def muon_labels(
    weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None,
) -> Callable[[PyTree], PyTree]:
    """A function that labels each leaf "muon" or "adam", by how `optax.contrib.muon` trains it.

    The function may be passed to `optax.partition`. The scope `muon` has these labels.

    Args:
      weight_dimension_numbers: as in `muon`.

    Returns:
      A function from parameters, or a pytree with their structure and shapes, to a pytree of the
      same structure with "muon" or "adam" for each leaf.

    Raises:
      ValueError: (when used) if the dimension numbers do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "layers": jnp.ones((3, 2, 2))}
      >>> optaxclip.scopes.muon_labels()(params)
      {'b': 'adam', 'layers': 'adam', 'w': 'muon'}
    """

    def label(params: PyTree) -> PyTree:
        chosen = weight_dimension_numbers
        if chosen is None:
            return _labels(params, lambda leaf: np.ndim(leaf) == 2)
        chosen = chosen(params) if is_function(chosen, params) else chosen
        try:
            return jax.tree.map(
                lambda numbers, part: _labels(part, lambda _: _is_muon(numbers)),
                chosen,
                params,
                is_leaf=lambda x: x is None or hasattr(x, "reduction_axis"),
            )
        except ValueError as error:
            raise ValueError(
                "weight_dimension_numbers is not a pytree prefix of the parameters, with "
                f"MuonDimensionNumbers or None for leaves: {error}"
            ) from None

    return label


def _is_muon(numbers: Any) -> bool:
    if numbers is None or hasattr(numbers, "reduction_axis"):
        return numbers is not None
    raise ValueError(f"got {numbers!r}")


def _labels(tree: PyTree, is_muon: Callable[[Any], bool]) -> PyTree:
    return jax.tree.map(lambda x: "muon" if is_muon(x) else "adam", tree, is_leaf=is_sparse)
