"""Token statistics: every path against plain formulas, and against the other paths."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paradec.core import rng
from paradec.kernels import interpreting
from paradec.kernels.token_stats import (
    FIELDS,
    IN_ONE_READ,
    TokenDraws,
    TokenStats,
    draw,
    path_for,
    portable,
    read,
    reference_stats,
    token_stats,
)
from paradec.samplers.distributions import draw_filtered, filter_logits

VOCABULARY = 9001
"""A size for which float32 logits take the chunked path, and not a multiple of a tile size."""
ONE_READ = tuple(name for name in FIELDS if name in IN_ONE_READ)
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_TRITON = pytest.mark.skipif(
    not HAS_TRITON or DEVICE == "cpu" and not interpreting(),
    reason="needs triton, and TRITON_INTERPRET=1 where there is no GPU (conftest.py sets it)",
)


def runs_kernel(test: Callable[..., None]) -> Callable[..., None]:
    # numpy warns of -inf - -inf, which the kernel does not use
    return NEEDS_TRITON(pytest.mark.filterwarnings("ignore:invalid value encountered")(test))


def run_kernel(
    logits: Tensor,
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: TokenDraws | None = None,
    block: int = 64,
    splits: int = 1,
) -> TokenStats:
    """Run the kernel, on the GPU or interpreted; return the statistics on the CPU."""
    if draws is not None:
        draws = TokenDraws(draws.keys.to(DEVICE), draws.steps.to(DEVICE), draws.positions.to(DEVICE), draws.temperature)
    ids = None if ids is None else ids.to(DEVICE)
    # moving a view would change its strides, so its whole storage is moved
    storage = logits if logits._base is None else logits._base
    moved = storage.to(DEVICE).as_strided(logits.shape, logits.stride(), logits.storage_offset())
    from paradec.kernels.token_stats.triton import triton_stats

    stats = triton_stats(moved, IN_ONE_READ, temperature, ids, draws, block=block, splits=splits)
    return TokenStats(*(None if field is None else field.cpu() for field in stats))


def logits_of(*lead: int, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw logits with a different sharpness in each row, excluded tokens, and a tie of the two best in row 0."""
    logits = torch.randn(*lead, vocabulary, generator=torch.Generator().manual_seed(seed))
    flat = logits.view(-1, vocabulary)
    flat *= torch.linspace(0.1, 12, len(flat)).unsqueeze(1)
    if vocabulary > 8:
        flat[:, 3] = -torch.inf
        flat[-1, : vocabulary // 2] = -torch.inf
        flat[0, [vocabulary // 3, vocabulary - 1]] = flat[0].max() + 1
    return logits.to(dtype)


def assert_close(stats: TokenStats, expected: dict[str, Tensor], names: frozenset[str] | tuple[str, ...], rel: float):
    for name in names:
        actual, exact = getattr(stats, name), expected[name]
        assert actual.shape == exact.shape, name
        if exact.dtype.is_floating_point:
            assert actual.dtype == torch.float64
            torch.testing.assert_close(actual, exact, rtol=rel, atol=rel, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert torch.equal(actual, exact), name


def draws_for(rows: int, width: int, temperature: float = 0.7) -> TokenDraws:
    generator = torch.Generator().manual_seed(7)
    shapes = ((2**32, (rows, 2)), (1000, (rows,)), (5000, (rows, width)))
    keys, steps, positions = (torch.randint(bound, shape, generator=generator) for bound, shape in shapes)
    return TokenDraws(keys, steps, positions, temperature)


@pytest.mark.parametrize("vocabulary", [1, 2, 511, 512, 513, 1300])
def test_small_and_odd_vocabularies(vocabulary: int) -> None:
    logits = logits_of(6, vocabulary=vocabulary)
    stats = token_stats(logits, path="chunked")
    if vocabulary == 1:
        assert stats.prob.eq(1).all() and stats.entropy.eq(0).all() and stats.gap.isinf().all()
        assert stats.second_prob.eq(0).all() and not stats.nonfinite.any()
        return
    assert_close(stats, reference_stats(logits)._asdict(), FIELDS, 1e-6)


def test_confident_tokens_keep_their_order_and_entropy() -> None:
    # in float32, probabilities round to 1 if the second logit is 17 lower; here it is 20 to 30 lower
    logits = torch.full((11, VOCABULARY), -torch.inf)
    logits[:, 10] = 5.0
    logits[:, 20] = 5.0 - torch.arange(20.0, 31.0)
    stats = token_stats(logits, path="chunked")
    assert logits.softmax(-1)[:, 10].eq(1).all()
    assert (stats.prob.diff() > 0).all()
    doubt = torch.arange(20.0, 31.0, dtype=torch.float64).neg().exp()
    torch.testing.assert_close(1 - stats.prob, doubt / (1 + doubt), rtol=1e-2, atol=0)
    entropy = doubt.log1p() + torch.arange(20.0, 31.0) * doubt / (1 + doubt)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-6, atol=0)
    far = logits.clone()
    far[:, 20] = -80.0
    second = token_stats(far, path="chunked").second_prob
    torch.testing.assert_close(second, torch.full_like(second, math.exp(-85.0)), rtol=1e-6, atol=0)
    # probabilities beyond the range of float32
    far[:, 20], far[:, 30] = -295.0, -296.0
    doubt = math.exp(-300.0) + math.exp(-301.0)
    entropy = doubt + 300 * math.exp(-300.0) + 301 * math.exp(-301.0)
    actual = token_stats(far, path="chunked").entropy
    torch.testing.assert_close(actual, torch.full_like(actual, entropy), rtol=1e-6, atol=0)


@pytest.mark.parametrize("path", ["float64", "chunked"])
def test_bad_rows_are_flagged_and_harm_no_others(path: str) -> None:
    logits = logits_of(6)
    good = token_stats(logits[:3], path=path)
    logits[3, 77] = torch.nan
    logits[4, 77] = torch.inf
    logits[5] = -torch.inf
    stats = token_stats(logits, path=path)
    assert stats.nonfinite.tolist() == [False] * 3 + [True] * 3
    for name in ("prob", "margin", "entropy", "logsumexp"):
        assert getattr(stats, name)[3:].isnan().all(), name
        assert torch.equal(getattr(stats, name)[:3], getattr(good, name)), name


@pytest.mark.parametrize("path", ["float64", "chunked"])
def test_strided_rows_and_probabilities_of_given_ids(path: str) -> None:
    view = logits_of(3, 7)[:, 1:5]
    assert not view.is_contiguous()
    ids = torch.randint(VOCABULARY, (3, 4, 5), generator=torch.Generator().manual_seed(1))
    stats = token_stats(view, ids=ids, path=path)
    contiguous = token_stats(view.contiguous(), path=path)
    for name in FIELDS:
        assert torch.equal(getattr(stats, name), getattr(contiguous, name)), name
    torch.testing.assert_close(stats.ids_prob, view.double().softmax(-1).gather(-1, ids), rtol=1e-5, atol=0)
    assert torch.equal(token_stats(view, ids=ids[..., 2], path=path).ids_prob, stats.ids_prob[..., 2])


@pytest.mark.parametrize("vocabulary", [64, 2000, 4096, 8000])
def test_chunks_in_float64_equal_single_rows(vocabulary: int) -> None:
    rows = 2 * read.FLOAT64_CPU_BLOCK // vocabulary + 3
    logits = logits_of(rows, vocabulary=vocabulary)
    logits[1, [vocabulary - 1, 70 % vocabulary, 5]] = 99.0
    ids = torch.randint(vocabulary, (rows, 2), generator=torch.Generator().manual_seed(3))
    for temperature in (1.0, 0.5):
        stats = token_stats(logits, temperature=temperature, ids=ids)
        assert stats.token.equal(logits.max(-1).indices) and stats.token[1] == min(5, 70 % vocabulary)
        for row in (0, 1, rows // 2, rows - 1):
            alone = token_stats(logits[row], temperature=temperature, ids=ids[row])
            expected = reference_stats(logits[row], temperature)
            torch.testing.assert_close(stats.prob[row], expected.prob, rtol=1e-12, atol=0)
            for name in (*FIELDS, "ids_prob"):
                assert torch.equal(getattr(stats, name)[row], getattr(alone, name)), name
    plain = token_stats(logits, fields=())
    assert torch.equal(plain.token, logits.max(-1).indices) and plain.entropy is None
    torch.testing.assert_close(plain.prob, logits.double().softmax(-1).amax(-1), rtol=1e-12, atol=0)


def test_chunked_makes_no_tensor_of_the_logits_size() -> None:
    class LargestTensor(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != input_address:
                    self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
            return out

    logits = logits_of(60, vocabulary=40_000)
    input_address = logits.untyped_storage().data_ptr()
    with LargestTensor() as largest:
        token_stats(logits, path="chunked")
    assert 0 < largest.nbytes <= 2 * 4 * portable.CPU_BLOCK < logits.nbytes / 2


TEMPERATURES = (0.05, 0.2, 1.0, 2.0)


def plain_stats(logits: Tensor, temperature: float) -> dict[str, Tensor]:
    """Compute the fields by their definitions, row by row in float64, after subtraction of the largest logit."""
    rows = []
    for row in logits.double().reshape(-1, logits.shape[-1]):
        z = (row - row.max()) / temperature
        p = z.exp() / z.exp().sum()
        first, second = p.sort(descending=True).values[:2]
        best, following = row.sort(descending=True).values[:2]
        rows.append(
            {
                "token": p.argmax(),
                "prob": first,
                "second_prob": second,
                "margin": first - second,
                "entropy": -(p[p > 0] * p[p > 0].log()).sum(),
                "smoothed_entropy": -(p * (p + 1e-10).log()).sum(),
                "logsumexp": row.max() / temperature + z.exp().sum().log(),
                "gap": best - following,
                "nonfinite": torch.tensor(False),
            }
        )
    return {name: torch.stack([row[name] for row in rows]).view(logits.shape[:-1]) for name in rows[0]}


def varied_logits(vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Create logits [10, V]: flat and sharp rows, excluded tokens, one or two (tied) remaining tokens, top-k, top-p."""
    logits = logits_of(10, vocabulary=vocabulary, dtype=torch.float64, seed=vocabulary)
    logits = logits.to(dtype).where(logits > -torch.inf, logits_of(10, vocabulary=vocabulary, seed=9)[:, :1].to(dtype))
    logits[2, ::3] = -torch.inf
    logits[3, 1 : vocabulary // 2] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 5] = -7.0
    logits[5] = -torch.inf
    logits[5, [8, 2]] = 30.0
    logits[6:8] = filter_logits(logits[6:8], None, 50)
    logits[8:] = filter_logits(logits[8:], 0.95, None)
    return logits


def assert_exact_zeros(stats: TokenStats, logits: Tensor) -> None:
    """Assert that excluded tokens have probability 0, and a single remaining token probability 1."""
    excluded = logits == -torch.inf
    assert (stats.ids_prob[excluded[..., : stats.ids_prob.shape[-1]]] == 0).all()
    assert stats.prob[4] == 1 and stats.second_prob[4] == 0 and stats.margin[4] == 1 and stats.gap[4] == torch.inf
    assert stats.entropy[4] == 0 and stats.token[4] == 5
    assert stats.token[5] == 2 and stats.prob[5] == stats.second_prob[5] == 0.5 and stats.margin[5] == 0


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [300, VOCABULARY])
def test_statistics_equal_their_definitions_at_every_temperature(vocabulary: int, dtype: torch.dtype) -> None:
    logits = varied_logits(vocabulary, dtype)
    ids = torch.arange(40).expand(10, -1)
    small = path_for(logits) == "float64"
    for temperature in TEMPERATURES:
        stats = token_stats(logits, temperature=temperature, ids=ids)
        expected = plain_stats(logits, temperature)
        assert_close(stats, expected, FIELDS, 1e-11 if small else 1e-6)
        assert_exact_zeros(stats, logits)
        exact = reference_stats(logits, temperature, ids)
        assert_close(exact, expected, FIELDS, 1e-11)
        assert_exact_zeros(exact, logits)
        # the same sharpness at temperature 1
        sharp = (logits.double() / temperature).to(dtype)
        assert_close(token_stats(sharp), plain_stats(sharp, 1.0), FIELDS, 1e-11 if small else 1e-6)


def extreme_logits(vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Create logits [3, V] at the largest numbers of the dtype: one best token, two tied, all equal."""
    large = torch.finfo(dtype).max
    logits = torch.zeros(3, vocabulary, dtype=dtype)
    logits[0], logits[0, 70] = -large, large
    logits[1], logits[1, [90, 30]] = -large / 2, -large / 3
    logits[2] = large / 4
    return logits


@pytest.mark.parametrize("path", ["float64", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_are_not_infinite(path: str, dtype: torch.dtype) -> None:
    logits = extreme_logits(VOCABULARY, dtype)
    for temperature in (1e-6, 1.0, 1e6):
        draws = draws_for(3, 1, temperature)
        draws = TokenDraws(draws.keys, draws.steps, draws.positions[:, 0], temperature)
        stats = token_stats(logits, temperature=temperature, path=path, draws=draws)
        assert stats.token.tolist() == [70, 30, 0] and not stats.nonfinite.any()
        expected = torch.tensor([1, 1 / 2, 1 / VOCABULARY], dtype=torch.float64)
        torch.testing.assert_close(stats.prob, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(stats.entropy, -expected.log().to(stats.entropy), rtol=1e-6, atol=1e-30)
        torch.testing.assert_close(stats.sample_prob, expected, rtol=1e-6, atol=0)
        assert stats.sample[0] == 70 and stats.sample[1] in (30, 90)
    # noise still matters next to huge logits: tied tokens are drawn equally often
    hundred = TokenDraws(draws.keys[:1], draws.steps[:1], torch.arange(100).unsqueeze(0), 1e-6)
    counts = token_stats(logits[1].expand(1, 100, -1), draws=hundred, path=path).sample.view(-1).bincount()
    assert set(counts.nonzero().view(-1).tolist()) == {30, 90} and 25 < counts[30] < 75


@pytest.mark.thinned
@runs_kernel
@pytest.mark.parametrize(("dtype", "splits"), [(torch.float32, 1), (torch.float16, 2), (torch.bfloat16, 2)])
def test_kernel_at_every_temperature(dtype: torch.dtype, splits: int) -> None:
    logits = varied_logits(200, dtype)
    ids = torch.arange(40).expand(10, -1)
    for temperature in TEMPERATURES if splits == 1 else TEMPERATURES[::3]:
        stats = run_kernel(logits, temperature, ids, block=128, splits=splits)
        assert_close(stats, plain_stats(logits, temperature), ONE_READ, 1e-6)
        assert_exact_zeros(stats, logits)


@pytest.mark.thinned
@runs_kernel
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("splits", [1, 2])
def test_kernel_with_extreme_logits(splits: int) -> None:
    logits = extreme_logits(100, torch.float32)
    for temperature in (1e-6, 1.0):
        stats = run_kernel(logits, temperature, splits=splits)
        assert_close(stats, reference_stats(logits, temperature)._asdict(), ONE_READ, 1e-6)
    alike = logits[1:].unsqueeze(1).expand(2, 5, -1).contiguous()
    draws = draws_for(2, 5, 1e-6)
    sample = run_kernel(alike, draws=draws, splits=splits).sample
    assert torch.equal(sample, token_stats(alike, draws=draws, path="float64").sample)
    assert sample[0].unique().tolist() == [30, 90] and len(sample[1].unique()) > 3


def p_value(logits: Tensor, draw: Callable[[Tensor, Tensor], Tensor], p: Tensor, count: int) -> float:
    """Return the p-value of `count` draws from logits [V] against the distribution p [V]; rare tokens are pooled."""
    uniform = rng.uniform(torch.tensor([[3, 4]]), torch.tensor([0]), torch.arange(count).unsqueeze(0), 1, 0).flatten()
    tokens = torch.cat([draw(logits.expand(len(part), -1), part) for part in uniform.split(100)])
    counts = tokens.bincount(minlength=len(p))
    assert (counts[p == 0] == 0).all()
    order = p.argsort(descending=True)
    num_frequent = int((p * count >= 20).sum())
    frequencies = (counts[order].double(), p[order] * count)
    observed, expected = (torch.cat((f[:num_frequent], f[num_frequent:].sum().unsqueeze(0))) for f in frequencies)
    observed, expected = observed[expected > 5], expected[expected > 5]
    return 1.0 if len(expected) == 1 else float(chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("temperature", "count"),
    [(0.3, 500), (1.7, 500), *(pytest.param(each, 100_000, marks=pytest.mark.full) for each in (0.7, 1.0))],
)
@pytest.mark.parametrize("filters", [(None, None), (0.9, None), (None, 40), (0.95, 30)])
def test_draws_have_their_distribution(filters: tuple[Any, Any], temperature: float, count: int) -> None:
    for vocabulary in (700, VOCABULARY):
        logits = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(3))
        logits[::7] = -torch.inf
        p = filter_logits(logits.double() / temperature, *filters).softmax(-1)

        def draw_tokens(rows: Tensor, uniform: Tensor) -> Tensor:
            draws = FixedDraws(uniform, temperature)
            if filters == (None, None):
                return token_stats(rows, fields=(), draws=draws).sample
            tokens = draw_filtered(rows, uniform, temperature, *filters)
            return draw(filter_logits(rows / temperature, *filters).softmax(-1), uniform) if tokens is None else tokens

        is_fast = vocabulary == 700 or filters == (None, None)  # other draws take half a millisecond each
        assert p_value(logits, draw_tokens, p, count if is_fast else min(count, 10_000)) > 0.01 / 32


class FixedDraws(TokenDraws):
    """Draws with given uniform numbers."""

    def __init__(self, numbers: Tensor, temperature: float):
        zero = torch.zeros(len(numbers), dtype=torch.int64)
        super().__init__(zero.unsqueeze(1).expand(-1, 2), zero, zero, temperature)
        object.__setattr__(self, "numbers", numbers)

    def uniform(self) -> Tensor:
        return self.numbers


def count_different_draws(stats_of: Callable[..., TokenStats], logits: Tensor, count: int, temperature: float) -> int:
    """Count draws that differ from float64's; assert that their numbers are within 1e-6 of the tokens' boundary."""
    total = (logits.double() / temperature).softmax(-1).cumsum(-1)
    generator, num_different = torch.Generator().manual_seed(int(10 * temperature)), 0
    for _ in range(0, count, len(logits)):
        uniform = torch.rand(len(logits), dtype=torch.float64, generator=generator)
        exact = torch.searchsorted(total, (uniform.unsqueeze(-1) * total[:, -1:])).squeeze(-1)
        actual = stats_of(logits, draws=FixedDraws(uniform, temperature)).sample
        differs = (actual != exact).nonzero().flatten()
        assert (total[differs, torch.minimum(actual, exact)[differs]] - uniform[differs]).abs().le(1e-6).all()
        num_different += len(differs)
    return num_different


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("path", ["chunked", "float64"])
@pytest.mark.parametrize(
    ("vocabulary", "count"),
    [
        (VOCABULARY, 400),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((VOCABULARY, 100_000), (126_464, 20_000))),
    ],
)
def test_draws_of_paths_differ_only_at_boundaries(path: str, temperature: float, vocabulary: int, count: int) -> None:
    """At most one draw in 10,000 differs, and only if its number is within 1e-6 of the boundary."""
    logits = logits_of(40, 1, vocabulary=vocabulary)[:, 0] / 3

    def stats_of(rows: Tensor, draws: TokenDraws) -> TokenStats:
        return token_stats(rows, fields=(), draws=draws, path=path)

    assert count_different_draws(stats_of, logits, count, temperature) <= count // 10_000


def test_draws_next_to_boundaries_equal_float64() -> None:
    noise = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits = torch.linspace(0.1, 1, 4).unsqueeze(1) * noise
    total = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    for token, offset in ((100, 1e-10), (4_000, -1e-10), (7_003, 1e-10), (VOCABULARY - 2, -1e-10)):
        uniform = total[:, token] / total[:, -1] + offset
        expected = token + (offset > 0)
        actual = token_stats(logits, fields=(), draws=FixedDraws(uniform, 0.7), path="chunked").sample
        assert actual.tolist() == [expected] * 4
        alone = token_stats(logits[1:2], fields=(), draws=FixedDraws(uniform[1:2], 0.7), path="chunked").sample
        assert alone.tolist() == [expected]
    total = filter_logits(logits.double() / 0.7, 0.9, None).softmax(-1).cumsum(-1)
    allowed_ids = (total.diff(dim=-1) > 0)[2].nonzero().flatten() + 1
    for index in (100, 900, 2_000):
        uniform = total[2, allowed_ids[index]] / total[2, -1] + torch.tensor([1e-10, -1e-10], dtype=torch.float64)
        actual = draw_filtered(logits[2].expand(2, -1), uniform, 0.7, 0.9, None)
        assert actual is not None and actual.tolist() == [allowed_ids[index + 1], allowed_ids[index]]


@runs_kernel
@pytest.mark.parametrize("count", [20, pytest.param(10_000, marks=pytest.mark.full)])
def test_draws_of_the_kernel_differ_only_at_boundaries(count: int) -> None:
    from paradec.kernels.token_stats.triton import triton_stats

    def stats_of(rows: Tensor, draws: FixedDraws) -> TokenStats:
        moved = FixedDraws(draws.numbers.to(DEVICE), draws.temperature)
        stats = triton_stats(rows.to(DEVICE), frozenset(), 1.0, None, moved, block=8192, splits=1)
        return TokenStats(sample=stats.sample.cpu(), token=stats.token, prob=stats.prob)

    assert count_different_draws(stats_of, logits_of(20, 1)[:, 0] / 3, count, 0.7) <= count // 10_000


def test_rows_do_not_depend_on_batch_and_threads() -> None:
    """Results are bit-identical, although PyTorch rounds the last elements of a vector loop differently."""
    logits, draws = logits_of(15, 1, vocabulary=30_011), draws_for(15, 1)
    logits[[1, 9]] += 5000
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        stats = token_stats(logits, fields=("entropy",), draws=draws)
        for count in (2, 3, 4):
            torch.set_num_threads(count)
            repeated = token_stats(logits, fields=("entropy",), draws=draws)
            for name in ("prob", "entropy", "sample", "sample_prob"):
                assert torch.equal(getattr(repeated, name), getattr(stats, name)), (name, count)
        torch.set_num_threads(1)
        for row in range(15):
            only = slice(row, row + 1)
            row_draws = TokenDraws(draws.keys[only], draws.steps[only], draws.positions[only], 0.7)
            alone = token_stats(logits[only], fields=("entropy",), draws=row_draws)
            for name in ("prob", "entropy", "sample", "sample_prob"):
                assert torch.equal(getattr(alone, name)[0], getattr(stats, name)[row]), (name, row)
    finally:
        torch.set_num_threads(threads)


ZEROS = torch.zeros(2, 2).long()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 3).long()}, TypeError, "logits must be a float tensor .* not torch.int64"),
        ({"logits": torch.zeros(2, 0)}, ValueError, r"logits of shape \(2, 0\) have no tokens"),
        ({"fields": ("probability",)}, ValueError, "unknown fields: 'probability'; allowed: .*prob"),
        ({"temperature": 0}, ValueError, "temperature=0 must be a number"),
        ({"path": "cuda"}, ValueError, "unknown path: 'cuda'; allowed: .*float64"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, ValueError, r"ids must be int64 of shape \(2,\) or"),
        ({"ids": torch.tensor([0, 5])}, ValueError, "ids from 0 to 5 must be from 0 to 4"),
        ({"draws": draws_for(3, 1)}, ValueError, r"draws.keys must be int64 \(2, 2\), not"),
        ({"draws": TokenDraws(ZEROS, ZEROS[0], ZEROS[0], 0)}, ValueError, "draws.temperature=0 must be above 0"),
        ({"path": "triton"}, ValueError, "path='triton' has no smoothed_entropy"),
    ],
)
def test_wrong_arguments_are_named(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 5)} | change
    with pytest.raises(error, match=message):
        token_stats(arguments.pop("logits"), **arguments)


@pytest.mark.thinned
@runs_kernel
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_equals_float64(dtype: torch.dtype, splits: int) -> None:
    logits = logits_of(2, 2, vocabulary=301, dtype=dtype)
    ids = torch.randint(301, (2, 2, 3), generator=torch.Generator().manual_seed(1))
    draws = draws_for(2, 2)
    stats = run_kernel(logits, 1.0, ids, draws, block=64, splits=splits)
    exact = reference_stats(logits, 1.0, ids, draws)
    assert_close(stats, exact._asdict(), (*ONE_READ, "ids_prob", "sample", "sample_prob"), 1e-6)
    assert stats.smoothed_entropy is None
    assert stats.token[0, 0] == 100, "the lower of two tied tokens"


@runs_kernel
def test_kernel_reads_strided_rows_and_divides_by_the_temperature() -> None:
    logits = logits_of(3, 4, vocabulary=70)
    view = logits[1:, 1:3]
    assert_close(run_kernel(view, 0.8, block=32, splits=2), reference_stats(view, 0.8)._asdict(), ONE_READ, 1e-5)
    flat = logits.view(12, 70)[::3]
    assert_close(run_kernel(flat), reference_stats(flat)._asdict(), ONE_READ, 1e-6)
    stats = token_stats(flat.to(DEVICE), fields=ONE_READ, path="triton")
    assert torch.equal(stats.token.cpu(), run_kernel(flat).token)


@runs_kernel
@pytest.mark.parametrize("splits", [1, 4])
def test_kernel_on_edge_cases(splits: int) -> None:
    # ties across tiles and splits, one token, all mass in the last split, 1 - p below float32's resolution
    logits = torch.full((9, 128), -torch.inf)
    logits[0, [5, 40, 100]] = 2.0
    logits[1, 127] = -3.0
    logits[2, :] = 0.0
    logits[3, [64, 3]] = torch.tensor([40.0, 0.0])
    logits[4, [33, 34]] = torch.tensor([0.0, 9.0])
    logits[5, 0], logits[5, 90] = 1.0, torch.nan
    logits[6, 10], logits[6, 20] = torch.inf, 1.0
    logits[8, 0] = torch.nan
    stats = run_kernel(logits, block=32, splits=splits)
    assert stats.nonfinite.tolist() == [False] * 5 + [True] * 4
    assert stats.token[:5].tolist() == [5, 127, 0, 64, 34]
    good = reference_stats(logits[:5])
    assert reference_stats(logits).nonfinite.equal(stats.nonfinite)
    for name in ("prob", "second_prob", "margin", "entropy", "logsumexp", "gap"):
        assert getattr(stats, name)[5:].isnan().all(), name
        torch.testing.assert_close(getattr(stats, name)[:5], getattr(good, name), rtol=2e-6, atol=1e-30)
    assert stats.margin[0] == 0 and stats.gap[1] == torch.inf and stats.entropy[1] == 0
