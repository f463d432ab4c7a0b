"""speculators >= 0.5: tokens and masks in an Arrow table (as Hugging Face's `datasets` keeps it on disk), the states of
row i in hidden_states/hs_{i}.safetensors."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from safetensors import SafetensorError

from hidden_states.errors import DataError
from hidden_states.formats import ForeignSample, Format, in_order
from hidden_states.vocab import VocabMap

_TABLE = "data-00000-of-00001.arrow"
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int64()), "loss_mask": pa.list_(pa.int64()), "seq_len": pa.int64()})
_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"}
_INFO = {
    "citation": "", "description": "", "homepage": "", "license": "",
    "features": {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": {"dtype": "int64", "_type": "Value"}},
}  # fmt: skip


class Speculators(Format):
    name, final_norm = "speculators", "pre"

    def files(self, folder: Path) -> list[Path]:
        return in_order(list((folder / "hidden_states").glob("hs_*.safetensors")))

    def read(self, path: Path, folder: Path) -> ForeignSample:
        try:
            data = safetensors.torch.load_file(path)
            ids, states = data["token_ids"], data["hidden_states"]
        except (SafetensorError, OSError, KeyError) as error:
            raise self.refuse(path, f"it cannot be read ({error})", "token_ids [S], hidden_states [S,A+1,H]") from error
        if ids.dim() != 1 or states.dim() != 3 or states.shape[1] < 2 or len(states) != len(ids):
            raise self.refuse(path, f"hidden_states {list(states.shape)} of tokens {list(ids.shape)}", "[S,A+1,H], [S]")
        tokens, masks = _rows(folder)
        number = path.stem.removeprefix("hs_")
        row = int(number) if number.isdecimal() else len(tokens)
        if row >= len(tokens) or tokens[row].as_py() != ids.tolist():
            raise self.refuse(path, f"its tokens are not those of row {number} of the Arrow table")
        try:
            mask = torch.tensor(masks[row].as_py() or [])
        except (RuntimeError, TypeError, ValueError) as error:  # nothing, or words, for a token
            raise self.refuse(path, f"the loss mask in row {number} is none ({error})", "one value a token") from error
        return self.sample(path, folder, ids, mask, states[:, :-1], states[:, -1])

    def write(self, folder: Path, samples: Iterator[ForeignSample], count: int, vocab: VocabMap | None) -> None:
        states = folder / "hidden_states"
        states.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(folder / _TABLE), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as table:
            for number, sample in enumerate(samples):
                assert sample.loss_mask is not None  # our datasets always have one
                ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
                table.write_batch(
                    pa.record_batch({"input_ids": [ids], "loss_mask": [mask], "seq_len": [len(ids)]}, schema=_SCHEMA)
                )
                stacked = torch.cat([sample.aux, sample.final[:, None]], dim=1)
                content = {"token_ids": sample.input_ids, "hidden_states": stacked}
                try:
                    safetensors.torch.save_file(content, states / f"hs_{number}.safetensors")
                except SafetensorError as error:  # a full disk; the tensors themselves are right
                    raise OSError(str(error)) from error
        (folder / "dataset_info.json").write_text(json.dumps(_INFO))
        state: dict[str, Any] = {
            "_data_files": [{"filename": _TABLE}], "_fingerprint": "eyas", "_format_columns": None,
            "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False, "_split": None,
        }  # fmt: skip
        (folder / "state.json").write_text(json.dumps(state))
        if vocab is not None:
            np.save(folder / "d2t.npy", vocab.d2t.numpy())
            np.save(folder / "t2d.npy", vocab.t2d.numpy())


@lru_cache(maxsize=2)
def _rows(folder: Path) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Tokens and masks by row, of all the table's files."""
    try:
        tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in sorted(folder.glob("*.arrow"))]
        table = pa.concat_tables([part.select(["input_ids", "loss_mask"]) for part in tables])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(
            str(folder), f"no Arrow table with input_ids and loss_mask ({error})", "data-*.arrow",
            "Is this a folder of speculators >= 0.5?",
        ) from error  # fmt: skip
    return table["input_ids"], table["loss_mask"]
