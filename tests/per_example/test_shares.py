"""What of the limit each group has where groups have limits of their own."""

import jax.numpy as jnp
import numpy as np

from optaxclip import per_example, scopes


def test_shares_by_size_are_those_of_all_entries_of_a_group():
    scope = scopes.group(lambda path, leaf: "odd" if path == "1" else "even")
    grads = [jnp.full((1, n), 9.0) for n in (1, 2, 4)]
    for leaves in (grads[:1], grads):
        found = per_example.clip_sum(leaves, 1.0, scope=scope, split="size").grads
        entries = sum(leaf.size for leaf in leaves)
        for leaf in found:
            np.testing.assert_allclose(leaf, np.full(leaf.shape, entries**-0.5), rtol=2e-6)
