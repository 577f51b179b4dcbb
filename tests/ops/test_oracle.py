"""The oracle itself: worked by hand, and independent of the package."""

import ast
from pathlib import Path

import numpy as np

from tests.oracle import causal_conv1d, gated_delta_net, mamba2


def test_the_oracle_imports_nothing_of_the_package() -> None:
    for path in Path(mamba2.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                known = {"numpy", "torch", "collections", "dataclasses"}
                assert known.issuperset(name.split(".")[0] for name in names), f"{path}:{node.lineno}"


def test_a_constant_input_is_the_geometric_series() -> None:
    """softplus(0) = ln 2 and A = -1 halve the state per token: S_t = (2 - 2^(1-t)) ln 2, y_t = S_t C + D."""
    one = np.ones(1)
    sequence = mamba2.Mamba2Sequence(A=-one, D=3 * one, dt_bias=0 * one, head_dim=1, d_state=1)
    for t in range(1, 20):
        y = sequence.step(np.ones((1, 1)), 0 * one, np.ones((1, 1)), 5 * np.ones((1, 1)))
        np.testing.assert_allclose(y, [[5 * (2 - 2.0 ** (1 - t)) * np.log(2) + 3]], rtol=1e-14)


def test_heads_take_the_group_of_their_block() -> None:
    sequence = mamba2.Mamba2Sequence(-np.ones(4), np.zeros(4), np.zeros(4), head_dim=1, d_state=1)
    y = sequence.step(np.ones((4, 1)), np.zeros(4), np.array([[1.0], [10.0]]), np.ones((2, 1)))
    np.testing.assert_allclose(y[:, 0] / np.log(2), [1, 1, 10, 10], rtol=1e-14)


def test_softplus_neither_overflows_nor_loses_small_values() -> None:
    np.testing.assert_allclose(mamba2.softplus(np.array([-800.0, 0.0, 800.0])), [0.0, np.log(2), 800.0])
    np.testing.assert_allclose(mamba2.softplus(np.array([-30.0])), np.exp([-30.0]), rtol=1e-12)


def delta_net(n_heads: int, key_dim: int, *, A_log: float = -np.inf) -> gated_delta_net.GatedDeltaNetSequence:
    """A sequence without values yet; without decay unless A_log says so."""
    return gated_delta_net.GatedDeltaNetSequence(np.full(n_heads, A_log), np.zeros(n_heads), key_dim, value_dim=1)


def test_the_delta_rule_moves_the_answer_to_a_key_by_beta_towards_the_value() -> None:
    """With one key, beta = 1/2 and v = 8: S^T k runs 4, 6, 7, ...; a query orthogonal to it reads nothing."""
    sequence, key, value, zero = delta_net(1, 2), 1e6 * np.eye(2)[:1], np.full((1, 1), 8.0), np.zeros(1)
    for answer in (4.0, 6.0, 7.0, 7.5):
        o = sequence.step(key, key, value, zero, zero)
        np.testing.assert_allclose(o, [[answer / np.sqrt(2)]], rtol=1e-12)
    o = sequence.step(1e6 * np.eye(2)[1:], key, value, zero, zero)
    np.testing.assert_allclose(o, [[0.0]], atol=1e-12)


def test_the_state_decays_before_it_predicts() -> None:
    """A = 1 and softplus(0) = ln 2 halve it: 8 becomes 4, of which beta = 1/2 leaves 2, and half of v = 2 is added."""
    sequence, key, zero = delta_net(1, 1, A_log=0.0), np.full((1, 1), 1e6), np.zeros(1)
    sequence.state[:] = 8.0
    np.testing.assert_allclose(sequence.step(key, key, np.full((1, 1), 2.0), zero, zero), [[3.0]], rtol=1e-12)


def test_value_heads_take_the_key_head_of_their_block_and_short_keys_stay_short() -> None:
    keys, zero = np.array([[1e6], [1e-3]]), np.zeros(4)
    o = delta_net(4, 1).step(np.full((2, 1), 1e6), keys, np.full((4, 1), 2.0), zero, zero)
    np.testing.assert_allclose(o[:, 0], [1, 1, np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-6)


def test_the_last_tap_of_the_convolution_is_the_newest_token() -> None:
    weight, bias = np.array([[100.0, 10.0, 1.0]]), np.array([0.5])
    y = causal_conv1d.causal_conv1d(np.array([[1.0], [2.0], [3.0], [4.0]]), weight, bias, silu=False)
    np.testing.assert_allclose(y[:, 0], [1.5, 12.5, 123.5, 234.5])
