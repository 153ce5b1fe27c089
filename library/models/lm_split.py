"""How a :class:`TransformerLM` is split among processes that compute it together (tensor parallelism).

Every process has some heads and some of the feed-forward's middle: q, k, v, gate and up by outputs, the layers behind
them by inputs (``library.nn.tensor_split``); and some tokens of embedding and head, if their number divides. Norms are
whole everywhere.
"""

from __future__ import annotations

from library.errors import UserError
from library.models.lm_config import LMConfig
from library.models.transformer_lm import Attention, TransformerLM
from library.nn.tensor_split import Parts


def lm_split_plan(config: LMConfig, processes: int, separate: bool) -> dict[str, Parts]:
    """Return how each linear layer is split, and the embedding.

    Args:
        config: of the model.
        processes: that have it together.
        separate: whether a Llama's projections are layers of their own (``library.models.lm_projections``).

    Raises:
        UserError: heads, heads of keys or the feed-forward's middle do not divide.
    """
    for what, count in (("heads", config.heads), ("kv_heads", config.kv_heads), ("hidden", config.hidden)):
        if count % processes:
            raise UserError(f"tp: {what} = {count} cannot be dealt out to {processes} processes; set a divisor")
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    joined = {"attention.qkv": {"q_proj": queries, "k_proj": keys, "v_proj": keys}}
    if config.family == "llama":
        joined["feed_forward.gate_up"] = {"gate_proj": config.hidden, "up_proj": config.hidden}
    block = {"attention.out": Parts(1, (queries,)), "feed_forward.down": Parts(1, (config.hidden,))}
    if config.family != "llama":
        block["feed_forward.up"] = Parts(0, (config.hidden,))
    for name, rows in joined.items():
        if separate and config.family == "llama":
            block |= {f"{name}.{part}": Parts(0, (count,)) for part, count in rows.items()}
        else:
            block[name] = Parts(0, tuple(rows.values()))
    plan = {f"blocks.{i}.{name}": parts for i in range(config.layers) for name, parts in block.items()}
    tokens = config.padded_vocab_size
    if tokens % processes == 0:
        plan |= {"embedding": Parts(0, (tokens,)), "lm_head": Parts(0, (tokens,), gathered=True)}
    return plan


def deal_out_heads(model: TransformerLM, processes: int) -> None:
    """Tell the attention of ``model``, whose layers are split, how many heads it has here."""
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        attention.heads //= processes
        attention.kv_heads //= processes
