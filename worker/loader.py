"""Reading a rank's slices out of a safetensors checkpoint, and nothing else of it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from plait.worker.errors import WeightsError
from plait.worker.parameters import MODEL_DTYPE, Parameter, Slice
from plait.worker.tensors import TORCH_DTYPES

_INDEX = "model.safetensors.index.json"
# Buffers that older checkpoints store though they follow from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


class Checkpoint:
    """The tensors of a checkpoint folder, found by name, read by slice."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._open_files: dict[str, Any] = {}
        self._file_of = self._find()

    @property
    def tensor_names(self) -> set[str]:
        return set(self._file_of)

    def read(self, part: Slice) -> torch.Tensor:
        """The rows that `part` names, on the CPU in the stored dtype.

        Raises:
            WeightsError: the tensor is missing, has another shape, or its file is broken.
        """
        file = self._file_of.get(part.tensor)
        if file is None:
            raise WeightsError(f"{self._folder} has no tensor {part.tensor!r}")
        try:
            stored = self._open(file).get_slice(part.tensor)
            shape = tuple(stored.get_shape())
            if shape != part.stored_shape:
                raise WeightsError(
                    f"{self._folder / file}: {part.tensor!r} has shape {shape}, "
                    f"but config.json makes it {part.stored_shape}"
                )
            index = (*(slice(None),) * part.dim, slice(part.start, part.stop))
            tensor: torch.Tensor = stored[index]
        except SafetensorError as exc:
            raise WeightsError(f"{self._folder / file} cannot be read: {exc}") from exc
        return tensor

    def _find(self) -> dict[str, str]:
        index = self._folder / _INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as exc:
                raise WeightsError(f"{index} is not a safetensors index: {exc}") from exc
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{self._folder} holds no *.safetensors file; other formats are not read"
            )
        return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:  # noqa: ANN401 - safetensors has no types
        if file not in self._open_files:
            path = self._folder / file
            try:
                self._open_files[file] = safe_open(str(path), framework="pt", device="cpu")
            except (SafetensorError, OSError) as exc:
                raise WeightsError(f"{path} cannot be read: {exc}") from exc
        return self._open_files[file]


def load_parameters(
    checkpoint: Checkpoint,
    parameters: Iterable[Parameter],
    *,
    dtype: str,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Read `parameters` on to `device`, by name.

    `progress` is called with the number of elements of each tensor read. Tensors of the model dtype
    are cast to `dtype`; those that must stay float32 are read as such.

    Raises:
        WeightsError: a tensor is missing or has another shape.
    """
    loaded = {}
    for parameter in parameters:
        parts = [checkpoint.read(part) for part in parameter.slices]
        dim = parameter.slices[0].dim
        tensor = (torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]).reshape(
            parameter.shape
        )
        target = TORCH_DTYPES[dtype if parameter.dtype == MODEL_DTYPE else parameter.dtype]
        loaded[parameter.name] = tensor.to(device=device, dtype=target).contiguous()
        if progress is not None:
            progress(tensor.numel())
    return loaded


def check_complete(
    checkpoint: Checkpoint, parameters: Iterable[Parameter], *, tied: Iterable[str] = ()
) -> None:
    """Raise `WeightsError` if the checkpoint holds tensors that no parameter reads.

    `tied` names tensors that may be stored though another one is used in their place.
    """
    used = {part.tensor for parameter in parameters for part in parameter.slices}
    unexpected = sorted(
        name
        for name in checkpoint.tensor_names - used - set(tied)
        if not name.endswith(_IGNORED_SUFFIXES)
    )
    if unexpected:
        more = f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else ""
        raise WeightsError(
            f"the checkpoint holds tensors that config.json does not account for: "
            f"{', '.join(unexpected[:5])}{more}"
        )
