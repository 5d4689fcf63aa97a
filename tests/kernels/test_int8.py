"""Linear layers with int8 weights against plain loops over integers."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from decoding import refuses, run_in_threads
from torch import Tensor, nn

from paradec.kernels.int8 import (
    Int8Experts,
    Int8Linear,
    int8_linear,
    portable,
    quantize_weight,
    reference_linear,
    weight_bits,
)

BITS = weight_bits()
HAS_PACKED = portable.has_packed_product()
LARGEST = 2 ** (BITS - 1) - 1


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers, with one column scaled by 60."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., 3] *= 60
    return values


def plain_product(x: Tensor, weight: Tensor, scale: Tensor, activations: int) -> list[list[float]]:
    """Compute the product by plain loops over Python integers."""
    largest = 127 if activations == 8 else 127 * 128
    result = []
    for row in x.float():
        step = row.abs().max() / largest
        values = [round(value) for value in (row / step).tolist()]
        sums = [sum(a * b for a, b in zip(values, column, strict=True)) for column in weight.tolist()]
        result.append([total * step.item() * s for total, s in zip(sums, scale.tolist(), strict=True)])
    return result


@pytest.mark.parametrize("activations", [15, 8])
@pytest.mark.parametrize(("count", "width", "outputs"), [(1, 7, 5), (2, 64, 1), (3, 33, 40), (20, 100, 9)])
def test_products_equal_plain_loops(activations: int, count: int, width: int, outputs: int) -> None:
    x = draw(count, width)
    weight, scale = quantize_weight(draw(outputs, width, seed=1), BITS)
    expected = torch.tensor(plain_product(x, weight, scale, activations), dtype=torch.float64)
    reference = reference_linear(x, weight, scale, activations=activations)
    torch.testing.assert_close(reference, expected, rtol=1e-9, atol=1e-9)
    output = int8_linear(x, weight, scale, activations=activations)
    limit = 1e-6 * (x.abs().amax(-1, keepdim=True) * weight.abs().amax(-1) * scale * width).double()
    assert ((output.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shapes_dtypes_and_bias(dtype: torch.dtype) -> None:
    linear = nn.Linear(48, 20).to(dtype)
    layer = Int8Linear.from_linear(linear)
    layer.unpack()
    x = torch.randn(2, 5, 48, dtype=dtype)
    result = layer(x)
    layer.unpack()
    assert (result.dtype, result.shape) == (dtype, (2, 5, 20))
    exact = linear(x).double()
    assert (result.double() - exact).norm() <= 0.02 * exact.norm() * (1 if BITS == 8 else 2)
    reference = reference_linear(x, layer.weight.t(), layer.scale, layer.bias)
    atol = 1e-2 if dtype.itemsize == 2 else 1e-6
    assert torch.allclose(result.double(), reference, rtol=2 * torch.finfo(dtype).eps, atol=atol)
    assert layer(x[:0]).shape == (0, 5, 20)


def test_weights_are_rounded_by_rows() -> None:
    matrix = draw(6, 50)
    matrix[2] = 0
    for bits, largest in ((8, 127), (7, 63)):
        weight, scale = quantize_weight(matrix, bits)
        assert weight.abs().amax(-1).tolist() == [largest, largest, 0, largest, largest, largest]
        assert ((weight * scale.unsqueeze(1) - matrix).abs() <= 0.5001 * scale.unsqueeze(1)).all()
    stacked = quantize_weight(matrix.view(2, 3, 50))
    assert torch.equal(stacked[0].view(6, 50), quantize_weight(matrix)[0])


def test_chunks_of_weights_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = draw(37, 11)
    expected = quantize_weight(matrix)
    monkeypatch.setattr("paradec.kernels.int8.reference.CHUNK", 25)
    assert all(torch.equal(*pair) for pair in zip(quantize_weight(matrix), expected, strict=True))


@pytest.mark.parametrize("activations", [15, 8])
def test_products_do_not_depend_on_the_batch(activations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = quantize_weight(draw(70, 130), BITS)
    x = draw(45, 130, seed=2)
    together = int8_linear(x, weight, scale, activations=activations)
    for row in range(0, 45, 7):
        assert torch.equal(int8_linear(x[row], weight, scale, activations=activations), together[row])
    assert torch.equal(int8_linear(x.flip(0), weight, scale, activations=activations), together.flip(0))
    monkeypatch.setattr(portable, "SUMS_PER_PRODUCT", 8 * 70)
    assert torch.equal(int8_linear(x, weight, scale, activations=activations), together)


@pytest.mark.parametrize("activations", [15, 8])
def test_zero_extreme_and_nonfinite_rows(activations: int) -> None:
    weight, scale = quantize_weight(draw(9, 40), BITS)
    x = draw(8, 40, seed=3)
    clean = int8_linear(x, weight, scale, activations=activations)
    x[1, 5], x[3, 6], x[4, 0], x[5], x[6] = torch.nan, torch.inf, -torch.inf, 0, 0
    x[6, 2] = 1e-42
    output = int8_linear(x, weight, scale, activations=activations)
    assert output[[1, 3, 4]].isnan().all()
    assert (output[5] == 0).all()
    assert (output[6].abs() < 1e-38).all()
    assert torch.equal(output[[0, 2, 7]], clean[[0, 2, 7]])
    assert int8_linear(torch.full((1, 40), 1e300, dtype=torch.float64), weight, scale).isnan().all()
    large = int8_linear(x[:1] * 1e30, weight, scale, activations=activations)
    torch.testing.assert_close(large / 1e30, clean[:1], rtol=1e-4, atol=1e-4 * clean[:1].abs().max().item())
    broken = draw(2, 40)
    broken[0, 0], broken[1, 7] = torch.nan, torch.inf
    assert int8_linear(x[:1], *quantize_weight(broken, BITS)).isnan().all()


def test_outliers_need_activations_of_15_bits() -> None:
    x, matrix = draw(64, 512), torch.randn(128, 512)
    exact = x.double() @ matrix.double().t()
    errors = []
    for activations in (15, 8):
        output = int8_linear(x, *quantize_weight(matrix, BITS), activations=activations)
        errors.append(float((output - exact).norm() / exact.norm()))
    assert errors[0] < 0.012 * (1 if BITS == 8 else 2) < errors[1]


def test_copies_pickles_and_threads() -> None:
    layer = Int8Linear.from_linear(nn.Linear(64, 33))
    x = draw(5, 64)
    expected = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), expected)
        assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert all(torch.equal(output, expected) for output in run_in_threads(lambda: layer(x), lambda: layer(x)))


@pytest.fixture(params=[False, True])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether layers pack their weights: never with param False; with True, if the processor supports it."""
    monkeypatch.setattr(portable, "has_packed_product", lambda: request.param and HAS_PACKED)
    return request.param and HAS_PACKED


@pytest.mark.parametrize("activations", [15, 8])
def test_packed_weights_give_the_same_products(packs: bool, activations: int) -> None:
    layer = Int8Linear.from_linear(nn.Linear(130, 77), activations)
    x = draw(45, 130)
    weight = layer.weight.clone()
    expected = int8_linear(x, weight.t(), layer.scale, layer.bias, activations)
    assert torch.equal(layer(x), expected)
    assert layer.weight.is_mkldnn == packs
    assert sum(parameter.numel() for parameter in layer.parameters()) == 130 * 77 + 2 * 77
    assert torch.equal(layer(x[3]), expected[3])
    assert layer(x[:0]).shape == (0, 77)
    assert torch.equal(layer.state_dict()["weight"], weight)
    assert torch.equal(layer(x), expected)
    assert layer.to(torch.float64).weight.dtype == torch.int8
    layer(x)
    layer.load_state_dict({"weight": -weight, "scale": layer.scale, "bias": -layer.bias})
    assert torch.equal(layer(x), -expected)


def test_experts_equal_a_plain_loop(packs: bool) -> None:
    """Compare with a loop over tokens and their experts that uses `int8_linear`."""
    torch.manual_seed(0)
    stacks = {"gate_up_proj": torch.randn(3, 40, 16), "down_proj": torch.randn(3, 16, 20)}
    experts = Int8Experts(SimpleNamespace(act_fn=nn.functional.silu, **stacks))
    for name, stack in stacks.items():
        weight, getattr(experts, f"{name}_scale").data = quantize_weight(stack, BITS)
        getattr(experts, name).data = weight.mT.contiguous()
    x, chosen, shares = torch.randn(5, 16), torch.tensor([[0, 2], [2, 1], [0, 3], [1, 0], [2, 0]]), torch.rand(5, 2)
    plain = {name: getattr(experts, name).clone() for name in stacks}

    def multiply(name: str, expert: int, row: Tensor) -> Tensor:
        return int8_linear(row, plain[name][expert].t(), getattr(experts, f"{name}_scale")[expert])

    expected = torch.zeros(5, 16)
    for row in range(5):
        for slot in (0, 1):
            if (expert := int(chosen[row, slot])) < 3:
                gate, up = multiply("gate_up_proj", expert, x[row]).chunk(2)
                expected[row] += shares[row, slot] * multiply("down_proj", expert, nn.functional.silu(gate) * up)
    torch.testing.assert_close(experts(x, chosen, shares), expected, rtol=1e-5, atol=1e-5)
    assert all(not packs or isinstance(getattr(experts, name), nn.ParameterList) for name in stacks)
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(copied(x, chosen, shares), experts(x, chosen, shares))
    experts(x, chosen, shares)
    assert all(torch.equal(experts.state_dict()[name], stack) for name, stack in plain.items())


def test_packed_products_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed products are not used if one sum is wrong, if they are slow, or if PyTorch lacks them."""
    check, product = portable.has_packed_product.__wrapped__, portable._packed_product

    def wrong_product(rows: Tensor, packed: Tensor) -> Tensor:
        result = product(rows, packed)
        result[-1, -1] += 2
        return result

    def missing_product(rows: Tensor, packed: Tensor) -> Tensor:
        raise RuntimeError("no such operator")

    for replacement in (wrong_product, missing_product):
        monkeypatch.setattr(portable, "_packed_product", replacement)
        assert not check()
    monkeypatch.setattr(portable, "_packed_product", product)
    assert check() == HAS_PACKED
    monkeypatch.setattr(portable, "SLOW_SECONDS", 0.0)
    assert not check()


def test_exactness_is_checked_with_extreme_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saturating products, as on processors without VNNI, are detected."""

    def saturate(rows: Tensor, weight: Tensor) -> Tensor:
        pairs = (rows.long() + 128).unsqueeze(1) * weight.t().long().unsqueeze(0)
        sums = pairs.view(*pairs.shape[:2], -1, 2).sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1)
        return (sums - 128 * weight.t().long().sum(-1)).int()

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_int_mm", saturate)
        assert weight_bits.__wrapped__() == 7
        patch.setattr(torch, "_int_mm", lambda rows, weight: saturate(rows, weight) + 1)
        refuses(lambda: weight_bits.__wrapped__(), "wrong sums", RuntimeError)
