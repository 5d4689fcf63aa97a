"""Orders: their definitions, recorded runs of LPD's generator, and the masked sampler that follows an order."""

import functools
import json
import math
import operator
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from images import tiny_masked_image
from recorded import image_case, image_cases, replays

import paradec
from paradec import samplers
from paradec.core import orders, rng
from paradec.core.orders import (
    PUBLISHED_SIZES,
    Groups,
    draws_from_keys,
    group_sizes,
    halton_order,
    lpd_order,
    scale_sizes,
)
from paradec.samplers.start import row_keys

KEYS = row_keys([1, 1, 2], [[5], [6], [5]])
ORDERS = [orders.create(name) for name in orders.names() if name != "given"]
ORDERS += [orders.LPD(repulsion=0), orders.ZipAR(2), orders.ZipAR(1), orders.Cosine(1)]


def groups_of(order: orders.Order, height: int, width: int) -> Groups:
    return order.groups(height, width, draws_from_keys(torch.as_tensor(KEYS)))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 4), (3, 7), (1, 9), (8, 2)])
def test_groups_contain_every_cell_once(order: orders.Order, height: int, width: int) -> None:
    groups, size = groups_of(order, height, width), height * width
    assert (np.sort(groups.order, 1) == np.arange(size)).all() and groups.order.shape == (3, size)
    assert sum(groups.sizes) == size and min(groups.sizes) > 0
    assert (np.concatenate(list(groups), 1) == groups.order).all()
    assert [part.shape[1] for part in groups] == list(groups.sizes)
    assert groups.num_left.tolist() == [size, *(size - groups.ends)]
    assert (np.take_along_axis(groups.order, groups.rank, 1) == np.arange(size)).all()
    loaded = groups_of(orders.Order.from_dict(json.loads(json.dumps(order.to_dict()))), height, width)
    assert (loaded.order == groups.order).all() and loaded.sizes == groups.sizes
    # a row's order depends only on its key
    assert (order.groups(height, width, draws_from_keys(torch.as_tensor(KEYS[1:2]))).order[0] == groups.order[1]).all()
    same = (groups.order[0] == groups.order[1]).all()
    assert same if not order.random or size == 1 else not same or size < 4


def test_orders_equal_groups_by_hand() -> None:
    for order, height, width, expected in (
        (orders.Raster(), 2, 2, [[0], [1], [2], [3]]),
        (orders.Raster((3, 1)), 2, 2, [[0, 1, 2], [3]]),
        (orders.Diagonal(), 2, 3, [[0], [1, 3], [2, 4], [5]]),
        (orders.Diagonal(), 3, 2, [[0], [1, 2], [3, 4], [5]]),
        (orders.ZipAR(2), 2, 4, [[0], [1], [2, 4], [3, 5], [6], [7]]),
        (orders.ZipAR(9), 2, 3, [[0], [1], [2], [3], [4], [5]]),
        (orders.Halton((2, 2)), 2, 2, halton_order(2, 2).argsort().reshape(2, 2).tolist()),
        (orders.Given((2, 0, 1), (1, 2)), 1, 3, [[2], [0, 1]]),
    ):
        assert [part[0].tolist() for part in order.groups(height, width)] == expected, order
    two_rows = orders.Given([[1, 0], [0, 1]], 1).groups(1, 2, draws_from_keys(torch.as_tensor(KEYS[:2])))
    assert [part.tolist() for part in two_rows] == [[[1, 0], [0, 1]]]


def test_random_and_cosine_orders_sort_uniform_draws() -> None:
    cells = torch.arange(12).expand(3, -1)
    draws = rng.uniform(torch.as_tensor(KEYS), torch.zeros(3, dtype=torch.int64), cells, 1, 1).squeeze(-1)
    expected = draws.argsort(1).flip(1).numpy()
    assert (groups_of(orders.Random(), 3, 4).order == expected).all()
    cosine = groups_of(orders.Cosine(4), 3, 4)
    assert (cosine.order == expected).all() and cosine.num_left.tolist() == [12, 11, 8, 4, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orders.Raster(0), "sizes=0 must be an integer from 1"),
        (lambda: orders.Raster((2, 3)).groups(2, 2), r"sizes=\(2, 3\) add up to 5; the picture has 4 cells"),
        (lambda: orders.Halton(5).groups(2, 2), "sizes=5 must be an integer from 1 to 4"),
        (lambda: orders.ZipAR(0), "window=0 must be an integer from 1"),
        (lambda: orders.LPD(repulsion=-1), "repulsion=-1 must be a number"),
        (lambda: orders.Given(), r"cells=\(\) must list every cell once"),
        (lambda: orders.Given((0, 0, 1, 2)).groups(2, 2), "must list each of 4 cells once"),
        (lambda: orders.Given([[0, 1], [1, 0]]).groups(1, 2), "cells lists 2 orders for 1 rows"),
        (lambda: orders.create("lpd", steps=3), "unknown setting of order 'lpd': 'steps'"),
        (lambda: orders.create("rasta"), "unknown order: 'rasta' .did you mean 'raster'"),
        (lambda: orders.Diagonal().with_steps(3), "steps=3 has no meaning for Diagonal"),
    ],
)
def test_wrong_orders_are_refused(make: Any, message: str) -> None:
    refuses(make, message)


def test_published_sizes_add_up() -> None:
    for cells, lists in PUBLISHED_SIZES.items():
        for count, sizes in lists.items():
            assert len(sizes) == count and sum(sizes) == cells
            assert group_sizes(cells, count) == sizes
    assert len(group_sizes(256)) == 20 and len(group_sizes(1024)) == 48


def test_other_sizes_are_scaled_from_the_published() -> None:
    for cells in (1, 2, 7, 36, 49, 256, 300):
        for groups in {1, 2, min(5, cells), cells // 2 or 1, cells}:
            if groups <= cells:
                chosen = group_sizes(cells, groups)
                assert len(chosen) == groups and sum(chosen) == cells and min(chosen) >= 1
    assert scale_sizes((1, 3, 4), 16) == (2, 6, 8) and scale_sizes((2, 2), 8, 4) == (2, 2, 2, 2)
    assert scale_sizes((1, 99), 3, 3) == (1, 1, 1) and scale_sizes((5, 5, 5), 2) == (1, 1)
    half = group_sizes(64, 10)
    assert half[0] == 1 and half[-1] > half[4] > half[0]


class RecordedDraws:
    def __init__(self, record: dict[str, Any]):
        self.first, self.starts = record["first"], list(record["random_starts"])
        self.candidates = record["shuffled_candidates"]

    def shuffle(self, step: int, cells: np.ndarray) -> np.ndarray:
        chosen = np.array(self.candidates[step - 1])
        assert sorted(chosen) == sorted(cells)
        return chosen

    def choose(self, step: int, cells: np.ndarray) -> int:
        chosen = self.starts.pop(0) if step else self.first
        assert chosen in cells
        return chosen


@pytest.mark.parametrize("name", image_cases("lpd", "shuffled_candidates"))
@replays("name", "lpd/")
def test_lpd_orders_equal_the_recorded_ones(name: str) -> None:
    preview, settings = image_case("lpd", name)[0], image_case("lpd", name)[0]["settings"]
    draws, side = RecordedDraws(preview), settings["grid"]
    options = settings["repulsion_threshold"], settings["proximity_threshold"]
    assert lpd_order(side, side, settings["group_sizes"], draws, *options).tolist() == preview["order"]
    assert not draws.starts


def test_equal_neighbourhoods_are_ties() -> None:
    above, below = 2 * 9 + 2, 4 * 9 + 6
    decided = np.ones(81, bool)
    decided[[above, below, above + 8, above + 10, below - 8, below - 10]] = False  # the last four touch the first two
    far = 1 / math.sqrt(2)
    sums = {functools.reduce(operator.add, chosen) for chosen in ([far, 1, far, 1, 1, 1], [1, 1, 1, far, 1, far])}
    assert len(sums) == 2

    class CellFirst:
        def __init__(self, cell: int):
            self.cell = cell

        def shuffle(self, step: int, cells: np.ndarray) -> np.ndarray:
            return np.array(sorted(cells, key=lambda cell: cell != self.cell))

    for cell in (above, below):
        assert lpd_order(9, 9, [5, 1], CellFirst(cell), repulsion=0, decided=decided)[4] == cell


def generate_codes(sampler: Any, **request: Any) -> Any:
    defaults = {"class_labels": [1, 2], "seed": 4, "output_type": "latent"}
    return paradec.generate_images(tiny_masked_image(), sampler=sampler, **(defaults | request))


def committed_cells(out: Any, row: int) -> list[list[int]]:
    return [[position - 1 for r, position, _, _ in step.commits if r == row] for step in out.trace.steps]


@pytest.mark.parametrize(
    ("settings", "steps", "sizes"),
    [
        ({}, None, group_sizes(16)),
        ({}, 7, group_sizes(16, 7)),
        ({}, 1, (16,)),
        ({"groups": 3}, None, group_sizes(16, 3)),
        ({"groups": [1, 5, 10]}, None, (1, 5, 10)),
        ({"height": 4, "width": 4, "groups": [1, 5, 10], "repulsion": 1, "proximity": 2.0}, None, (1, 5, 10)),
    ],
)
def test_the_sampler_commits_the_groups_of_its_order(settings: Any, steps: int | None, sizes: tuple[int, ...]) -> None:
    model = tiny_masked_image()
    sampler = samplers.create("lpd", **settings)
    request = {"seed": 4, "temperature": 1.0, "trace": True, "max_new_tokens": 16}
    request |= {} if steps is None else {"steps": steps}
    prompts = [[model.class_token(label)] for label in (1, 2)]
    out = paradec.generate(model, prompts, sampler=sampler, **request)
    options = {name: value for name, value in settings.items() if name in ("repulsion", "proximity")}
    groups = orders.LPD(sizes, **options).groups(4, 4, draws_from_keys(torch.as_tensor(row_keys([4, 4], prompts))))
    for row in (0, 1):
        assert committed_cells(out, row) == [sorted(part[row].tolist()) for part in groups]


def test_cells_of_the_prompt_count_as_decided() -> None:
    model = tiny_masked_image()
    row = [model.class_token(2), *[3] * 8, *[model.facts.mask_token_id] * 8]
    sampler = samplers.create("lpd", groups=[1, 5, 10], height=4, width=4)
    out = paradec.generate(model, [row], sampler=sampler, seed=4, trace=True)
    decided = np.arange(16) < 8
    sizes = scale_sizes((1, 5, 10), 8)
    order = lpd_order(4, 4, sizes, draws_from_keys(torch.as_tensor(row_keys([4], [row])))[0], decided=decided)
    assert committed_cells(out, 0) == [sorted(part.tolist()) for part in np.split(order, np.cumsum(sizes)[:-1])]
    assert order[0] // 4 == 2


def test_orders_of_rows_do_not_depend_on_the_batch() -> None:
    batch = generate_codes("lpd", steps=5, seed=[4, 5], temperature=1.0)
    for row, label in enumerate((1, 2)):
        expected = generate_codes("lpd", steps=5, seed=4 + row, class_labels=label, temperature=1.0)
        assert torch.equal(expected.codes[0], batch.codes[row])


def test_the_preview_equals_the_next_commits() -> None:
    sampler = samplers.create("lpd", groups=4)
    model = tiny_masked_image()
    state = sampler.start(model, [[model.class_token(1)]], max_new_tokens=16, temperature=1.0)
    while not state.done:
        preview = sampler.preview(state)
        commit = sampler.commit(state, sampler.step(model, state))
        assert sorted(preview[0].tolist()) == [position for _, position, _, _ in commit.to_list()]
