"""Multi-token prediction: layers that predict the tokens after the next one, as a further loss in training.

Shape suffixes: B batch, S sequence, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine.layers import Linear, RMSNorm
from primus.frameworks.native.engine.loss import IGNORED


class PredictionLayer(nn.Module):
    """From the hidden state of a token, and the embedding of a later one, the hidden state that predicts the token
    after that (DeepSeek-V3, arXiv 2412.19437, section 2.2; transformers `MtpLayer`).

    Args:
        spec: The model.
        layer: A layer like the last one of the model.
    """

    def __init__(self, spec: ModelSpec, layer: nn.Module) -> None:
        super().__init__()
        hidden, epsilon = spec.hidden_size, spec.norm_epsilon
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, epsilon), RMSNorm(hidden, epsilon)
        self.projection = Linear(2 * hidden, hidden, bias=False)
        self.layer = layer
        self.norm = RMSNorm(hidden, epsilon)

    def forward(self, hidden_BSD: Tensor, embedded_BSD: Tensor, *inputs: Any) -> Tensor:
        """Normalized hidden states; `inputs` are the further ones of the layer."""
        embedded_BSD = self.embedding_norm(embedded_BSD.to(hidden_BSD.dtype))
        joined = torch.cat((embedded_BSD, self.hidden_norm(hidden_BSD)), -1)
        return self.norm(self.layer(self.projection(joined), *inputs))


def shift_tokens(x_BS: Tensor, distance: int, examples_BS: Tensor | None, fill: int = IGNORED) -> Tensor:
    """At each place what is `distance` further on; `fill` where that is behind the end or in another example."""
    shifted_BS = F.pad(x_BS[:, distance:], (0, distance), value=fill)
    if examples_BS is None:
        return shifted_BS
    return shifted_BS.where(examples_BS == shift_tokens(examples_BS, distance, None, -1), fill)
