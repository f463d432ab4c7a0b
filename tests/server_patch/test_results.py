"""What a model's forward gives while it captures: told apart from the stock answer, whatever its form."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eyas_capture import contract
from tests.server_patch.bench import Bench, H, Model, Request


class Other(Model):
    """A model that returns something else when it captures: `result` of its final state. Stock, it is as ever."""

    def __init__(self, like: Model, result: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(packed=True)
        self.llama, self.result = like.llama, result

    def forward(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any) -> Any:
        result = super().forward(input_ids, positions, forward_batch)
        return self.result(result[0]) if isinstance(result, tuple) else result


@pytest.mark.parametrize("tried", [False, True], ids=["first pass", "later"])
@pytest.mark.parametrize(
    "result",
    [
        lambda hidden: hidden,
        lambda hidden: (hidden, torch.zeros(len(hidden), H)),
        lambda hidden: (hidden, [torch.zeros(len(hidden), H)] * 3),
        lambda hidden: (hidden[:-1], torch.zeros(len(hidden) - 1, 2 * H)),
        lambda hidden: (hidden, torch.zeros(len(hidden), 2 * H), None),
        lambda hidden: ([hidden], torch.zeros(len(hidden), 2 * H)),
        lambda hidden: (),
    ],
    ids=["nothing captured", "one block", "three blocks", "a row short", "rows in the middle", "a list", "nothing"],
)
def test_a_model_that_captures_something_else_ends_capture_and_not_the_server(
    bench: Bench, result: Callable[[torch.Tensor], Any], tried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen on the first pass, it is answered by the stock path; later it is anybody's guess, and no error."""
    begun, r = Request("begun", 9), Request("r", 5)
    if tried:
        bench.run([(begun, 0, 4)])
    model = Other(bench.model, result)
    batch = bench.announce([(r, 0, 5)])
    returned = bench.capture.forward(model.forward, (batch.input_ids, None, batch), {})
    if not tried:
        assert torch.equal(returned, batch.input_ids[:, None].repeat(1, H).float())
    bench.run([(Request("later", 3), 0, 3)])
    assert {name: record["incomplete_reason"] for name, record in bench.end().items()} == (
        {"begun": contract.CAPTURE_FAILED} if tried else {}
    )
    written = json.loads((bench.folder / contract.WRITER_FILE).read_text())
    assert written["state"] == contract.BROKEN and written["refused"]
    assert "EYAS CAPTURE HAS STOPPED" in caplog.text


@pytest.mark.parametrize("before_norm", [None, torch.zeros(5, H)], ids=["None", "tensor"])
def test_a_model_that_returns_more_than_its_final_state_is_given_back_all_of_it(
    bench: Bench, before_norm: torch.Tensor | None
) -> None:
    """mimo_v2.py: (state, state before the norm), and the captured rows behind them."""
    plain = bench.model.forward
    batch = bench.announce([(Request("r", 5), 0, 5)])

    def forward(*args: Any) -> Any:
        hidden, *captured = plain(*args)
        return hidden, before_norm, *captured

    hidden, second = bench.capture.forward(forward, (batch.input_ids, None, batch), {})
    assert torch.equal(hidden[:, 0], batch.input_ids.float()) and second is before_norm
    assert bench.end()["r"]["complete"]
