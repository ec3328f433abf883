import pytest
import torch

from sf_core.models.projections import PACKED, PLAIN, has_fast_products


@pytest.mark.skipif(not has_fast_products(torch.bfloat16, torch.device("cpu")), reason="no bfloat16 products")
def test_in_bfloat16_engines_and_trainers_round_a_product_with_an_adapters_part_alike() -> None:
    """With one rounding more on one side, four elements of ten would differ."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16()

    for num in (1, 37, 512):
        x = draw(num, 64)
        plus = draw(num, 96)
        onto = draw(num, 96)
        weight = draw(96, 64)
        gate = draw(48, 64)
        up = draw(48, 64)
        for of_trainer, of_engine in (
            (projections.linear(weight, None)(x, plus) for projections in (PLAIN, PACKED)),
            (projections.residual(weight, None)(x, onto, plus) for projections in (PLAIN, PACKED)),
            (projections.gated(gate, up)(x, plus) for projections in (PLAIN, PACKED)),
        ):
            assert (of_trainer != of_engine).float().mean() < 0.01
