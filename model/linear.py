"""A linear layer that does not mind a handful of rows."""

import torch
from torch import Tensor, nn

FEW = (5, 32)  # rows; measured on an Intel CPU: below, the library is as fast or faster, above, equal


class Linear(nn.Linear):
    """nn.Linear. While decoding on a CPU in float32, a few rows are multiplied as (W x^T)^T: the library then reads W as it lies,
    where for x W^T it copies W into another order first, which can take longer than the product."""

    def forward(self, x: Tensor) -> Tensor:
        decoding = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled()
        if not decoding or not FEW[0] <= x.numel() // x.size(-1) <= FEW[1]:
            return super().forward(x)
        y = (self.weight @ x.flatten(0, -2).mT).mT.contiguous().view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
