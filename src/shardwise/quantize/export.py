"""Writing a quantized model, for other engines and for this one, and verifying it by loading it.

While the parameters are written, a prompt runs through them in the form in which they will be
loaded. Its logits are the reference for those of the file.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.convert import (
    Converted,
    Progress,
    StreamedWeights,
    find_tokenizer,
    largest_difference,
    prompt_logits,
    random_prompt,
)
from shardwise.formats.families import family_of
from shardwise.formats.gguf.gguf_config import config_metadata
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.gguf.write_gguf import write_gguf
from shardwise.formats.gguf.write_gguf_tokenizer import tokenizer_metadata
from shardwise.formats.huggingface.hf_config import read_config_json
from shardwise.formats.huggingface.quantization_config import parse_quantization_config
from shardwise.formats.huggingface.write_folder import check_vacant, write_folder
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import read_config, source_kind
from shardwise.formats.tokenizers.tokenizer import check_vocabulary
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import Causal
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.params import block_unit, model_specs, num_params, units
from shardwise.quant.format import QuantizedMatrix, dequantize
from shardwise.quant.ggml import BLOCKS
from shardwise.quantize.quant_config import QuantConfig
from shardwise.quantize.quantizer import Quantizer

NamedTensor = tuple[str, Tensor | QuantizedMatrix]


def export(
    source: Path,
    destination: Path,
    quant_config: QuantConfig,
    text: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Converted:
    """Write the model at `source` with the matrices of its blocks quantized, as a folder or a GGUF
    file.

    `text` are the token ids [sequences, tokens] for a calibrated method; `dtype` is the dtype of
    parameters that are not quantized (None: that of the source). At the end the destination is
    loaded, and its logits in fp32 are compared with those of the quantized model. Raises ValueError
    if the source cannot be read or is already quantized, groups do not divide a matrix, the
    destination exists, or logits differ by more than 1e-4 of the largest one; then the destination
    is removed.
    """
    report = progress or (lambda what, done: None)
    check_unquantized(source)
    config = read_config(source)
    check_destination(destination, quant_config, config)
    with closing(open_weights(source, config)) as reader:
        dtype = dtype or reader.dtype
        reference = StreamedReference(config, dtype)
        quantizer = Quantizer(config, quant_config, dtype, device)
        weights = StreamedWeights(reader, model_specs(config), dtype)
        tensors = reference.observe(quantizer.parameters(weights, text, report))
        files = write_quantized(source, destination, config, quant_config, tensors, dtype)
    report("checking", 0.5)
    try:
        logits = prompt_logits(destination, read_config(destination), dtype)
        difference = largest_difference(logits, reference.logits(), source, destination)
    except ValueError:
        destination.unlink() if quant_config.gguf else shutil.rmtree(destination)
        raise
    report("checking", 1.0)
    return Converted(files, num_params(model_specs(config)), difference)


def check_unquantized(source: Path) -> None:
    """Raise ValueError if the model at `source` is quantized."""
    kinds: set[str] = set()
    if source_kind(source) == "gguf":
        kinds = {
            tensor.kind
            for tensor in read_gguf(source).tensors.values()
            if BLOCKS[tensor.kind].num_elements > 1
        }
    elif (source / "config.json").is_file():
        format = parse_quantization_config(read_config_json(source), str(source / "config.json"))
        kinds = {format.method} if format else set()
    if kinds:
        raise ValueError(
            f"{source} is already quantized ({', '.join(sorted(kinds))}), and quantizing it again "
            "adds a second rounding error; use the original model, or convert it without --quant "
            "first"
        )


def check_destination(destination: Path, quant_config: QuantConfig, config: ModelConfig) -> None:
    """Raise ValueError unless the quantized model can be written to `destination`."""
    if quant_config.gguf:
        if destination.suffix != ".gguf":
            raise ValueError(f"{destination} must end in .gguf, since --quant gguf writes one file")
        if destination.exists():
            raise ValueError(f"{destination} already exists; choose another file")
        config_metadata(config)
        return
    check_vacant(destination)
    if destination.suffix == ".gguf":
        raise ValueError(
            f"{destination} would become a folder; --quant gguf:q4_0, gguf:q4_1 and gguf:q8_0 "
            f"write "
            "GGUF files"
        )
    if family_of(config).folder.transposed:
        raise ValueError(
            f"folders of {config.family} cannot be quantized, since they store matrices as "
            "[in, out]; a GGUF file can: --quant gguf:q8_0"
        )


def write_quantized(
    source: Path,
    destination: Path,
    config: ModelConfig,
    quant_config: QuantConfig,
    tensors: Iterable[NamedTensor],
    dtype: torch.dtype,
) -> tuple[str, ...]:
    """Write the tensors in the format of `quant_config` and return the names of the files."""
    tokenizer, files = find_tokenizer(source)
    if quant_config.gguf is None:
        specs = model_specs(config)
        return write_folder(
            destination, config, specs, tensors, dtype, tokenizer, files, scheme=quant_config.scheme
        )
    if source_kind(source) == "gguf":
        metadata = {
            key: each
            for key, each in read_gguf(source).metadata.items()
            if key.startswith("tokenizer.")
        }
    else:
        if tokenizer is not None:
            check_vocabulary(tokenizer, config.vocab_size)
        metadata = tokenizer_metadata(tokenizer, config.vocab_size)
    write_gguf(destination, config, tensors, quant_config.gguf, dtype, metadata)
    return (destination.name,)


class StreamedReference:
    """The logits of a random prompt, computed one block at a time while the parameters of a
    quantized model pass through on their way to a file."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._decoder = Transformer(config, REFERENCE)
        self._tokens = random_prompt(config)
        self._positions = torch.arange(self._tokens.shape[1])[None]
        self._pending: dict[str, Tensor | QuantizedMatrix] = {}
        self._x: Tensor | None = None

    def observe(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the parameters unchanged, and run each block once it is complete."""
        last_of_block = {
            specs[-1].name: specs[-1].layer for specs in units(model_specs(self.config)).values()
        }
        for name, tensor in tensors:
            stored = tensor if isinstance(tensor, QuantizedMatrix) else tensor.to(self.dtype)
            self._pending[name] = stored
            layer = last_of_block.get(name)
            if layer is not None:
                self._run(layer)
            yield name, tensor

    @torch.no_grad()
    def _run(self, layer: int) -> None:
        prefix = f"{block_unit(layer)}."
        names = [name for name in self._pending if name.startswith(prefix)]
        block = {name: self._pending.pop(name) for name in names}
        weights = BlockWeights.of(self._reloaded(block), layer)
        rope = self._decoder.rope_tables(self._positions, torch.float32)
        attend = Causal(self.config, causal_attention)
        self._x = self._decoder.block(self._embedded(), layer, weights, rope, attend)

    def _embedded(self) -> Tensor:
        if self._x is not None:
            return self._x
        return self._decoder.embed(self._reloaded(self._pending), self._tokens, self._positions)

    def _reloaded(self, weights: Mapping[str, Tensor | QuantizedMatrix]) -> dict[str, Tensor]:
        """Return weights as loading them gives: rounded to `dtype`, then in fp32."""
        return {
            name: dequantize(each, self.dtype).float()
            if isinstance(each, QuantizedMatrix)
            else each.float()
            for name, each in weights.items()
        }

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits [1, T, V] in fp32. All parameters must have passed."""
        weights = self._reloaded(self._pending)
        return self._decoder.logits(weights, self._decoder.final(weights, self._embedded()))
